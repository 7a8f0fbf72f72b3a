"""Marks in plots of steps: the dense phase, where sparsity starts, and levels to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .runs import Run
from .style import GREY
from .subjects import Subject


def marks(
    subjects: Sequence[Subject],
    *,
    seconds: bool,
    inside: bool = False,
    own: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Shading of the dense phase and a line where sparsity starts, as parts of a layout.

    Where subjects start at different times, each has a line, and the shading ends at the first.

    Args:
        inside: write into the plot, because there is a legend above it.
        own: more shapes.
    """
    starts = [(start, each) for each in subjects if (start := _start(each, seconds)) is not None]
    shapes, texts = list(own), list[dict[str, Any]]()
    if starts:
        first = min(start for start, _ in starts)
        same = all(abs(start - first) <= 0.01 * max(first, 1) for start, _ in starts)
        if first > 0:
            shapes.append(_shading(first))
        for start, subject in starts[:1] if same else starts:
            shapes.append(_upright(start, GREY if same else subject.style.colour))
        left = first > 0.5 * _end(subjects, seconds)
        texts.append(_note(first, left, inside))
    return {"shapes": shapes, "annotations": texts}


def _start(subject: Subject, seconds: bool) -> float | None:
    def of(run: Run) -> float | None:
        place = run.sparsity_starts
        if place is None:
            return None
        before = float(run.elapsed[place - 1]) if place else 0.0
        return before if seconds else float(run.number[place])

    return subject.mean(of)


def _end(subjects: Sequence[Subject], seconds: bool) -> float:
    runs = [run for subject in subjects for run in subject.runs]
    return max(float((run.elapsed if seconds else run.number)[-1]) for run in runs)


def _shading(end: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "x0": 0,
        "x1": end,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": "rgba(138,143,152,0.16)",
        "line": {"width": 0},
        "layer": "below",
    }


def _upright(at: float, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 2, "dash": "dash"}
    return {
        "type": "line",
        "x0": at,
        "x1": at,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": line,
        "layer": "below",
    }


def level(value: float) -> dict[str, Any]:
    """A dotted line across the plot."""
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value} | {
        "line": line,
        "layer": "below",
    }


def _note(at: float, left: bool, inside: bool) -> dict[str, Any]:
    return {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "top" if inside else "bottom",
        "xanchor": "right" if left else "left",
        "xshift": -3 if left else 3,
        "text": "sparsity starts",
        "showarrow": False,
    }
