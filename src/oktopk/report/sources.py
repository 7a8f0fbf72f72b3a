"""What a page is made of: runs, and tables that somebody else made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunSource:
    """A run to show."""

    folder: Path
    """The run folder."""
    label: str = ""
    """Its name on the page; by default the folder's."""
    group: str = ""
    """Runs of one group differ in their seed only. They are drawn as a mean with its spread."""


@dataclass(frozen=True)
class Table:
    """A table to show above the plots."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """A sentence below the table."""
