"""Tensors as loops see them: numpy arrays, bits and limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_UNSIGNED: dict[Any, Any] = {np.float32: np.uint32, np.float64: np.uint64}
_LIMITS: dict[torch.dtype, tuple[Any, ...]] = {
    dtype: (kind, word, float(np.finfo(kind).max), word(np.iinfo(word).max >> 1), kind(math.inf))
    for dtype, (kind, word) in zip((torch.float32, torch.float64), _UNSIGNED.items(), strict=True)
}
"""Of each type: its numpy type, that of its bits, its largest number, a mask of all bits but the
sign, and infinity."""
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
    if first.dtype not in _LIMITS or len({t.dtype for t in tensors}) > 1:
        return None
    if all(t.is_contiguous() for t in tensors):
        return [t.detach().numpy().reshape(-1) for t in tensors]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    same = all(t.stride() == first.stride() for t in tensors) and first.ndim in layouts
    if not (same and first.is_contiguous(memory_format=layouts[first.ndim])):
        return None
    return [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]


def alignment(tensor: Tensor, start: int) -> int:
    """How far behind `start` whole vectors can be written past the caches.

    -1 if the tensor is small: then it had better stay in the caches.
    """
    if tensor.nbytes < _LARGE:
        return -1
    return (-tensor.data_ptr() // tensor.itemsize - start) % (64 // tensor.itemsize)


def limits(threshold: float, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The threshold's bits, the mask that removes the sign, and the bits of infinity."""
    kind, word, most, mask, infinity = _LIMITS[dtype]
    # The smallest number that rounds to infinity would make numpy warn.
    limit = kind(threshold) if threshold <= most else infinity
    return limit.view(word) & mask, mask, infinity.view(word)
