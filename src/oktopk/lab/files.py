"""Results of `oktopk bench` in a file.

It is JSON: a format, a version, and the runs of one or more invocations, each with its arguments,
facts about the machine, and results, whose fields are those of `Result`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..train.errors import UserError
from .results import Result, cores

FORMAT = "oktopk bench"
VERSION = 1
"""Goes up when a program that reads the file would have to change."""


def check_file(path: Path, append: bool) -> None:
    """Find out before hours of measuring that results cannot be kept."""
    if path.exists() and not append:
        raise UserError(f"--json {path} is there already: --append adds to it")
    if append and path.exists():
        load(path)
    try:
        part = _part(path)
        part.touch()
        part.unlink()
    except OSError as error:
        raise UserError(
            f"--json {path} cannot be written ({error.strerror}): name a file in a folder that is "
            "there and yours"
        ) from None


def load(path: Path) -> list[dict[str, Any]]:
    """The runs in a file, oldest first, with `Result` objects."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
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
        return [
            {
                **run,
                "when": str(run["when"]),
                "machine": {**run["machine"], "processor": str(run["machine"]["processor"])},
                "results": [Result.from_dict(each) for each in run["results"]],
            }
            for run in kept["runs"]
        ]
    except KeyError as error:
        raise UserError(f"--json {path} is damaged: there is no {error}") from None
    except TypeError as error:
        raise UserError(f"--json {path} is damaged: {error}") from None


def save(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write all runs; a crash leaves what was there before."""
    plain = [{**run, "results": [_plain(result) for result in run["results"]]} for run in runs]
    text = json.dumps({"format": FORMAT, "version": VERSION, "runs": plain}, indent=1)
    part = _part(path)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


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
    try:
        own = version("oktopk")
    except PackageNotFoundError:
        own = ""
    return {
        "cores": cores(),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "oktopk": own,
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
