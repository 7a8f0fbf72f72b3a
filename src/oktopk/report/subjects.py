"""What the page compares: single runs, or groups of runs that differ in their seed only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .runs import Array, Points, Run
from .style import Style


@dataclass(frozen=True)
class Subject:
    """A run, or a group of runs that is drawn as a mean with its spread."""

    label: str
    runs: tuple[Run, ...]
    style: Style

    @property
    def first(self) -> Run:
        """Stands for all where only one run can be shown."""
        return self.runs[0]

    def numbers(self, of: Callable[[Run], float | None]) -> list[float]:
        """A number of each run that has it."""
        found = (of(run) for run in self.runs)
        return [value for value in found if value is not None and np.isfinite(value)]

    def mean(self, of: Callable[[Run], float | None]) -> float | None:
        numbers = self.numbers(of)
        return statistics.fmean(numbers) if numbers else None


def subjects_of(runs: Sequence[Run]) -> list[Subject]:
    """Runs of one group together, the others alone, in the order in which they were named."""
    together: dict[object, list[Run]] = {}
    for place, run in enumerate(runs):
        together.setdefault(run.group or place, []).append(run)
    return [
        Subject(each[0].label if len(each) == 1 else each[0].group, tuple(each), Style(place))
        for place, each in enumerate(together.values())
    ]


@dataclass(frozen=True)
class Band:
    """A mean over runs, and the standard deviation between them."""

    mean: Points
    spread: Array


def band(curves: Sequence[Points], most: int) -> Band | None:
    """The mean of several runs' curves. Steps are put into bins, where each run counts once.

    Args:
        most: the number of bins.
    """
    curves = [each for each in (curve.finite() for curve in curves) if len(each.value)]
    if not curves:
        return None
    last = max(curve.step[-1] for curve in curves)
    places = max(len(curve.step) for curve in curves)
    edges = np.linspace(0, last + 1, min(most, places) + 1)
    step, seconds, value = (
        np.stack([_binned(curve, getattr(curve, name), edges) for curve in curves])
        for name in ("step", "seconds", "value")
    )
    kept = np.isfinite(value).any(axis=0)
    step, seconds, value = step[:, kept], seconds[:, kept], value[:, kept]
    mean = Points(*(np.nanmean(each, axis=0) for each in (step, seconds, value)))
    counts = np.isfinite(value).sum(axis=0)
    # Runs are a sample of all that there could be; one alone has no spread.
    spread = np.nanstd(value, axis=0) * np.sqrt(counts / np.maximum(counts - 1, 1))
    return Band(mean, spread)


def _binned(curve: Points, of: Array, edges: Array) -> Array:
    """The mean of each bin; NaN where it is empty."""
    places = np.searchsorted(edges, curve.step, side="right") - 1
    counts = np.bincount(places, minlength=len(edges) - 1)[: len(edges) - 1]
    sums = np.bincount(places, weights=of, minlength=len(edges) - 1)[: len(edges) - 1]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
