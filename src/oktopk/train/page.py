"""The page of a run, written at its end."""

from __future__ import annotations

from pathlib import Path

from ..common.errors import printable
from ..report import RunSource, write_page
from ..report.command import NAME
from .records import DetailRecord, EpochRecord, Outcome, Plan, StepRecord


class Page:
    """Writes `report.html` into the run folder. An Observer, behind the one that keeps the run.

    Training has succeeded by then, so nothing that goes wrong here is an error.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def started(self, plan: Plan) -> None:
        """Not shown."""

    def stepped(self, record: StepRecord) -> None:
        """Not shown before the end."""

    def detailed(self, record: DetailRecord) -> None:
        """Not shown before the end."""

    def validating(self, done: int, total: int) -> None:
        """Not shown."""

    def epoch_ended(self, record: EpochRecord) -> None:
        """Not shown before the end."""

    def finished(self, outcome: Outcome) -> None:
        try:
            write_page(self._folder / NAME, [RunSource(self._folder)])
            line = f"the page of this run is {self._folder / NAME}"
        except Exception as error:
            line = f"the page of this run is not written: {error or type(error).__name__}"
        print(printable(line))

    def close(self) -> None:
        """Nothing is open."""
