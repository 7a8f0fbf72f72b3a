"""Runs as a page: one HTML file that shows one run, or several side by side.

    sources.py    what a page is made of
    runs.py       reads run folders
    subjects.py   single runs, and groups of runs
    thinning.py   fewer points of a curve, with its peaks
    style.py      colours, lines, light and dark
    figures.py, marks.py    what all figures are made of
    training.py, traffic.py, times.py, gradients.py, magnitudes.py, staleness.py    the figures
    facts.py      cards, configuration, environment, faults
    page.py       puts the page together and writes it
    command.py    `oktopk report`

Nothing here imports torch. Plotly and jinja2, the extra `report`, are imported when a page is
written, so that `oktopk report --help` and training do without.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .sources import RunSource, Table

__all__ = ["RunSource", "Table", "write_page"]


def write_page(
    path: str | os.PathLike[str], runs: Sequence[RunSource], tables: Sequence[Table] = ()
) -> None:
    """Write a page that shows runs side by side. It opens from disk and needs no network.

    Args:
        path: the HTML file. One that is there is replaced.
        runs: at least one. The runs of a group are drawn as their mean with its spread.
        tables: shown above the plots.
    """
    from .page import write

    write(path, runs, tables)
