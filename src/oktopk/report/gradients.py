"""Figures of what is selected: kinds of parameters, thresholds, regions, magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .figures import (
    Curves,
    Plot,
    Quantity,
    Section,
    graph,
    layout,
    marked,
    safe,
    several,
    titled,
    where,
)
from .magnitudes import Detail, largest_buckets, magnitudes
from .runs import Points, Run
from .subjects import Subject

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
        *magnitudes(curves.subjects),
    ]
    text = (
        "A rank adds its gradient to its residual and offers the entries that reach its "
        "threshold. The threshold is forecast from the steps before, because sorting all elements "
        "would take too long."
    )
    return Section("gradients", "Selection", "What is selected", text, plots)


def _kinds(subjects: Sequence[Subject]) -> Plot:
    endings = [(each, each.first.ending) for each in subjects]
    having = [(subject, ending.kinds) for subject, ending in endings if ending and ending.kinds]
    names = list(dict.fromkeys(name for _, kinds in having for name in kinds))
    traces = []
    for subject, kinds in having:
        shown = [name for name in names if name in kinds and kinds[name].elements]
        bar = graph().Bar(
            x=[safe(name) for name in shown],
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
    traces = several(curves, {name: share(name)(run) for name in ("applied", "offered")})
    return curves.over_time(
        "selected",
        title,
        text + " Offered entries are those of rank 0 that reach its threshold.",
        traces,
        yaxis=axis,
        reference=1.0,
        nothing=_NOT_SPARSE,
    )


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
        text += " Mean over buckets, by their k."
        return curves.plot(key, title, text, lambda run: _mean_of_buckets(run, value), **more)
    run = curves.subjects[0].first
    quantities = {}
    for index, name in largest_buckets(run).items():
        found = [(detail["step"], value(bucket)) for detail, bucket in _sparse(run, index)]
        quantities[name] = run.points_at([step for step, _ in found], [each for _, each in found])
    return curves.over_time(key, title, text, several(curves, quantities), **more)


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
