"""Statistics over seeds: mean and spread, and the paired difference with its 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measure:
    """One quantity of a variant, over its seeds."""

    mean: float
    deviation: float | None
    """Sample standard deviation; None with one seed."""
    by_seed: dict[str, float]

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> Measure | None:
        """None if there is no value."""
        values = list(by_seed.values())
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, _named(by_seed))


@dataclass(frozen=True)
class Difference:
    """A quantity minus that of the baseline, seed by seed.

    Runs of one seed have the same weights and batches at the start, so much of what differs between
    seeds cancels.
    """

    mean: float
    half_width: float | None
    """Of the 95 % interval around the mean, by Student's t; None with one seed."""
    by_seed: dict[str, float]

    @classmethod
    def of(cls, values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
        """Over the seeds that both have; None if there are none."""
        by_seed = {seed: values[seed] - baseline[seed] for seed in values if seed in baseline}
        differences = list(by_seed.values())
        if not differences:
            return None
        return cls(statistics.fmean(differences), half_width(differences), _named(by_seed))

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def _named(by_seed: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): value for seed, value in sorted(by_seed.items())}


def half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Half of the confidence interval of a mean: t s / sqrt(n), with n - 1 degrees of freedom."""
    count = len(values)
    if count < 2:
        return None
    quantile = student_quantile((1 + confidence) / 2, count - 1)
    return quantile * statistics.stdev(values) / math.sqrt(count)


def student_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability, of at least one half."""
    low, high = 0.0, 1.0
    while student_share(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if student_share(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_share(t: float, freedom: int) -> float:
    """The probability that Student's t is between -t and t.

    The finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4, in the angle atan(t / sqrt(n)).
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(odd, freedom - 1, 2):
        total += term
        term *= (step + 1) / (step + 2) * cosine**2
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
