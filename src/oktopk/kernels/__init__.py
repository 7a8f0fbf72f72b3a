"""Hot loops over flat tensors, one module per kind of device.

`reference.py` is plain torch, runs on any device and is the specification; `cpu.py` is the
fast version for CPUs. All modules offer the same functions, and `for_device` picks one, so
callers never ask what they run on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """What a kernel module offers; `reference.py` documents each function."""

    def prepare(self, dtype: torch.dtype, numel: int) -> None: ...

    def accumulate(
        self, residual: Tensor, gradient: Sequence[Tensor], out: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor, list[bool]]: ...

    def select(self, dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...

    def histogram(self, values: Tensor, prefix: int, shift: int, bits: int) -> Tensor: ...

    def keep(
        self, indices: Tensor, values: Tensor, threshold: float, ties: int
    ) -> tuple[Tensor, Tensor]: ...

    def merge(
        self, indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def add_at(self, dense: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def scatter(self, parts: Sequence[Tensor], indices: Tensor, values: Tensor) -> None: ...

    def take_common(
        self, dense: Tensor, indices: Tensor, values: Tensor, applied: Tensor
    ) -> None: ...

    def sum_select(
        self,
        indices: Tensor,
        values: Tensor,
        ends: list[int],
        low: int,
        high: int,
        threshold: float,
    ) -> tuple[Tensor, Tensor]: ...

    def step_square(
        self, gradient: Tensor, moment: Tensor, *, grown: float, least: float
    ) -> Tensor: ...

    def adam(
        self,
        parameter: Tensor,
        gradient: Tensor,
        average: Tensor,
        moment: Tensor,
        *,
        sign: float,
        grown: float,
        least: float,
        weight: float,
        decay: float,
        shrink: float,
        unbias: float,
        eps: float,
        lr: float,
    ) -> None: ...

    def count_gaps(self, indices: Tensor, low: int) -> tuple[int, int]: ...

    def pack_gaps(self, indices: Tensor, low: int, out: Tensor) -> None: ...

    def unpack_gaps(self, stream: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor: ...

    def pack_bits(self, indices: Tensor, low: int, out: Tensor) -> None: ...

    def unpack_bits(self, bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor: ...

    def quantise(self, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor: ...

    def checksum(self, words: Tensor) -> int: ...


def for_device(device: torch.device) -> Kernels:
    """The fastest kernels for `device`."""
    return _for_type(device.type)


@functools.cache
def _for_type(kind: str) -> Kernels:
    """Imported on first use: numba takes a second to load."""
    if kind == "cpu":
        from . import cpu

        return cpu
    from . import reference

    return reference
