"""Run folders as they are shown: each quantity as a column over steps, read once.

A run that is still going on, or that was killed, has no `summary.json`. Runs of earlier versions
recorded less: a column that is not there is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..common.errors import UserError, printable
from ..common.values import build, parse, parse_toml, read
from ..train.metrics_file import METRICS, read_records
from ..train.records import BucketTiming, Faults, KindTotals
from ..workloads import workload_for
from ..workloads.base import Metric
from .sources import RunSource

Array = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class Points:
    """A quantity of a run, against steps and seconds."""

    step: Array
    seconds: Array
    value: Array

    def finite(self) -> Points:
        """Without those that were not recorded."""
        kept = np.isfinite(self.value)
        return Points(self.step[kept], self.seconds[kept], self.value[kept])


@dataclass(frozen=True)
class Planned:
    """What the page needs of `Plan`."""

    parameters: int
    workers: int
    steps: int
    dense_bytes: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Ending:
    """What the page needs of `summary.json`."""

    plan: Planned
    steps: int
    compression_ratio: float
    seconds: float
    buckets: tuple[BucketTiming, ...]
    memory: dict[str, float]
    kinds: dict[str, KindTotals] = field(default_factory=dict)
    faults: Faults | None = None


@dataclass(frozen=True)
class Run:
    """A run, as the page shows it."""

    folder: Path
    label: str
    group: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    epochs: Sequence[Mapping[str, Any]]
    details: Sequence[Mapping[str, Any]]
    ending: Ending | None

    @cached_property
    def number(self) -> Array:
        """The number of each step."""
        return self.column("step")

    @cached_property
    def elapsed(self) -> Array:
        """Seconds of training at the end of each step, without validation and checkpoints."""
        return np.cumsum(np.nan_to_num(self.part("total")))

    @cached_property
    def sparse(self) -> NDArray[np.bool_]:
        return np.array([record["phase"] == "sparse" for record in self.steps], bool)

    @property
    def sparsity_starts(self) -> int | None:
        """The place of the first sparse step among those that are recorded."""
        return int(np.argmax(self.sparse)) if self.sparse.any() else None

    def column(self, name: str) -> Array:
        return _column(record.get(name) for record in self.steps)

    def part(self, name: str) -> Array:
        """Seconds of a part of each step."""
        return _column(record["seconds"].get(name) for record in self.steps)

    def stage(self, name: str) -> Array:
        """Seconds of a stage of communication in each step."""
        return _column(record.get("stages", {}).get(name) for record in self.steps)

    def points(self, value: Array) -> Points:
        """A column against steps and seconds."""
        return Points(self.number, self.elapsed, value)

    def points_at(self, steps: Iterable[float], values: Iterable[float | None]) -> Points:
        """Values that belong to some steps only."""
        step = _column(steps)
        places = np.clip(np.searchsorted(self.number, step), 0, len(self.number) - 1)
        return Points(step, self.elapsed[places], _column(values))

    @property
    def validations(self) -> Sequence[Mapping[str, Any]]:
        return [record for record in self.epochs if record["validation"]]

    def metric(self, name: str) -> Metric:
        """How the workload shows a metric."""
        try:
            return workload_for(self.config).metric(name)
        except (UserError, TypeError):  # of another version, or somebody else's
            return Metric(name, name)


def read_runs(sources: Sequence[RunSource]) -> list[Run]:
    """All runs, each with a label of its own."""
    labels = _labels(sources)
    return [_read_run(source, label) for source, label in zip(sources, labels, strict=True)]


def _labels(sources: Sequence[RunSource]) -> list[str]:
    names = [source.label or Path(source.folder).resolve().name for source in sources]
    for place, name in enumerate(names):
        if Counter(names)[name] > 1 and not sources[place].label:
            names[place] = str(Path(sources[place].folder))
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return [printable(name) for name in names]


def _read_run(source: RunSource, label: str) -> Run:
    folder = Path(source.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a run folder: `oktopk train` prints the name of its own")
    recorded = read_records(folder)
    if not recorded["step"]:
        raise UserError(f"{folder / METRICS} has no step yet: wait for the first one")
    return Run(
        folder=folder,
        label=label,
        group=printable(source.group),
        config=_load(folder / "config.toml", parse_toml, {}),
        environment=_load(folder / "environment.json", _object, {}),
        steps=recorded["step"],
        epochs=recorded["epoch"],
        details=recorded["detail"],
        ending=_load(folder / "summary.json", lambda text: build(Ending, parse(text)), None),
    )


def _load(path: Path, make: Callable[[bytes], T], missing: T) -> T:
    try:
        return make(read(path))
    except FileNotFoundError:
        return missing
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): move it away, and the page does without it"
        ) from None


def _object(text: bytes) -> dict[str, Any]:
    values = parse(text)
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    return values


def _column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], np.float64)
