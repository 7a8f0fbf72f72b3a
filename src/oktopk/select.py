"""Which entries are large enough: exact thresholds, and thresholds carried from step to step.

A threshold of infinity selects nothing (there is none yet); a threshold of 0 selects whatever
is not zero. Zeros are never selected: to send one changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .kernels import for_device
from .wire import Entries

TOLERANCE = 0.1
"""Share by which a count may differ from k before the threshold is evaluated anew at once."""
SLACK = 0.9
"""Factor that makes a carried threshold low enough to find more than k candidates."""
GAIN = 0.1
"""Exponent of the controller. It follows residuals that grow and shrink with a few percent of
error; plain reuse (0) drifts by 70 %, and from about 0.3 on it oscillates."""


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number of a type: as a threshold it selects all but zeros."""
    return float(torch.tensor(1, dtype=_integers(dtype)).view(dtype))


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
    threshold, ties = kth_largest(entries.values, k)
    return keep(entries, threshold, ties), threshold


def kth_largest(
    values: Tensor,
    k: int,
    digit_bits: int = 0,
    sum_counts: Callable[[Tensor], None] | None = None,
) -> tuple[float, int]:
    """The exact k-th largest magnitude, by histograms of one digit after the other.

    1. Count how often each value of the leading digit occurs.
    2. From the top, find the digit in whose bin the k-th largest lies; what is above the bin
       is certainly among the k.
    3. Go on with the next digit, inside that bin, until none is left.

    Args:
        values: any number of values, in any order.
        k: at least 1.
        digit_bits: bits of a digit; there are 2**digit_bits bins. 0 chooses by the number of
            values: each pass over them should cost more than its bins.
        sum_counts: sums a tensor of counts over ranks, in place. Then the values of all ranks
            count as one list, and only counts travel.

    Returns:
        The magnitude, and how many of the values that equal it belong to the k largest.
        (0.0, 0) if there are fewer than k values that are not zero.
    """
    histogram = for_device(values.device).histogram
    digit_bits = digit_bits or (16 if values.numel() > 1 << 20 else 11)
    prefix, remaining = 0, k
    for shift, bits in _digits(values.dtype, digit_bits):
        counts = histogram(values, prefix, shift, bits)
        if sum_counts is not None:
            sum_counts(counts)
        from_top = counts.flip(0).cumsum(0)
        bins_above = int((from_top < remaining).sum())
        if bins_above == from_top.numel():
            return 0.0, 0
        if bins_above:
            remaining -= int(from_top[bins_above - 1])
        prefix = (prefix << bits) | (from_top.numel() - 1 - bins_above)
    if prefix == 0:
        return 0.0, 0
    return float(torch.tensor(prefix, dtype=_integers(values.dtype)).view(values.dtype)), remaining


def is_off(count: int, k: int, threshold: float) -> bool:
    """Whether a carried threshold selected too many, or too few although there are more."""
    too_few = count < (1 - TOLERANCE) * k and threshold > 0
    return too_few or count > (1 + TOLERANCE) * k


def corrected(threshold: float, count: int, k: int) -> float:
    """The threshold for the next step: higher if this one selected too many, else lower."""
    return threshold * float((max(count, 1) / k) ** GAIN)


def is_due(sparse_steps: int, interval: int) -> bool:
    """Whether something done every `interval` sparse steps is due.

    Residuals start at zero and grow at first, so what was measured then goes stale at once:
    in the first interval it is done at steps 0, 1, 2, 4, 8 ... too.
    """
    settling = sparse_steps < interval and sparse_steps & (sparse_steps - 1) == 0
    return settling or sparse_steps % interval == 0


def _digits(dtype: torch.dtype, digit_bits: int) -> Iterator[tuple[int, int]]:
    """(shift, bits) of each digit of a magnitude, the leading one first."""
    high = dtype.itemsize * 8 - 1
    while high > 0:
        bits = high % digit_bits or digit_bits
        high -= bits
        yield high, bits


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int64
