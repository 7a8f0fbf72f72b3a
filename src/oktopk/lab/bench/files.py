"""Results of `oktopk bench` in a file.

The file is JSON: a format, a version, and the runs of one or more invocations. A run has its
arguments, facts about the machine, and results, whose fields are those of `Result`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...common import files
from ...common.errors import UserError
from ...common.values import build, plain
from ..kept import read_kept
from ..machine import Machine, this_machine
from .results import Result

FORMAT = "oktopk bench"
VERSION = 1
"""Goes up when a program that reads the file would have to change."""


@dataclass(frozen=True)
class Run:
    """One invocation."""

    when: str
    machine: Machine
    results: list[Result]
    notes: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
    runs: list[Run]


def new_run(arguments: Mapping[str, Any]) -> Run:
    """A run that begins now, on this machine."""
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Run(when, this_machine(), [], arguments=dict(arguments))


def check_file(path: Path, append: bool) -> None:
    """UserError if results could not be kept, which the user should know before measuring."""
    if os.path.lexists(path):
        if not append:
            raise UserError(f"--json {path} is there already: --append adds to it")
        load(path)
    check_writable("--json", path)


def check_writable(flag: str, path: Path) -> None:
    """UserError if `replacing` could not write the file."""
    if not path.name or os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder: name a file in it")
    with _told(flag, path):
        files.check_ordinary(path, f"{flag} {path}")
        files.probe(path)


@contextlib.contextmanager
def replacing(flag: str, path: Path) -> Iterator[Path]:
    """As `common.files.replacing`, with errors that name the flag."""
    with _told(flag, path), files.replacing(path) as part:
        yield part


@contextlib.contextmanager
def _told(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be written ({error.strerror or error}): name a file in a folder "
            "that is there and yours, and has room"
        ) from None


def load(path: Path) -> list[Run]:
    """The runs in a file, oldest first."""
    kept = read_kept(path, f"--json {path}", FORMAT, VERSION)
    try:
        runs = build(_Kept, {"runs": _without_gaps(kept.get("runs"))}).runs
        for result in (result for run in runs for result in run.results):
            result.check()
        return runs
    except ValueError as error:
        raise UserError(f"--json {path} is damaged: {error}; name another file") from None


def _without_gaps(value: Any) -> Any:
    """Leave out points of curves with null, which stands for a loss that was not finite."""
    if isinstance(value, dict) and isinstance(curve := value.get("curve"), list):
        return value | {"curve": [p for p in curve if not (isinstance(p, list) and None in p)]}
    if isinstance(value, dict) and "results" in value:
        return value | {"results": _without_gaps(value["results"])}
    return [_without_gaps(each) for each in value] if isinstance(value, list) else value


def save(path: Path, runs: Sequence[Run]) -> None:
    """Write all runs; a crash leaves the file as it was."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "runs": plain(runs)}, indent=1)
    with replacing("--json", path) as part:
        part.write_text(text + "\n", encoding="utf-8")
