"""Kernels that select entries and put them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import numbers
from ..control import spread_evenly
from ..numbers import magnitude, threshold_bits


def accumulate(
    residual: Tensor, gradient: Sequence[Tensor], out: Tensor, threshold: float
) -> tuple[Tensor, Tensor, list[bool]]:
    """out = residual + gradient, and the entries of `out` that reach the threshold.

    Returns their indexes and values, and for each part of the gradient whether its sum is finite.
    """
    sizes = [part.numel() for part in gradient]
    sums = out.split(sizes)
    for before, part, after in zip(residual.split(sizes), gradient, sums, strict=True):
        torch.add(before, part, out=after)
    finite = torch.stack([torch.isfinite(part).all() for part in sums])
    return *select(out, threshold), finite.tolist()


def offer(
    residual: Tensor,
    gradient: Sequence[Tensor],
    out: Tensor,
    threshold: float,
    k: int,
    wanted: int,
) -> tuple[Tensor, Tensor, list[bool], int, float, float]:
    """`accumulate`, and of the entries that it finds those that `keep_largest` keeps.

    Returns:
        The indexes and values: all of them if there are no more than k.
        For each part of the gradient whether its sum is finite.
        How many entries reach the threshold.
        The last two results of `keep_largest`; zeros if there are no more than k.
    """
    indices, values, finite = accumulate(residual, gradient, out, threshold)
    found = indices.numel()
    if found <= k:
        return indices, values, finite, found, 0.0, 0.0
    indices, values, limit, about = keep_largest(indices, values, k, wanted)
    return indices, values, finite, found, limit, about


def select(dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Indexes and values of the elements with |element| >= threshold."""
    chosen = magnitude(dense) >= threshold_bits(threshold, dense.dtype)
    indices = chosen.nonzero().flatten()
    return indices.to(numbers.index_dtype(dense.numel())), dense[indices]


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


def keep_largest(
    indices: Tensor, values: Tensor, k: int, wanted: int = 0
) -> tuple[Tensor, Tensor, float, float]:
    """The k largest entries, equal ones by index, without zeros.

    Args:
        wanted: 0, or another rank, counted from the largest.

    Returns:
        The indexes and values.
        The magnitude of the smallest of them; 0 if there are no more than k.
        About the magnitude of rank `wanted`; 0 if there is none.
    """
    bits = magnitude(values)
    ordered = bits.sort(descending=True).values
    limit = int(ordered[k - 1]) if k <= bits.numel() else 0
    threshold = numbers.from_bits(limit, values.dtype)
    ties = k - int((bits > limit).sum()) if limit else 0
    about = 0.0
    if 0 < wanted <= bits.numel():
        digits = bits >> numbers.leading_shift(values.dtype)
        digit = int(ordered[wanted - 1]) >> numbers.leading_shift(values.dtype)
        above, inside = int((digits > digit).sum()), int((digits == digit).sum())
        shift = numbers.leading_shift(values.dtype)
        about = numbers.from_bits(spread_evenly(digit, above, inside, wanted, shift), values.dtype)
    return *keep(indices, values, threshold, ties), threshold, about


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


def scatter(parts: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Write the entries, and zeros everywhere else, to a vector that lies in `parts`."""
    stops = list(itertools.accumulate(part.numel() for part in parts))
    cuts = torch.tensor(stops, dtype=indices.dtype, device=indices.device)
    begin = 0
    for part, stop, end in zip(
        parts, stops, torch.searchsorted(indices, cuts).tolist(), strict=True
    ):
        part.zero_()
        part[indices[begin:end] - (stop - part.numel())] = values[begin:end]
        begin = end


def take_common(dense: Tensor, indices: Tensor, values: Tensor, applied: Tensor) -> None:
    """dense[i] -= value for every entry whose index occurs in `applied` as well."""
    if indices.numel() == 0 or applied.numel() == 0:
        return
    position = torch.searchsorted(applied, indices).clamp_(max=applied.numel() - 1)
    common = applied[position] == indices
    dense[indices[common]] -= values[common]


def sum_select(
    indices: Tensor, values: Tensor, ends: list[int], low: int, high: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """The entries of the sum of several lists that reach the threshold.

    Args:
        indices, values: the lists, one after the other.
        ends: where each list ends. Values of the same index are added in the order of the lists.
        low, high: all indexes are at least `low` and below `high`.
    """
    sums = torch.zeros(high - low, dtype=values.dtype, device=values.device)
    start = 0
    for end in ends:
        sums[(indices[start:end] - low).long()] += values[start:end]
        start = end
    found, chosen = select(sums, threshold)
    return found.to(indices.dtype) + low, chosen
