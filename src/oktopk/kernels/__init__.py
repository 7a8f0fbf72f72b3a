"""Hot loops over flat tensors, for each kind of device.

`reference/` is plain torch. It runs on any device, and it is the specification. A fast version,
such as `cpu/`, replaces any of its functions and inherits the others. Callers ask `for_device` and
never look at the device themselves.
"""

from __future__ import annotations

import functools

import torch

from .reference import codes, optimizer, selection
from .reference.step import Step as Step


class Kernels:
    """The reference kernels. A subclass may replace any of them, with the same signature.

    Magnitudes are compared as integers; see `numbers.magnitude`. Indexes are int32 where they fit
    and int64 otherwise. Lists of entries are sorted by index and name each index at most once.
    """

    @staticmethod
    def prepare(dtype: torch.dtype, numel: int, steps: bool, device: torch.device) -> None:
        """Do now what would make the first calls slow, for vectors of `numel` values.

        Args:
            steps: whether there will be fixed-size steps.
        """

    Step: type[Step] = Step
    """The phases of a fixed-size step; see `reference/step.py`."""

    accumulate = staticmethod(selection.accumulate)
    offer = staticmethod(selection.offer)
    select = staticmethod(selection.select)
    histogram = staticmethod(selection.histogram)
    keep = staticmethod(selection.keep)
    keep_largest = staticmethod(selection.keep_largest)
    merge = staticmethod(selection.merge)
    add_at = staticmethod(selection.add_at)
    scatter = staticmethod(selection.scatter)
    take_common = staticmethod(selection.take_common)
    sum_select = staticmethod(selection.sum_select)

    pack_elias_fano = staticmethod(codes.pack_elias_fano)
    unpack_elias_fano = staticmethod(codes.unpack_elias_fano)
    pack_bits = staticmethod(codes.pack_bits)
    unpack_bits = staticmethod(codes.unpack_bits)
    quantise = staticmethod(codes.quantise)
    dequantise = staticmethod(codes.dequantise)
    checksum = staticmethod(codes.checksum)

    step_square = staticmethod(optimizer.step_square)
    adam = staticmethod(optimizer.adam)


def for_device(device: torch.device) -> type[Kernels]:
    """The fastest kernels for `device`."""
    return for_type(device.type)


@functools.cache
def for_type(kind: str) -> type[Kernels]:
    """The fastest kernels for a type of device, imported on first use: numba takes a second."""
    if kind == "cpu":
        from .cpu import CpuKernels

        return CpuKernels
    if kind == "cuda":
        try:
            from .gpu import GpuKernels
        except ImportError:  # without Triton
            return Kernels
        return GpuKernels
    return Kernels
