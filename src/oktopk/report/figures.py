"""What all figures are made of: curves of subjects, bars, and axes.

A curve has its steps as x and its seconds as `customdata`; the page's switch exchanges the two.
Texts that come from users go through `safe`, because plotly reads some HTML in texts.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.extras import need
from .marks import level, marks
from .runs import Array, Points, Run
from .style import COLOURS, GREY, PATTERNS, Style
from .subjects import Subject, band
from .thinning import smooth, thin

_POINTS = 48_000
"""Of all curves of a page together; a point takes about 16 bytes."""
_MOST_LINES = 48
"""In a plot; more would neither be readable nor small."""
_FEW = 6
"""With more subjects than this, smoothed curves are shown without every step behind them."""
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
    """A text with nothing that plotly takes for HTML."""
    return html.escape(text, quote=False)


def short(text: str) -> str:
    """A label that fits beside a bar."""
    return safe(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def graph() -> Any:
    """plotly.graph_objects."""
    return need("plotly.graph_objects", "report")


def drawn(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects that plots have room for: the first ones."""
    lines = accumulate(_lines(subject) for subject in subjects)
    return [each for each, count in zip(subjects, lines, strict=True) if count <= _MOST_LINES]


def _lines(subject: Subject) -> int:
    """A mean over runs has two edges."""
    return 1 if len(subject.runs) == 1 else 3


class Curves:
    """Draws curves of subjects against steps or seconds.

    Args:
        plots: how many plots the page may have; they share the points of the page.
    """

    def __init__(self, subjects: Sequence[Subject], plots: int = 24) -> None:
        self.subjects = subjects
        self._few = len(subjects) <= _FEW
        lines = sum(_lines(subject) for subject in subjects) * (2 if self._few else 1)
        self.most = max(40, min(900, _POINTS // (lines * plots)))

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
        """A quantity of all subjects.

        Args:
            smoothed: for quantities that are noisy from step to step.
            reference: a level to draw.
        """
        if any(len(subject.runs) > 1 for subject in self.subjects):
            text += " Bands are one standard deviation to each side, between the runs of a group."
        elif smoothed and self._few:
            text += " The strong line is a running mean, the faint one behind it every step."
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
        lines = [level(reference)] if reference is not None and traces else []
        at_step, at_seconds = (
            marks(self.subjects, seconds=seconds, inside=base["showlegend"], own=lines)
            for seconds in (False, True)
        )
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
        if mean is None or not self._few:
            return [self.own(mean or curve, subject, markers=markers)]
        behind = self.own(curve, subject, opacity=0.4, width=1, hoverinfo="skip")
        return [behind, self.own(mean, subject, markers=markers)]

    def _mean(self, subject: Subject, curves: Sequence[Points], markers: bool) -> list[Any]:
        found = band(curves, self.most)
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


def several(curves: Curves, quantities: Mapping[str, Points]) -> list[Any]:
    """A curve for each quantity of the only run."""
    found = []
    for place, (name, points) in enumerate(quantities.items()):
        kept = points.finite()
        if len(kept.value):
            line = curves.line(kept, Style(place), name, markers=len(kept.value) < 40)
            found.append(line.update(showlegend=True))
    return found


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


LOG = {"type": "log", "exponentformat": "power", "nticks": 3}
"""A logarithmic axis, with ticks at 1, 2 and 5."""
POWERS = {"type": "log", "exponentformat": "power"}
"""A logarithmic axis of many powers of ten."""


def column(name: str) -> Quantity:
    """A column of the step records."""
    return lambda run: run.points(run.column(name))


def where(mask: NDArray[np.bool_], value: Array) -> Array:
    """The values where the mask is true, NaN elsewhere."""
    return np.where(mask, value, np.nan)
