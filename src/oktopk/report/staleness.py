"""Figures of how long entries wait before they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .figures import Curves, Plot, Section, graph, layout, marked, safe, several, titled
from .runs import Points, Run
from .subjects import Subject

_NOT_SPARSE = "Not recorded: no sparse step was looked into."
_MOST_SUBJECTS = 4


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
        several(curves, quantities),
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
                name=safe(subject.label),
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
