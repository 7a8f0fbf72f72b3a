"""Which entries are large enough: exact thresholds, and thresholds carried from step to step.

A threshold of infinity selects nothing: there is no threshold yet. A threshold of 0 selects all
values but zeros. Zeros are never selected: sending one changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import control, for_device, numbers
from ..kernels.numbers import LEADING_BITS, from_bits, threshold_bits
from ..wire.message import Entries

TOLERANCE = 0.1
"""Share of k by which a step may fall short before the threshold is evaluated anew at once."""
AIM = 1.2
"""A carried threshold aims at AIM * k candidates. Too many are cheap: the k largest are among
them, so the exact ones are picked from a short list. Too few cost another pass."""
TREND_LIMIT = control.TREND_LIMIT / 256
"""Largest trend, either way."""


@dataclass(frozen=True)
class Carried:
    """A threshold carried from step to step, and the trend that it follows."""

    value: float = math.inf
    """Threshold to try in the next step."""
    trend: float = 0.0
    """Expected change per step, in octaves."""

    def after(self, right: float, dtype: torch.dtype) -> Carried:
        """The forecast after a step for which `right` would have been the right threshold.

        Args:
            dtype: of the values that it is compared with.
        """
        before = self.bits(dtype)
        octave, infinity = numbers.OCTAVE[dtype], numbers.infinity(dtype)
        return Carried.of(
            control.forecast(threshold_bits(right, dtype), *before, octave, infinity), dtype
        )

    def bits(self, dtype: torch.dtype) -> tuple[int, int]:
        """The threshold and its trend, as `control.forecast` takes them."""
        return threshold_bits(self.value, dtype), round(self.trend * numbers.OCTAVE[dtype])

    @staticmethod
    def of(bits: tuple[int, int], dtype: torch.dtype) -> Carried:
        """What `bits` gave."""
        value, trend = bits
        return Carried(from_bits(value, dtype), trend / numbers.OCTAVE[dtype])


NO_THRESHOLD = Carried()
"""Before the first sparse step."""


def aim(k: int, numel: int) -> int:
    """The number of candidates to look for."""
    return min(numel, math.ceil(AIM * k))


def keep_from(
    candidates: Entries, threshold: float, k: int, wanted: int
) -> tuple[Entries, float, float]:
    """The k largest of all entries that reach a threshold, and what to learn from them.

    Returns:
        The entries: all candidates if they are not more than k.
        A magnitude that they all reach, and no candidate left out exceeds.
        The threshold that would have selected about `wanted` candidates.
    """
    count = len(candidates)
    if count <= k:
        right = lowered(threshold, count, wanted, candidates.values.dtype)
        if count >= wanted:
            right, _ = kth_largest(candidates.values, wanted)
        return candidates, threshold, right
    kept, limit, about = _keep_largest(candidates, k, wanted)
    if count < wanted:
        about = lowered(threshold, count, wanted, candidates.values.dtype)
    return kept, limit, about


def lowered(threshold: float, count: int, wanted: int, dtype: torch.dtype) -> float:
    """The threshold to try after one that has found `count` candidates, fewer than wanted."""
    if not 0 < threshold < math.inf:
        return threshold
    few, many = numbers.logarithm(max(1, count), dtype), numbers.logarithm(wanted, dtype)
    return from_bits(control.lowered(threshold_bits(threshold, dtype), few, many), dtype)


@functools.cache
def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a type: as a threshold it selects all but zeros."""
    return from_bits(1, dtype)


def select(dense: Tensor, threshold: float) -> Entries:
    """The entries with |value| >= threshold, except zeros."""
    threshold = max(threshold, smallest(dense.dtype))
    return Entries(*for_device(dense.device).select(dense, threshold))


def keep(entries: Entries, threshold: float, ties: int) -> Entries:
    """The entries above the threshold, and the first `ties` of those that equal it."""
    kernels = for_device(entries.values.device)
    return Entries(*kernels.keep(entries.indices, entries.values, threshold, ties))


def keep_largest(entries: Entries, k: int) -> tuple[Entries, float]:
    """The k largest entries (equal ones by index), and the magnitude of the smallest of them."""
    kept, threshold, _ = _keep_largest(entries, k)
    return kept, threshold


def _keep_largest(entries: Entries, k: int, wanted: int = 0) -> tuple[Entries, float, float]:
    kernels = for_device(entries.values.device)
    *kept, threshold, about = kernels.keep_largest(entries.indices, entries.values, k, wanted)
    return Entries(*kept), threshold, about


def kth_largest(
    values: Tensor,
    k: int,
    digit_bits: int = 0,
    sum_counts: Callable[[Tensor], None] | None = None,
) -> tuple[float, int]:
    """The exact k-th largest magnitude, by histograms of one digit after the other.

    1. Count how often each value of the leading digit occurs.
    2. From the top, find the digit in whose bin the k-th largest lies. All values above the
       bin are among the k.
    3. Go on with the next digit, inside that bin, until none is left.

    Args:
        values: any number of values, in any order.
        k: at least 1.
        digit_bits: bits of a digit; there are 2**digit_bits bins. 0 is for values of this rank
            alone: a long digit first, which leaves few values for the others.
        sum_counts: sums a tensor of counts over ranks, in place. Then the values of all ranks
            count as one list, and only counts travel.

    Returns:
        The magnitude, and how many of the values that equal it belong to the k largest.
        (0.0, 0) if there are fewer than k values that are not zero.
    """
    histogram = for_device(values.device).histogram
    first, others = (digit_bits, digit_bits) if digit_bits else (LEADING_BITS, 9)
    prefix = 0
    for shift, bits in _digits(values.dtype, first, others):
        counts = histogram(values, prefix, shift, bits)
        if sum_counts is not None:
            sum_counts(counts)
        found = _find(counts, k)
        if found is None:
            return 0.0, 0
        digit, above = found
        prefix, k = (prefix << bits) | digit, k - above
    return (from_bits(prefix, values.dtype), k) if prefix else (0.0, 0)


def _find(counts: Tensor, k: int) -> tuple[int, int] | None:
    """The bin that the k-th is in, from the top, and how many are above it."""
    from_top = counts.flip(0).cumsum(0)
    bins_above = int((from_top < k).sum())
    if bins_above == from_top.numel():
        return None
    above = int(from_top[bins_above - 1]) if bins_above else 0
    return from_top.numel() - 1 - bins_above, above


def is_due(sparse_steps: int, interval: int) -> bool:
    """Whether something done every `interval` sparse steps is due.

    Residuals start at zero and grow at first, so the first measurements go stale at once. In the
    first interval it is due at steps 0, 1, 2, 4, 8 ... too.
    """
    settling = sparse_steps < interval and sparse_steps & (sparse_steps - 1) == 0
    return settling or sparse_steps % interval == 0


def _digits(dtype: torch.dtype, first: int, others: int) -> Iterator[tuple[int, int]]:
    """(shift, bits) of each digit of a magnitude, the leading one first."""
    high, bits = dtype.itemsize * 8 - 1, first
    while high > 0:
        bits = min(bits, high)
        high -= bits
        yield high, bits
        bits = others
