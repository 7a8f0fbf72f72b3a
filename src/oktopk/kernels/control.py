"""How thresholds follow the values, in whole numbers.

A threshold is the bits of a magnitude; see `numbers.magnitude`. Such a number is about the
logarithm of the magnitude, and a doubling adds one `octave` to it. So a forecast is a few sums of
integers, and all kernels and all ranks get the same result.

These functions take Python's integers, and loops compile them. `reference/step.py` has the same for
tensors.
"""

from __future__ import annotations

TREND = 179
"""Weight of the newest observation in a threshold's trend, in 256ths: 0.7."""
TREND_LIMIT = 192
"""Largest trend, either way, in 256ths of an octave. One leap must not lead the forecast astray for
long."""
SHORT = 13
"""Exponent that lowers a threshold which selected fewer than it aimed at, in 256ths: 0.05."""


def forecast(right: int, carried: int, trend: int, octave: int, infinity: int) -> tuple[int, int]:
    """The threshold to try in the next step, and its trend: a change for each step.

    With error feedback most values wait just below the threshold, so a threshold that is 2 % off
    can select 50 % too many; and it moves, as residuals and gradients grow and shrink. A forecast
    with a trend (Holt's) follows it; benchmarks/thresholds.py compares.

    Args:
        right: the threshold that would have been right in this step.
        carried: the one that was tried.
        trend: the one from before.
        octave, infinity: of the type of the values.
    """
    if right < 1 or right >= infinity or carried < 1 or carried >= infinity:
        return right, 0
    most = octave * TREND_LIMIT >> 8
    surprise = max(-most, min(most, right - carried))
    trend = max(-most, min(most, trend + (surprise * TREND >> 8)))
    return max(1, min(infinity - 1, right + trend)), trend


def lowered(threshold: int, count: int, wanted: int) -> int:
    """The threshold to try after one that has found too few.

    Args:
        count, wanted: the bits of these numbers as floats, about their logarithms.
    """
    return max(1, threshold - ((wanted - count) * SHORT >> 8))


def spread_evenly(digit: int, above: int, inside: int, rank: int, shift: int) -> int:
    """The magnitude of a rank, if the magnitudes of one leading digit are evenly spread.

    Args:
        digit: the leading digit of the magnitude that has this rank, counted from the largest.
        above: how many magnitudes have a larger leading digit.
        inside: how many have this one.
        shift: bits below the leading digit.
    """
    return (digit << shift) + (1 << shift) // inside * (inside - (rank - above))
