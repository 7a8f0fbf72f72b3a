"""metrics.jsonl, a line for each step, each look into a step and each epoch of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import UserError
from ..common.values import build, parse, read
from .records import DetailRecord, EpochRecord, StepRecord

METRICS = "metrics.jsonl"
Record = StepRecord | DetailRecord | EpochRecord
KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "detail": DetailRecord,
    "epoch": EpochRecord,
}


def read_metrics(
    path: str | os.PathLike[str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and epochs of a run's folder, or of its metrics.jsonl, as they were recorded."""
    records = read_records(path)
    return records["step"], records["epoch"]


def read_records(path: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """All that was recorded, by kind: step, detail and epoch."""
    file = Path(path) / METRICS if os.path.isdir(path) else Path(path)
    if not os.path.isfile(file):
        raise UserError(f"{file} is not there: name a run's folder")
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for line in _lines(file):
        records[line.values["kind"]].append(line.values)
    return records


def previous_epochs(path: str | os.PathLike[str], before_epoch: int) -> tuple[EpochRecord, ...]:
    """The epochs before one, of the run in a folder."""
    metrics = Path(path) / METRICS
    if not metrics.exists():
        return ()
    records = [line.record for line in _lines(metrics)]
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    return tuple(record for record in epochs if record.epoch < before_epoch)


@dataclass(frozen=True)
class _Line:
    """A line of metrics.jsonl."""

    text: bytes
    values: dict[str, Any]
    """As they were recorded."""
    record: Record


def _lines(file: Path) -> Iterator[_Line]:
    """All records. The last line may be half written; then it does not count."""
    try:
        lines = read(file).splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    for place, text in enumerate(lines, 1):
        try:
            values = parse(text)
        except ValueError as error:
            if place == len(lines):
                return
            raise _damaged(file, place, error) from None
        try:
            line = _Line(text, values, _record(values))
        except ValueError as error:
            raise _damaged(file, place, error) from None
        yield line


def _record(values: object) -> Record:
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    kind = KINDS.get(str(values.get("kind")))
    if kind is None:
        raise ValueError(f"its kind is none of {', '.join(KINDS)}")
    return build(kind, values)


def _damaged(file: Path, place: int, error: ValueError) -> UserError:
    return UserError(
        f"line {place} of {file} is damaged ({error}): remove that line, the others can be read"
    )


def drop_from(metrics: Path, step: int, epoch: int) -> None:
    """Drop records from a step and an epoch on: both are about to happen again."""
    if not metrics.exists():
        return
    kept = []
    for line in _lines(metrics):
        record = line.record
        early = record.epoch < epoch if isinstance(record, EpochRecord) else record.step < step
        if early:
            kept.append(line.text + b"\n")
    files.write(metrics, b"".join(kept))
