"""Figures of time: parts of a step, stages of communication, buckets, and what is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .figures import (
    Curves,
    Plot,
    Section,
    bars,
    bars_height,
    running_mean,
    short,
    stacked,
    titled,
)
from .runs import Array, Points, Run
from .style import Style
from .subjects import Subject

PARTS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "synchronise": "waiting for communication",
    "update": "clipping and optimizer",
}
STAGES = {
    "accumulate": "merge (accumulate)",
    "select": "compression (select, encode)",
    "exchange": "exchange",
    "reduce": "reduce",
    "gather": "gather",
    "apply": "demerge (apply)",
}
BUCKET = {
    "backward": "backward",
    "merge": "merge",
    "compression": "compression",
    "allreduce": "exchange, reduce, gather",
    "demerge": "demerge",
}
_MOST_BUCKETS, _MOST_SUBJECTS = 16, 4
_OLD = "Not recorded: the run was made by an earlier version."


def times(curves: Curves) -> Section:
    """Where the time goes."""
    subjects = curves.subjects
    plots = [
        _parts(subjects),
        _stages(subjects),
        _overlap(subjects),
        _hidden(curves),
        _over_time(curves),
        *_buckets(subjects),
    ]
    text = (
        "Times of rank 0. Merge, compression, exchange, gather and demerge run on a communication "
        "thread while backward goes on, so only the part that is still left after backward costs "
        "time."
    )
    return Section("time", "Time", "Where the time goes", text, plots)


@dataclass(frozen=True)
class _Row:
    """The dense or the sparse steps of a subject."""

    label: str
    runs: Sequence[Run]
    sparse: bool

    def milliseconds(self, of: Callable[[Run], Array]) -> float:
        """Mean of the runs' means over these steps; 0 if nothing was recorded."""
        columns = [of(run)[run.sparse == self.sparse] for run in self.runs]
        means = [np.nanmean(each) for each in columns if np.isfinite(each).any()]
        return 1000 * float(np.mean(means)) if means else 0.0


def _rows(subjects: Sequence[Subject], having: str = "seconds") -> list[_Row]:
    """A row for each phase that a subject has, of runs that recorded this."""
    rows = []
    for subject in subjects:
        runs = [run for run in subject.runs if having in run.steps[-1]]
        for sparse, phase in ((False, "dense"), (True, "sparse")):
            if any((run.sparse == sparse).any() for run in runs):
                alone = len(subjects) == 1
                label = f"{phase} steps" if alone else f"{short(subject.label)}, {phase}"
                rows.append(_Row(label, runs, sparse))
    return rows


def _stacked_plot(
    key: str,
    title: str,
    text: str,
    rows: Sequence[_Row],
    parts: Mapping[str, Callable[[Run], Array]],
    **more: Any,
) -> Plot:
    """Bars of the mean milliseconds of each part of a step."""
    labels = [row.label for row in rows]
    values = {name: [row.milliseconds(of) for row in rows] for name, of in parts.items()}
    traces = stacked(labels, values) if rows else ()
    height = bars_height(len(rows))
    return Plot(key, title, text, traces, bars(labels, "milliseconds"), height=height, **more)


def _parts(subjects: Sequence[Subject]) -> Plot:
    return _stacked_plot(
        "parts",
        "Parts of a step",
        "The training thread's time, mean of all dense and of all sparse steps. Waiting for "
        "communication is what compression should make short.",
        _rows(subjects),
        {label: partial(Run.part, name=part) for part, label in PARTS.items()},
        wide=True,
    )


def _stages(subjects: Sequence[Subject]) -> Plot:
    return _stacked_plot(
        "stages",
        "Stages of communication",
        "The communication thread's time in a step, over all buckets. Where one pass adds up, "
        "selects and encodes, all of it counts as merge.",
        _rows(subjects, "stages"),
        {label: partial(Run.stage, name=stage) for stage, label in STAGES.items()},
        nothing=_OLD,
        wide=True,
    )


def _overlap(subjects: Sequence[Subject]) -> Plot:
    return _stacked_plot(
        "overlap",
        "Hidden behind backward",
        "How much of the communication thread's work happened while backward went on. The rest "
        "made the step longer.",
        _rows(subjects, "busy"),
        {"hidden behind backward": _hidden_seconds, "waited for after backward": _waited_seconds},
        nothing=_OLD,
    )


def _hidden_seconds(run: Run) -> Array:
    return np.maximum(run.column("busy") - run.part("synchronise"), 0)


def _waited_seconds(run: Run) -> Array:
    return np.minimum(run.column("busy"), run.part("synchronise"))


def _hidden(curves: Curves) -> Plot:
    def quantity(run: Run) -> Points:
        busy = run.column("busy")
        return run.points(_hidden_seconds(run) / np.where(busy > 0, busy, np.nan))

    return curves.plot(
        "hidden",
        "Hidden share over time",
        "The share of the communication thread's work that was hidden behind backward in each "
        "step. 100 % means that communication was free.",
        quantity,
        smoothed=True,
        yaxis=titled("hidden", tickformat=".0%", range=[0, 1.02]),
        nothing=_OLD,
    )


def _over_time(curves: Curves) -> Plot:
    subject = curves.subjects[0]
    if len(curves.subjects) > 1 or len(subject.runs) > 1:
        return curves.plot(
            "seconds",
            "Time of a step",
            "From waiting for the batch to the end of the optimizer, in milliseconds.",
            lambda run: run.points(1000 * run.part("total")),
            smoothed=True,
            yaxis=titled("milliseconds", rangemode="tozero"),
        )
    run, traces = subject.first, []
    for place, (part, label) in enumerate({**PARTS, "total": "all"}.items()):
        mean = running_mean(run, run.points(1000 * run.part(part)).finite())
        line = curves.line(mean, Style(place), label)
        traces.append(line.update(showlegend=True))
    return curves.over_time(
        "seconds",
        "Time of a step",
        "The parts of a step in milliseconds, as running means. A step up where sparsity starts "
        "is the cost of selecting; a step down is what sending less saves.",
        traces,
        yaxis=titled("milliseconds", rangemode="tozero"),
        height=380,
        wide=True,
    )


def _buckets(subjects: Sequence[Subject]) -> list[Plot]:
    """A plot of buckets for each subject, if there are few."""
    having = [each for each in subjects if each.first.ending and each.first.ending.buckets]
    if not having:
        nothing = "Not recorded yet: buckets are summed up when the run ends."
        return [Plot("buckets", "Buckets", "Means of all steps for each bucket.", nothing=nothing)]
    plots = [_buckets_of(subject, len(subjects) > 1) for subject in having[:_MOST_SUBJECTS]]
    return plots


def _buckets_of(subject: Subject, several: bool) -> Plot:
    assert subject.first.ending
    buckets = subject.first.ending.buckets
    shown = sorted(sorted(range(len(buckets)), key=lambda i: -buckets[i].total)[:_MOST_BUCKETS])
    values: Mapping[str, Sequence[float]] = {
        name: [1000 * getattr(buckets[i], part) for i in shown] for part, name in BUCKET.items()
    }
    rows = [f"bucket {i}" for i in shown]
    if len(buckets) <= _MOST_BUCKETS:
        rows.append("all")
        values = {name: [*each, sum(each)] for name, each in values.items()}
    text = (
        "Mean of all steps, dense ones too. A bucket holds parameters that are averaged together, "
        "as soon as backward has all of their gradients; its backward time starts when the bucket "
        "before it was ready."
    )
    if len(buckets) > _MOST_BUCKETS:
        text += f" Shown are the {_MOST_BUCKETS} of {len(buckets)} that take longest."
    return Plot(
        f"buckets-{subject.style.place}",
        f"Buckets of {subject.label}" if several else "Buckets",
        text,
        stacked(rows, values),
        bars(rows, "milliseconds"),
        height=bars_height(len(rows)),
    )
