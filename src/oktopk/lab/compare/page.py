"""The report page of a comparison."""

from __future__ import annotations

from pathlib import Path

from ...report import RunSource, write_page
from .folder import Folder
from .results import Comparison
from .tables import tables


def write(comparison: Comparison, folder: Folder) -> Path | None:
    """Write the page; its path, or None if there is nothing to show."""
    runs = runs_of(comparison, folder)
    if not runs:
        return None
    write_page(folder.page, runs, tables(comparison))
    return folder.page


def runs_of(comparison: Comparison, folder: Folder) -> list[RunSource]:
    """Finished cells. Runs of one group differ in their seed only."""
    return [
        RunSource(folder.cell(record.name), record.name, record.variant.name)
        for record in comparison.finished()
    ]
