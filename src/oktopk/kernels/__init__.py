"""Hot loops over flat tensors, one module per kind of device.

`reference.py` is plain torch, runs on any device and is the specification; `cpu.py` is the
fast version for CPUs. All modules offer the same functions, and `for_device` picks one, so
callers never ask what they run on.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """What a kernel module offers; `reference.py` documents each function."""

    def accumulate(
        self, residual: Tensor, gradient: Tensor, out: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor, bool]: ...

    def select(self, dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...

    def histogram(self, values: Tensor, prefix: int, shift: int, bits: int) -> Tensor: ...

    def keep(
        self, indices: Tensor, values: Tensor, threshold: float, ties: int
    ) -> tuple[Tensor, Tensor]: ...

    def merge(
        self, indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def add_at(self, dense: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def clear_common(self, dense: Tensor, indices: Tensor, applied: Tensor) -> None: ...


def for_device(device: torch.device) -> Kernels:
    """The fastest kernels for `device`. Imported on first use: numba takes a second to load."""
    if device.type == "cpu":
        from . import cpu

        return cpu
    from . import reference

    return reference
