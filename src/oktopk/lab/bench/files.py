"""Results of `oktopk bench` in a file.

It is JSON: a format, a version, and the runs of one or more invocations, each with its arguments,
facts about the machine, and results, whose fields are those of `Result`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.values import build, parse, read
from ...common.version import version_of
from .results import Result, cores

FORMAT = "oktopk bench"
VERSION = 1
"""Goes up when a program that reads the file would have to change."""


def check_file(path: Path, append: bool) -> None:
    """Find out before hours of measuring that results cannot be kept."""
    if os.path.lexists(path) and not append:
        raise UserError(f"--json {path} is there already: --append adds to it")
    if append and os.path.lexists(path):
        load(path)
    check_writable("--json", path)


def check_writable(flag: str, path: Path) -> None:
    """UserError if `replacing` could not write the file."""
    if not path.name or os.path.isdir(path):
        raise UserError(f"{flag} {path} is a folder: name a file in it")
    if os.path.exists(path) and not os.path.isfile(
        path
    ):  # replacing /dev/null, say, would be the end of it
        raise UserError(f"{flag} {path} is no ordinary file: name one that is, or a new one")
    with _told(flag, path):
        part = _part(path)
        part.touch()
        part.unlink()


@contextlib.contextmanager
def replacing(flag: str, path: Path) -> Iterator[Path]:
    """A file to write to instead, which then becomes this one; a crash leaves what was there."""
    with _told(flag, path):
        part = _part(path)
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be written ({error.strerror or error}): name a file in a folder "
            "that is there and yours, and has room"
        ) from None


def load(path: Path) -> list[dict[str, Any]]:
    """The runs in a file, oldest first, with `Result` objects."""
    try:
        kept = parse(read(path).decode())
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--json {path} is not JSON: {error}") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT:
        raise UserError(f"--json {path} holds something else than results of oktopk bench")
    if kept.get("version") != VERSION:
        raise UserError(
            f"--json {path} has version {kept.get('version')}, but must have {VERSION}: it was "
            "written by another version of oktopk; name another file"
        )
    try:
        return [_run(each) for each in _list(kept.get("runs"))]
    except ValueError as error:
        raise UserError(f"--json {path} is damaged: {error}; name another file") from None


def _list(runs: object) -> list[object]:
    if not isinstance(runs, list):
        raise ValueError("it has no list of runs")
    return runs


def _run(values: object) -> dict[str, Any]:
    """A run as it was kept, but for what is read here, which is checked."""
    known = build(_Run, _without_gaps(values))
    assert isinstance(values, dict)
    for result in known.results:
        result.check()
    return {**values, "results": known.results, "notes": known.notes}


def _without_gaps(run: Any) -> Any:
    """Losses that were not finite are null in JSON: the curves of contenders that diverged."""
    if not isinstance(run, dict) or not isinstance(run.get("results"), list):
        return run
    results = []
    for result in run["results"]:
        if isinstance(result, dict) and isinstance(result.get("curve"), list):
            whole = [p for p in result["curve"] if not (isinstance(p, list) and None in p)]
            result = result | {"curve": whole}
        results.append(result)
    return run | {"results": results}


@dataclass(frozen=True)
class _Machine:
    processor: str


@dataclass(frozen=True)
class _Run:
    when: str
    machine: _Machine
    results: list[Result]
    notes: list[str] = field(default_factory=list)


def save(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write all runs; a crash leaves what was there before."""
    plain = [{**run, "results": [_plain(result) for result in run["results"]]} for run in runs]
    text = json.dumps({"format": FORMAT, "version": VERSION, "runs": plain}, indent=1)
    with replacing("--json", path) as part:
        part.write_text(text + "\n", encoding="utf-8")


def new_run(arguments: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """A run as it is kept."""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": dict(arguments),
        "machine": machine(),
        "results": list(results),
    }


def machine() -> dict[str, Any]:
    """What results depend on."""
    return {
        "cores": cores(),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "oktopk": version_of("oktopk"),
    }


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plain(result: Result) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None  # JSON has no such numbers
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items()}
        return [clean(each) for each in value] if isinstance(value, list) else value

    plain: dict[str, Any] = clean(dataclasses.asdict(result))
    return plain


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")
