"""The report page of a comparison."""

from __future__ import annotations

from pathlib import Path

from .folder import Folder
from .results import Comparison
from .tables import tables


def labelled_runs(comparison: Comparison, folder: Folder) -> list[tuple[Path, str, str]]:
    """Run folders of finished cells, each with its label and its group: runs of one group differ in
    their seed only."""
    return [
        (folder.cell(record.name), record.name, record.variant.name)
        for record in comparison.finished()
    ]


def write(comparison: Comparison, folder: Folder) -> Path | None:
    """Write the page; its path, or None if there is nothing to show."""
    runs = labelled_runs(comparison, folder)
    if not runs:
        return None
    try:
        from ...report import RunSource, Table, write_page
    except ImportError:
        return None
    write_page(
        folder.page,
        [RunSource(path, label, group) for path, label, group in runs],
        [Table(each.title, each.columns, each.rows, each.note) for each in tables(comparison)],
    )
    return folder.page
