"""What a finished cell came to, read from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from ...common.errors import UserError
from ...common.format import plural
from ...common.values import build, parse, read
from ...train.metrics_file import METRICS, read_metrics
from ...train.records import EpochRecord
from ...train.run_folder import SUMMARY
from ..losses import running_means, seconds_to, window_of

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A finished cell."""

    steps: int
    sparse_steps: int
    training_loss: float
    """Mean of the last `window` steps, of rank 0's batches."""
    window: int
    """An epoch of steps, or half of a run that is shorter than two epochs."""
    validation: dict[str, float]
    """The workload's metrics at the end, by name."""
    seconds: float
    """Of all steps on rank 0, without validation and checkpoints."""
    samples_per_second: float
    """Over these seconds, the dense warm-up included."""
    bytes_a_step: float
    """Sent by rank 0, mean of the sparse steps; of all, where none is sparse."""
    dense_bytes_a_step: float
    """Bytes that rank 0 would send in a dense step."""
    compression_ratio: float | None
    """Elements of the sparse steps, by elements applied; 1 where no step is sparse."""
    parameters: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A finished cell with its course."""

    result: Result
    curve: list[tuple[float, float]]
    """After each step: seconds, and the mean loss of the last `window` steps."""

    def seconds_to(self, target: float | None) -> float | None:
        """None if the target was not reached."""
        return seconds_to(self.curve, self.result.window, target)


@dataclass(frozen=True)
class _Planned:
    steps: int
    steps_per_epoch: int
    parameters: int
    dense_bytes: int


@dataclass(frozen=True)
class _Summary:
    """What is needed of summary.json."""

    plan: _Planned
    epochs: list[EpochRecord]
    steps: int
    sparse_steps: int
    sparsity: float


@dataclass(frozen=True)
class _Environment:
    versions: dict[str, str] = field(default_factory=dict)


def is_complete(folder: Path) -> bool:
    """Whether the run in a folder has come to its end. Its summary is written last, as a whole."""
    try:
        summary = build(_Summary, parse(read(folder / SUMMARY)))
    except (OSError, ValueError):
        return False
    return summary.steps >= summary.plan.steps


def read_trained(folder: Path) -> Trained:
    """UserError if a file of the folder is missing or damaged."""
    summary = _load(folder / SUMMARY, _Summary)
    environment = _load(folder / "environment.json", _Environment)
    steps, *_ = read_metrics(folder)
    if len(steps) != summary.steps:
        raise UserError(
            f"{folder / METRICS} has {plural(len(steps), 'step')}, but the run took "
            f"{summary.steps}: move its folder away, and the cell is trained anew"
        )
    window = window_of(summary.plan.steps_per_epoch, summary.plan.steps)
    means = running_means([step["loss"] for step in steps], window)
    seconds = list(accumulate(_total(step, folder) for step in steps))
    counted = [step for step in steps if step["phase"] == "sparse"] or steps
    applied = 1 - summary.sparsity if summary.sparse_steps else 1.0
    result = Result(
        steps=summary.steps,
        sparse_steps=summary.sparse_steps,
        training_loss=means[-1],
        window=window,
        validation=next((e.validation for e in reversed(summary.epochs) if e.validation), {}),
        seconds=seconds[-1],
        samples_per_second=sum(step["samples"] for step in steps) / max(seconds[-1], 1e-9),
        bytes_a_step=sum(step["bytes_sent"] for step in counted) / len(counted),
        dense_bytes_a_step=summary.plan.dense_bytes,
        compression_ratio=1 / applied if applied > 0 else None,
        parameters=summary.plan.parameters,
        versions=environment.versions,
    )
    return Trained(result, list(zip(seconds, means, strict=True)))


def _total(step: Mapping[str, Any], folder: Path) -> float:
    if "total" not in step["seconds"]:
        raise UserError(
            f"{folder / METRICS} is damaged (step {step['step']} has no total seconds): move its "
            "folder away, and the cell is trained anew"
        )
    return float(step["seconds"]["total"])


def _load(path: Path, kind: type[T]) -> T:
    try:
        values: Any = parse(read(path))
        return build(kind, values)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): move its folder away, and the cell is trained anew"
        ) from None
