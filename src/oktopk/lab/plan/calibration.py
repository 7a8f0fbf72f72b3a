"""What was measured of a machine and its link, and the file that keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ...common.errors import UserError, printable
from ...common.values import build, parse, plain, read
from ...cost import Link, Machine
from ..bench.files import check_writable, replacing

FORMAT = "oktopk machine"
VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Constants of the equations, and where they are from."""

    machine: Machine = field(default_factory=Machine)
    link: Link | None = None
    """Between the ranks that measured; None: nobody measured."""
    source: str = "defaults, measured on another machine: --measure replaces them"
    """For people."""


@dataclass(frozen=True)
class _Kept:
    machine: Machine
    link: Link
    source: str


def check(path: Path) -> None:
    """UserError if a calibration could not be kept there."""
    check_writable("--save", path)


def save(path: Path, calibration: Calibration) -> None:
    kept = plain(calibration)
    text = json.dumps({"format": FORMAT, "version": VERSION, **kept}, indent=1)
    with replacing("--save", path) as part:
        part.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Calibration:
    """UserError if there is none, or if it is damaged."""
    try:
        kept = parse(read(path).decode())
    except OSError as error:
        raise UserError(f"--machine {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--machine {path} is not JSON: {error}") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or kept.get("version") != VERSION:
        raise UserError(f"--machine {path} was not written by this version of `oktopk plan --save`")
    try:
        found = build(_Kept, kept)
    except ValueError as error:
        raise UserError(f"--machine {path} is damaged: {error}; measure it anew") from None
    return Calibration(found.machine, found.link, printable(f"{found.source}, from {path}"))
