"""The kernels for CUDA: Triton loops for the fixed-size step.

How they are fast: a phase is a chain of launches whose grids depend on the plan alone, so the host
never waits. Selection is three passes that count the digits of magnitudes, and one that writes what
reaches the limit. Nothing is sorted, and a gradient is read a few times, in order.

How they are safe: all numbers that programs share are integers, so a result does not depend on
their order. No program reads what another one of the same launch writes. Numbers from messages are
checked before they become addresses.

What they do not support, such as float64 or other wire formats, the reference does.
"""

from __future__ import annotations

import torch

from .. import Kernels
from .rehearsal import rehearse
from .step import GpuStep


class GpuKernels(Kernels):
    """The reference documents each function."""

    Step = GpuStep

    @staticmethod
    def prepare(dtype: torch.dtype, numel: int, steps: bool, device: torch.device) -> None:
        if steps and dtype == torch.float32:
            rehearse(device)
