"""Histograms of magnitudes, before and after sparsity starts, with the thresholds drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .figures import POWERS, Plot, graph, layout, titled
from .runs import Array, Run
from .style import COLOURS, DASHES, MARKERS
from .subjects import Subject

Detail = Mapping[str, Any]
_MOST_BUCKETS, _MOST_SUBJECTS = 4, 4


def magnitudes(subjects: Sequence[Subject]) -> list[Plot]:
    """A plot for each of the largest buckets."""
    having = [each for each in subjects if each.first.details][:_MOST_SUBJECTS]
    if not having:
        return [
            Plot(
                "magnitudes",
                "Magnitudes before and after",
                "How large the elements are, before and after sparsity starts.",
                nothing="Not recorded: no step was looked into, see --detail-every.",
            )
        ]
    plots = []
    for subject in having:
        most = _MOST_BUCKETS if len(subjects) == 1 else 1
        for index, name in largest_buckets(subject.first, most).items():
            title = f"Magnitudes, {name}"
            title += f" of {subject.label}" if len(subjects) > 1 else ""
            plots.append(_histogram(subject, index, title))
    return plots


def _histogram(subject: Subject, index: int, title: str) -> Plot:
    run = subject.first
    shown = _before_and_after(run, index)
    traces = []
    for place, (name, bucket) in enumerate(shown.items()):
        edges, counts = _bins(bucket["magnitudes"])
        line = {"color": COLOURS[place], "dash": DASHES[place], "width": 2, "shape": "hv"}
        trace = graph().Scatter(x=edges, y=counts, name=name, line=line, mode="lines")
        traces.append(trace.update(hovertemplate="from %{x:.2e}: %{y:,} elements"))
    last = list(shown.values())[-1] if shown else None
    thresholds = _thresholds(last, max(int(t.y.max()) for t in traces)) if last and traces else []
    return Plot(
        f"magnitudes-{subject.style.place}-{index}",
        title,
        "How many elements of residual + gradient have which magnitude, on logarithmic axes. In "
        "sparse steps the residual fills, so the bulk moves to the right, and everything right "
        "of the threshold is sent. The upright lines are the thresholds of the last step shown.",
        [*traces, *thresholds],
        layout(
            xaxis=titled("magnitude", **POWERS),
            yaxis=titled("elements", **POWERS),
            showlegend=True,
            hovermode="closest",
        ),
        nothing="Not recorded.",
        height=360,
    )


def _before_and_after(run: Run, index: int) -> dict[str, Detail]:
    """The last dense step, the first sparse one and the last, of those that were looked into."""
    steps = [
        (detail, bucket)
        for detail in run.details
        for bucket in detail["buckets"]
        if bucket["index"] == index and bucket["magnitudes"]["counts"]
    ]
    dense = [each for each in steps if each[0]["phase"] != "sparse"][-1:]
    sparse = [each for each in steps if each[0]["phase"] == "sparse"]
    shown = dense + sparse[:1] + (sparse[-1:] if len(sparse) > 1 else [])
    return {f"step {detail['step']}, {detail['phase']}": bucket for detail, bucket in shown}


def _bins(magnitudes: Detail) -> tuple[Array, Array]:
    """Edges and counts of a histogram; empty bins at its ends are left out, others are gaps."""
    counts = np.asarray(magnitudes["counts"], np.float64)
    places = np.flatnonzero(counts)
    counts = counts[places[0] : places[-1] + 1]
    edges = 2.0 ** ((magnitudes["lowest"] + np.arange(places[0], places[-1] + 2)) / 2)
    return edges, np.append(counts, counts[-1])


def _thresholds(bucket: Detail, top: float) -> list[Any]:
    """Upright lines where the thresholds of a step are."""
    lines = []
    names = {"local_threshold": "used", "exact_threshold": "exact", "global_threshold": "global"}
    for place, (field, name) in enumerate(names.items()):
        if bucket[field] > 0:
            trace = graph().Scatter(
                x=[bucket[field]] * 3,
                y=[1, np.sqrt(top), top],
                name=f"threshold, {name}",
                mode="lines+markers",
                line={"color": COLOURS[3 + place], "dash": DASHES[place + 1], "width": 2},
                marker={"symbol": MARKERS[place], "size": 7},
                hovertemplate="%{x:.3e}",
            )
            lines.append(trace)
    return lines


def largest_buckets(run: Run, most: int = 6) -> dict[int, str]:
    """The largest buckets of a run, by index."""
    sizes = {
        each["index"]: each["numel"] for detail in run.details[-1:] for each in detail["buckets"]
    }
    largest = sorted(sizes, key=lambda index: -sizes[index])[:most]
    return {index: f"bucket {index}" for index in sorted(largest)}
