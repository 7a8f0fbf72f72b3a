"""Tensors as loops see them: numpy arrays, bits and limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_UNSIGNED: dict[Any, Any] = {np.float32: np.uint32, np.float64: np.uint64}
_LARGE = 1 << 22
"""Bytes of a vector that is more than the cache of a core holds."""


def as_bits(array: Any) -> Any:
    """Floats as unsigned integers of the same bits."""
    assert array.flags.c_contiguous  # loops look at memory, not at strides
    return array.view(_UNSIGNED[array.dtype.type])


def as_unsigned(tensor: Tensor) -> Any:
    """Signed integers as unsigned ones of the same bits."""
    array = tensor.numpy()
    return array.view(f"u{array.itemsize}")


def as_flat(tensors: tuple[Tensor, ...]) -> list[Any] | None:
    """Their elements as they lie in memory; None if they do not lie densely, in the same order."""
    first = tensors[0]
    if first.dtype not in (torch.float32, torch.float64) or len({t.dtype for t in tensors}) > 1:
        return None
    if all(t.is_contiguous() for t in tensors):
        return [t.detach().numpy().reshape(-1) for t in tensors]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    same = all(t.stride() == first.stride() for t in tensors) and first.ndim in layouts
    if not (same and first.is_contiguous(memory_format=layouts[first.ndim])):
        return None
    return [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]


def alignment(array: Any, start: int) -> int:
    """How far behind `start` whole vectors can be written past the caches.

    -1 if the array is small: then it had better stay in the caches.
    """
    if array.nbytes < _LARGE:
        return -1
    return int((-array.ctypes.data // array.itemsize - start) % (64 // array.itemsize))


def limits(threshold: float, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The threshold's bits, the mask that removes the sign, and the bits of infinity."""
    kind = np.float32 if dtype == torch.float32 else np.float64
    with np.errstate(over="ignore"):  # it is infinite then
        limit, infinity = (kind(number).view(_UNSIGNED[kind]) for number in (threshold, math.inf))
    mask = _UNSIGNED[kind](np.iinfo(_UNSIGNED[kind]).max >> 1)
    return limit & mask, mask, infinity
