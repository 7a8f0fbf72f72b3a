"""Runs as a page: one HTML file that shows one run, or several side by side.

    runs.py       reads run folders
    thinning.py   fewer points of a curve, with its peaks
    style.py      colours, lines, light and dark
    figures.py    what all figures are made of
    training.py, traffic.py, times.py, gradients.py    the figures of each part
    facts.py      cards, configuration, environment, faults
    page.py       puts the page together and writes it
    command.py    `oktopk report`

Nothing here imports torch. Plotly and jinja2, the extra `report`, are imported when a page is written.
"""

from __future__ import annotations

from .page import write_page
from .sources import RunSource, Table

__all__ = ["RunSource", "Table", "write_page"]
