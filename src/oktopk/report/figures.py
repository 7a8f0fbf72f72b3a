"""What all figures are made of: curves of subjects, axes, and marks where sparsity starts.

A curve has its steps as x and its seconds as `customdata`; the page's switch exchanges the two.
Texts that come from users go through `safe`, because plotly reads some HTML in texts.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..common.extras import need
from .runs import Array, Points, Run
from .style import COLOURS, GREY, PATTERNS, Style
from .subjects import Subject, band
from .thinning import smooth, thin

_POINTS = 48_000
"""Of all curves of a page together; a point takes about 16 bytes."""
_SMOOTH = 40
"""A smoothed curve is the running mean of this fraction of the steps."""
_LONGEST = 22
"""Characters of a label beside a bar."""

Quantity = Callable[[Run], Points]


@dataclass(frozen=True)
class Plot:
    """A figure with its title and its explanation."""

    key: str
    title: str
    text: str
    """Explains it, below."""
    traces: Sequence[Any] = ()
    """None: nothing was recorded."""
    layout: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)
    """What differs in the layout when the x axis shows seconds. Empty if it shows neither."""
    nothing: str = "Not recorded."
    """Shown if there are no traces."""
    wide: bool = False
    height: int = 300


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    key: str
    name: str
    """In the navigation."""
    title: str
    text: str
    plots: Sequence[Plot]


def safe(text: str) -> str:
    """A text as plotly shows it, with nothing that it would take for HTML or for a variable."""
    return html.escape(text).replace("%{", "%&#123;")


def short(text: str) -> str:
    """A label that fits beside a bar."""
    return safe(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def graph() -> Any:
    """plotly.graph_objects."""
    return need("plotly.graph_objects", "report")


class Curves:
    """Draws curves of subjects against steps or seconds.

    Args:
        plots: how many plots the page may have; they share the points of the page.
    """

    def __init__(self, subjects: Sequence[Subject], plots: int = 24) -> None:
        self.subjects = subjects
        lines = sum(2 if len(subject.runs) == 1 else 4 for subject in subjects)
        self.most = max(60, min(900, _POINTS // max(1, lines * plots)))

    def plot(
        self,
        key: str,
        title: str,
        text: str,
        quantity: Quantity,
        *,
        smoothed: bool = False,
        markers: bool = False,
        yaxis: dict[str, Any] | None = None,
        reference: float | None = None,
        **more: Any,
    ) -> Plot:
        """A quantity of all subjects."""
        traces: list[Any] = []
        for subject in self.subjects:
            traces += self.of(subject, quantity, smoothed=smoothed, markers=markers)
        return self.over_time(
            key, title, text, traces, yaxis=yaxis or {}, reference=reference, **more
        )

    def over_time(
        self,
        key: str,
        title: str,
        text: str,
        traces: Sequence[Any],
        *,
        yaxis: dict[str, Any],
        reference: float | None = None,
        **more: Any,
    ) -> Plot:
        """A plot of curves, with marks where sparsity starts."""
        base = layout(
            xaxis={"title": {"text": "step"}},
            yaxis=yaxis,
            showlegend=any(trace.showlegend for trace in traces),
            hovermode="x unified",
        )
        lines = [_level(reference)] if reference is not None and traces else []
        at_step = marks(self.subjects, seconds=False, own=lines)
        at_seconds = marks(self.subjects, seconds=True, own=lines)
        return Plot(
            key,
            title,
            text,
            traces,
            base | at_step,
            at_seconds | {"xaxis": base["xaxis"] | {"title": {"text": "seconds of training"}}},
            **more,
        )

    def of(
        self, subject: Subject, quantity: Quantity, *, smoothed: bool = False, markers: bool = False
    ) -> list[Any]:
        """The curves of one subject."""
        curves = [quantity(run).finite() for run in subject.runs]
        if len(curves) == 1:
            mean = running_mean(subject.first, curves[0]) if smoothed else None
            return self._single(subject, curves[0], mean, markers)
        return self._mean(subject, curves, markers)

    def _single(
        self, subject: Subject, curve: Points, mean: Points | None, markers: bool
    ) -> list[Any]:
        if not len(curve.value):
            return []
        if mean is None:
            return [self.own(curve, subject, markers=markers)]
        behind = self.own(curve, subject, opacity=0.28, width=1, hoverinfo="skip")
        return [behind, self.own(mean, subject, markers=markers)]

    def _mean(self, subject: Subject, curves: Sequence[Points], markers: bool) -> list[Any]:
        found = band(curves)
        if found is None:
            return []
        mean, edges = found.mean, []
        for sign in (-1, 1):
            value = mean.value + sign * found.spread
            edge = self.own(
                Points(mean.step, mean.seconds, value), subject, width=0, hoverinfo="skip"
            )
            edges.append(edge.update(line_dash="solid"))
        edges[1].update(fill="tonexty", fillcolor=subject.style.faint(0.2))
        return [*edges, self.own(mean, subject, markers=markers)]

    def line(
        self,
        curve: Points,
        style: Style,
        name: str,
        *,
        width: float = 2,
        markers: bool = False,
        **more: Any,
    ) -> Any:
        """One curve, thinned."""
        kept = thin(curve.value, self.most)
        step, seconds, value = (
            each[kept].astype(np.float32) for each in (curve.step, curve.seconds, curve.value)
        )
        line = graph().Scatter(
            x=step,
            customdata=seconds,
            y=value,
            name=safe(name),
            mode="lines+markers" if markers or len(kept) == 1 else "lines",
            line={"color": style.colour, "dash": style.dash, "width": width},
            marker={"symbol": style.marker, "size": 7},
            showlegend=False,
        )
        return line.update(**more)

    def own(self, curve: Points, subject: Subject, **more: Any) -> Any:
        """A curve of a subject. The page's legend shows and hides it."""
        return self.line(
            curve, subject.style, subject.label, meta={"subject": subject.style.place}, **more
        )


def running_mean(run: Run, curve: Points) -> Points:
    """A smooth curve. The steps before and after sparsity starts are not mixed."""
    width = max(1, len(curve.value) // _SMOOTH)
    start = run.sparsity_starts
    at = len(curve.step) if start is None else np.searchsorted(curve.step, run.number[start])
    parts = [smooth(part, width) for part in np.split(curve.value, [int(at)])]
    return Points(curve.step, curve.seconds, np.concatenate(parts))


def layout(**more: Any) -> dict[str, Any]:
    """The layout of any figure."""
    axis = {"automargin": True, "title": {"standoff": 8}}
    return {
        "margin": {"l": 12, "r": 14, "t": 26, "b": 12},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "dragmode": "zoom",
        **more,
        "xaxis": _merged(axis, more.get("xaxis", {})),
        "yaxis": _merged(axis, more.get("yaxis", {})),
    }


def _merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    title = {**base["title"], **more.get("title", {})}
    return {**base, **more, "title": title}


def titled(text: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": text}, **more}


def stacked(
    rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str = "ms"
) -> list[Any]:
    """Horizontal bars, one for each row, made of parts that differ in colour and in pattern.

    Args:
        rows: labels, as `short` gives them, from top to bottom.
        parts: by name, a number for each row.
    """
    return [
        graph().Bar(
            y=list(range(len(rows))),
            x=np.asarray(values, np.float32),
            orientation="h",
            name=name,
            marker=marked(place),
            hovertemplate=f"%{{x:,.3~g}} {unit}",
        )
        for place, (name, values) in enumerate(parts.items())
    ]


def marked(place: int, colour: str = "") -> dict[str, Any]:
    """Colour and pattern of a bar, without need of colour vision."""
    colour = colour or [*COLOURS, GREY][place % 7]
    pattern = {
        "shape": PATTERNS[place % 8],
        "fillmode": "overlay",
        "fgcolor": "rgba(255,255,255,0.7)",
        "size": 6,
        "solidity": 0.22,
    }
    return {"color": colour, "pattern": pattern, "line": {"width": 0}}


def bars(rows: Sequence[str], title: str) -> dict[str, Any]:
    """The layout of `stacked`."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(rows))), "ticktext": list(rows)}
    return layout(
        xaxis=titled(title, rangemode="tozero"),
        yaxis={"autorange": "reversed", "showgrid": False, **ticks},
        barmode="stack",
        bargap=0.35,
        showlegend=True,
        hovermode="closest",
    )


def bars_height(rows: int) -> int:
    return 130 + 34 * max(2, rows)


LOG = {"type": "log", "exponentformat": "power"}
"""A logarithmic axis."""


def marks(
    subjects: Sequence[Subject], *, seconds: bool, own: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Shading of the dense phase and a line where sparsity starts, as parts of a layout.

    Where subjects start at different times, each has a line, and the shading ends at the first.
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
        texts.append(_note(first, first > 0.5 * _end(subjects, seconds)))
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


def _level(value: float) -> dict[str, Any]:
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value} | {
        "line": line,
        "layer": "below",
    }


def _note(at: float, left: bool) -> dict[str, Any]:
    return {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "xanchor": "right" if left else "left",
        "text": "dense, then sparse from here ┐" if left else "┌ sparsity starts",
        "showarrow": False,
    }


def column(name: str) -> Quantity:
    """A column of the step records."""
    return lambda run: run.points(run.column(name))


def where(mask: Array, value: Array) -> Array:
    """The values where the mask is true, NaN elsewhere."""
    return np.where(mask, value, np.nan)
