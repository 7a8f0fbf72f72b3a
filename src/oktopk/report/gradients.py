"""Figures of what is selected: kinds of parameters, magnitudes, thresholds, regions, staleness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .figures import (
    LOG,
    Curves,
    Plot,
    Quantity,
    Section,
    graph,
    layout,
    marked,
    safe,
    short,
    titled,
    where,
)
from .runs import Points, Run
from .style import COLOURS, DASHES, MARKERS, Style
from .subjects import Subject

Detail = Mapping[str, Any]
_NOT_SPARSE = "Not recorded: no sparse step was looked into."
_MOST_BUCKETS, _MOST_SUBJECTS = 4, 4


def gradients(curves: Curves) -> Section:
    """What is selected, and how well."""
    plots = [
        _kinds(curves.subjects),
        _selected(curves),
        _threshold(curves),
        _balance(curves),
        _regions(curves.subjects),
        _overflow(curves),
        *_magnitudes(curves.subjects),
    ]
    text = (
        "A rank adds its gradient to its residual and offers the entries that reach its "
        "threshold. The threshold is forecast from the steps before, because sorting all elements "
        "would take too long."
    )
    return Section("gradients", "Selection", "What is selected", text, plots)


def waiting(curves: Curves) -> Section:
    """How long entries wait before they are applied."""
    plots = [
        _staleness(curves),
        curves.plot(
            "waiting",
            "Age of what still waits",
            "The mean number of steps that the elements in the residual have waited until now.",
            lambda run: _of_staleness(run, "waiting_mean"),
            yaxis=titled("steps", rangemode="tozero"),
            nothing=_NOT_SPARSE,
        ),
        _waits(curves.subjects),
    ]
    text = (
        "An entry that is not applied stays in the residual and grows until it is. Its gradients "
        "are then some steps old. Estimated from a fixed sample of the elements."
    )
    return Section("staleness", "Staleness", "Staleness", text, plots)


def _kinds(subjects: Sequence[Subject]) -> Plot:
    endings = [(each, each.first.ending) for each in subjects]
    having = [(subject, ending.kinds) for subject, ending in endings if ending and ending.kinds]
    names = list(dict.fromkeys(name for _, kinds in having for name in kinds))
    traces = []
    for subject, kinds in having:
        shown = [name for name in names if name in kinds and kinds[name].elements]
        bar = graph().Bar(
            x=shown,
            y=[kinds[name].applied / kinds[name].elements for name in shown],
            customdata=[f"{kinds[name].numel:,} parameters" for name in shown],
            name=safe(subject.label),
            marker=marked(subject.style.place, subject.style.colour),
            hovertemplate="%{y:.2%} applied<br>%{customdata}",
            meta={"subject": subject.style.place},
        )
        if shown:
            traces.append(bar)
    return Plot(
        "kinds",
        "Kinds of parameters",
        "The share of the elements of each kind that a sparse step applied. A tall bar is a kind "
        "whose gradients are large compared with others in its bucket. Small parameters, such as "
        "norms and biases, are averaged densely: 100 %.",
        traces,
        layout(yaxis=titled("applied", tickformat=".0%", rangemode="tozero"), bargap=0.3),
        nothing="Not recorded: it is summed up when a run with sparse steps ends.",
    )


def _selected(curves: Curves) -> Plot:
    def share(name: str) -> Quantity:
        def quantity(run: Run) -> Points:
            asked = where(run.sparse & (run.column("target") > 0), run.column("target"))
            return run.points(run.column(name) / asked)

        return quantity

    title, axis = "Selected entries, in multiples of k", titled("times k")
    text = (
        "Entries that a sparse step applied, compared with k, the number that was asked for. The "
        "dotted line is exactly k."
    )
    if len(curves.subjects) > 1 or len(curves.subjects[0].runs) > 1:
        return curves.plot(
            "selected",
            title,
            text,
            share("applied"),
            smoothed=True,
            yaxis=axis,
            reference=1.0,
            nothing=_NOT_SPARSE,
        )
    run = curves.subjects[0].first
    traces = _several(curves, {name: share(name)(run) for name in ("applied", "offered")})
    return curves.over_time(
        "selected",
        title,
        text + " Offered entries are those of rank 0 that reach its threshold.",
        traces,
        yaxis=axis,
        reference=1.0,
        nothing=_NOT_SPARSE,
    )


def _several(curves: Curves, quantities: Mapping[str, Points]) -> list[Any]:
    """A curve for each quantity of the only run."""
    found = []
    for place, (name, points) in enumerate(quantities.items()):
        kept = points.finite()
        if len(kept.value):
            line = curves.line(kept, Style(place), name, markers=len(kept.value) < 40)
            found.append(line.update(showlegend=True))
    return found


def _threshold(curves: Curves) -> Plot:
    return _by_bucket(
        curves,
        "threshold",
        "Threshold used, compared with the exact one",
        "The threshold that rank 0 used divided by its exact one, the k-th largest magnitude. "
        "Above 1 it offers fewer than k entries, below 1 more.",
        lambda bucket: (
            bucket["local_threshold"] / bucket["exact_threshold"]
            if bucket["exact_threshold"] > 0
            else None
        ),
        titled("used / exact"),
    )


def _balance(curves: Curves) -> Plot:
    return _by_bucket(
        curves,
        "balance",
        "Balance between regions",
        "Each rank sums one region of the gradient. This is the largest number of entries "
        "applied in a region divided by the mean of all regions: 1 is perfect balance, the "
        "number of ranks is the worst.",
        lambda bucket: (
            len(bucket["regions"]) * max(bucket["regions"]) / sum(bucket["regions"])
            if sum(bucket["regions"]) > 0
            else None
        ),
        titled("largest / mean"),
        "Not recorded: no sparse step of an algorithm with regions was looked into.",
    )


def _overflow(curves: Curves) -> Plot:
    def quantity(run: Run) -> Points:
        offered = run.column("offered")
        return run.points(run.column("overflow") / where(run.sparse & (offered > 0), offered))

    return curves.plot(
        "overflow",
        "Entries held back",
        "Messages have a fixed size. The smallest entries of rank 0 that found no room in them "
        "stay in its residual. This is their share of the entries that it offered.",
        quantity,
        smoothed=True,
        yaxis=titled("held back", tickformat=".1%", rangemode="tozero"),
        nothing=_NOT_SPARSE,
    )


def _by_bucket(
    curves: Curves,
    key: str,
    title: str,
    text: str,
    value: Callable[[Detail], float | None],
    yaxis: dict[str, Any],
    nothing: str = _NOT_SPARSE,
) -> Plot:
    """A number of each bucket of the only run. Of several runs, the mean over buckets."""
    more: dict[str, Any] = {"yaxis": yaxis, "reference": 1.0, "nothing": nothing}
    if len(curves.subjects) > 1 or len(curves.subjects[0].runs) > 1:
        several = text + " Mean over buckets, by their k."
        return curves.plot(key, title, several, lambda run: _mean_of_buckets(run, value), **more)
    run = curves.subjects[0].first
    quantities = {}
    for index, name in _names(run).items():
        found = [(detail["step"], value(bucket)) for detail, bucket in _sparse(run, index)]
        quantities[name] = run.points_at([step for step, _ in found], [each for _, each in found])
    return curves.over_time(key, title, text, _several(curves, quantities), **more)


def _mean_of_buckets(run: Run, value: Callable[[Detail], float | None]) -> Points:
    steps, means = [], []
    for detail in run.details:
        if detail["phase"] == "sparse":
            found = [
                (x, bucket["k"]) for bucket in detail["buckets"] if (x := value(bucket)) is not None
            ]
            weight = sum(k for _, k in found)
            steps.append(detail["step"])
            means.append(sum(x * k for x, k in found) / weight if weight else None)
    return run.points_at(steps, means)


def _names(run: Run, most: int = 6) -> dict[int, str]:
    """The largest buckets of a run, by index."""
    sizes = {
        each["index"]: each["numel"] for detail in run.details[-1:] for each in detail["buckets"]
    }
    largest = sorted(sizes, key=lambda index: -sizes[index])[:most]
    return {index: f"bucket {index}" for index in sorted(largest)}


def _sparse(run: Run, index: int) -> Iterator[tuple[Detail, Detail]]:
    """Details of sparse steps, each with its part about one bucket."""
    for detail in run.details:
        for bucket in detail["buckets"]:
            if detail["phase"] == "sparse" and bucket["index"] == index:
                yield detail, bucket


def _regions(subjects: Sequence[Subject]) -> Plot:
    """The regions of the largest bucket that has some, at the last detail."""
    traces = []
    for subject in subjects[:_MOST_SUBJECTS]:
        details = [each for each in subject.first.details if each["phase"] == "sparse"][-1:]
        having = [each for detail in details for each in detail["buckets"] if sum(each["regions"])]
        if having:
            regions = max(having, key=lambda each: each["numel"])["regions"]
            bar = graph().Bar(
                x=list(range(len(regions))),
                y=regions,
                name=safe(subject.label),
                marker=marked(subject.style.place, subject.style.colour),
                meta={"subject": subject.style.place},
                hovertemplate="%{y:,} entries",
            )
            traces.append(bar)
    return Plot(
        "regions",
        "Regions in the last step",
        "Entries of the largest bucket that were applied in the region of each owner.",
        traces,
        layout(
            xaxis=titled("rank that owns the region", dtick=1), yaxis=titled("entries"), bargap=0.3
        ),
        nothing="Not recorded: no sparse step of an algorithm with regions was looked into.",
    )


def _magnitudes(subjects: Sequence[Subject]) -> list[Plot]:
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
        for index, name in _names(subject.first, most).items():
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
            xaxis=titled("magnitude", type="log", exponentformat="power"),
            yaxis=titled("elements", **LOG),
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


def _bins(magnitudes: Detail) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
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


def _of_staleness(run: Run, name: str) -> Points:
    having = [each for each in run.details if each["staleness"]]
    return run.points_at([x["step"] for x in having], [x["staleness"][name] for x in having])


def _staleness(curves: Curves) -> Plot:
    text = (
        "Steps that the entries which were applied since the look before had waited. 0 is at once."
    )
    axis = titled("steps", rangemode="tozero")
    if len(curves.subjects) > 1 or len(curves.subjects[0].runs) > 1:
        return curves.plot(
            "waited",
            "Steps that applied entries waited",
            text + " This is the mean.",
            lambda run: _of_staleness(run, "mean"),
            yaxis=axis,
            nothing=_NOT_SPARSE,
        )
    run = curves.subjects[0].first
    names = {"mean": "mean", "99th percentile": "p99", "largest": "max"}
    quantities = {label: _of_staleness(run, name) for label, name in names.items()}
    return curves.over_time(
        "waited",
        "Steps that applied entries waited",
        text,
        _several(curves, quantities),
        yaxis=axis,
        nothing=_NOT_SPARSE,
    )


def _waits(subjects: Sequence[Subject]) -> Plot:
    """A histogram of waits, of the last detail that has one."""
    traces = []
    for subject in subjects[:_MOST_SUBJECTS]:
        having = [
            each["staleness"]["histogram"] for each in subject.first.details if each["staleness"]
        ]
        having = [each for each in having if sum(each["counts"])]
        if having:
            edges, counts = having[-1]["edges"], np.asarray(having[-1]["counts"], np.float64)
            names = [
                str(low) if high == low + 1 else f"{low}-{high - 1}"
                for low, high in pairwise(edges)
            ]
            bar = graph().Bar(
                x=names,
                y=counts / counts.sum(),
                name=short(subject.label),
                marker=marked(subject.style.place, subject.style.colour),
                meta={"subject": subject.style.place},
                hovertemplate="%{y:.1%}",
            )
            traces.append(bar)
    return Plot(
        "waits",
        "Waits at the end",
        "How many steps the entries that were applied since the look before the last had waited, "
        "as shares.",
        traces,
        layout(
            xaxis=titled("steps waited", type="category"),
            yaxis=titled("share", tickformat=".0%", rangemode="tozero"),
            bargap=0.2,
        ),
        nothing=_NOT_SPARSE,
    )
