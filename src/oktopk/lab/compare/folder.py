"""The folder of a comparison.

comparison.json     the grid, its results and versions; written after every cell
report.html         the same with plots
cells/NAME/         the run folder of a cell, as `oktopk train` writes it
cells/NAME/console.log      what its ranks printed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common import files
from ...common.errors import UserError
from ...common.values import build, plain
from ...train.config.config import Config
from ...train.config.options import read_toml
from ...train.metrics_file import METRICS
from ...train.run_folder import settings
from ..kept import read_kept
from .grid import Cell
from .results import FAILED, UNFINISHED, CellRecord, Comparison
from .setting import Setting, first_difference
from .trained import is_complete

FORMAT = "oktopk compare"
VERSION = 1
"""Goes up when a program that reads the file would have to change."""
FILE, CELLS, PAGE = "comparison.json", "cells", "report.html"


@dataclass(frozen=True)
class Kept:
    """What a later command needs of comparison.json."""

    setting: Setting
    cells: list[CellRecord]
    baseline: str | None = None
    target_loss: float | None = None


class Folder:
    """The folder of a comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.page = path / PAGE

    def cell(self, name: str) -> Path:
        """The run folder of a cell."""
        return self.path / CELLS / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other commands from working in it."""
        try:
            (self.path / CELLS).mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"--dir {self.path} cannot be written ({error.strerror}): name a folder that can"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"--dir {self.path}: another `oktopk compare` is at work there: wait for it, "
                    "or name another folder"
                ) from None
            yield

    def check_usable(self) -> None:
        """UserError if the folder is there, and is no comparison's."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--dir {self.path} is not a folder: name another")
        names = set(os.listdir(self.path)) if self.path.exists() else set()
        if names and not names & {FILE, CELLS}:
            raise UserError(f"--dir {self.path} has other files in it: name a new folder")

    def load(self) -> Kept | None:
        """What is kept; None if nothing is."""
        path = self.path / FILE
        if not os.path.lexists(path):
            return None
        values = read_kept(path, str(path), FORMAT, VERSION)
        try:
            return build(Kept, values)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}): move it away, and the command that made it finds "
                "the cells"
            ) from None

    def save(self, comparison: Comparison) -> None:
        """Write comparison.json; a crash leaves it as it was."""
        values = {"format": FORMAT, "version": VERSION, **plain(comparison)}
        with self._writing():
            files.write(self.path / FILE, (json.dumps(values, indent=1) + "\n").encode())

    def has_steps(self, name: str) -> bool:
        """Whether a cell has anything to lose."""
        metrics = self.cell(name) / METRICS
        return metrics.exists() and metrics.stat().st_size > 0

    def is_finished(self, cell: Cell, config: Config) -> bool:
        """Whether a cell needs no training. UserError if another run is in its folder."""
        folder = self.cell(cell.name)
        if not self.has_steps(cell.name):
            return False
        try:
            found = Config.of(**read_toml(str(folder / "config.toml")))
        except UserError as error:
            raise UserError(f"{error}; move {folder} away, and the cell is trained anew") from None
        if difference := first_difference(settings(config), settings(found)):
            raise UserError(
                f"{folder} was trained with {difference}: name another --dir, or move it away"
            )
        return is_complete(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"--dir {self.path} cannot be written ({error.strerror or error}): make room, and "
                "the same command goes on"
            ) from None


def merged(kept: Sequence[CellRecord], cells: Sequence[Cell]) -> list[CellRecord]:
    """The cells that are known, and then new ones. Their folders say which are finished."""
    known = {record.name: _without_result(record) for record in kept}
    new = [CellRecord(cell.name, cell.variant, cell.seed) for cell in cells]
    return [*known.values(), *(record for record in new if record.name not in known)]


def _without_result(record: CellRecord) -> CellRecord:
    state = FAILED if record.state == FAILED else UNFINISHED
    return CellRecord(record.name, record.variant, record.seed, state, record.why)
