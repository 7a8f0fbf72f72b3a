"""The specification of every kernel, in plain torch, on any device.

Magnitudes are compared as integers: without its sign bit, an IEEE number orders like the
integer with the same bits. So infinities and NaNs are the largest of all (never lost, always
found), denormals are ordinary numbers, and no comparison depends on rounding.

Indexes are int32 where they fit and int64 otherwise; lists of entries are sorted by index
and name each index at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def index_dtype(numel: int) -> torch.dtype:
    """The smallest integer that can name each of `numel` elements."""
    return torch.int32 if numel <= 2**31 - 1 else torch.int64


def magnitude(values: Tensor) -> Tensor:
    """|values| as integers of the same width, in the same order."""
    bits = values.view(_BITS[values.dtype])
    return bits & torch.iinfo(bits.dtype).max


def threshold_bits(threshold: float, dtype: torch.dtype) -> int:
    """|threshold| rounded to `dtype`, as an integer to compare magnitudes with."""
    return int(magnitude(torch.tensor(threshold, dtype=dtype, device="cpu")))


def accumulate(
    residual: Tensor, gradient: Tensor, out: Tensor, threshold: float
) -> tuple[Tensor, Tensor, bool]:
    """out = residual + gradient, and the entries of `out` that reach the threshold.

    Returns their indexes and values, and whether all of `out` is finite.
    """
    torch.add(residual, gradient, out=out)
    indices, values = select(out, threshold)
    return indices, values, bool(torch.isfinite(out).all())


def select(dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Indexes and values of the elements with |element| >= threshold."""
    chosen = magnitude(dense) >= threshold_bits(threshold, dense.dtype)
    indices = chosen.nonzero().flatten()
    return indices.to(index_dtype(dense.numel())), dense[indices]


def histogram(values: Tensor, prefix: int, shift: int, bits: int) -> Tensor:
    """Counts of one digit of the magnitudes: the `bits` bits from bit `shift` upward.

    Only magnitudes whose bits above that digit equal `prefix` are counted.
    """
    digits = magnitude(values) >> shift
    digits = digits[(digits >> bits) == prefix] & (2**bits - 1)
    return torch.bincount(digits, minlength=2**bits)


def keep(indices: Tensor, values: Tensor, threshold: float, ties: int) -> tuple[Tensor, Tensor]:
    """The entries above the threshold, and the first `ties` of those that equal it."""
    bits = magnitude(values)
    limit = threshold_bits(threshold, values.dtype)
    equal = bits == limit
    chosen = (bits > limit) | (equal & (equal.cumsum(0) <= ties))
    return indices[chosen], values[chosen]


def merge(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of two sparse vectors; an index that both name gets value + other value."""
    union, position = torch.unique(torch.cat([indices, other_indices]), return_inverse=True)
    total = torch.zeros(union.numel(), dtype=values.dtype, device=values.device)
    total[position[: indices.numel()]] = values
    # Indexes are unique within a list, so no two additions meet: deterministic on any device.
    total[position[indices.numel() :]] += other_values
    return union, total


def add_at(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """dense[indices] += values."""
    dense[indices] += values


def clear_common(dense: Tensor, indices: Tensor, applied: Tensor) -> None:
    """dense[i] = 0 for every i that occurs in both lists."""
    if indices.numel() == 0 or applied.numel() == 0:
        return
    position = torch.searchsorted(applied, indices).clamp_(max=applied.numel() - 1)
    dense[indices[applied[position] == indices]] = 0
