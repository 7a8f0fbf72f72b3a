"""Figures of what is sent: bytes, compression ratio, sizes of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..common.format import byte_size
from .figures import LOG, Curves, Plot, Section, graph, layout, marked, safe, titled
from .runs import Points, Run
from .subjects import Subject


def traffic(curves: Curves) -> Section:
    """What the runs send."""
    plots = [
        curves.plot(
            "bytes",
            "Bytes sent in a step",
            "All that rank 0 sent: entries, heads of messages and what ranks agree on. The axis is "
            "logarithmic, since a dense step sends many times as much.",
            lambda run: _positive(run, "bytes_sent"),
            yaxis=titled("bytes", **(LOG | {"exponentformat": "SI"})),
        ),
        curves.plot(
            "ratio",
            "Compression ratio of a step",
            "Elements of the gradient for each entry that was applied. It counts entries; bytes "
            "shrink less, since an entry also needs its position.",
            lambda run: _positive(run, "compression_ratio"),
            yaxis=titled("times fewer entries", **LOG),
        ),
        curves.plot(
            "sent",
            "Bytes sent until now",
            "Adds up the plot of bytes. The steep part is the dense warm-up.",
            lambda run: run.points(np.cumsum(run.column("bytes_sent"))),
            yaxis=titled("bytes", exponentformat="SI", rangemode="tozero"),
        ),
        _messages(curves.subjects),
    ]
    text = (
        "Bytes that rank 0 handed to the network. With equal regions all ranks send about as much."
    )
    return Section("traffic", "Traffic", "Traffic", text, plots)


def _positive(run: Run, name: str) -> Points:
    value = run.column(name)
    return run.points(np.where(value > 0, value, np.nan))


def _messages(subjects: Sequence[Subject]) -> Plot:
    text = (
        "How many messages rank 0 sent, by their size, for each collective. Many small messages "
        "cost latency, few large ones cost bandwidth."
    )
    if len(subjects) > 1:
        text += f" Shown for {subjects[0].label}."
    counts = _by_collective(subjects[0].first)
    bins = sorted({bin for each in counts.values() for bin in each})
    traces = [
        graph().Bar(
            x=[byte_size(bin) for bin in bins],
            y=[each[bin] for bin in bins],
            name=safe(collective),
            marker=marked(place),
            hovertemplate="%{y:,} messages of %{x} or more",
        )
        for place, (collective, each) in enumerate(counts.items())
    ]
    axis = titled("bytes of a message, at least", type="category")
    return Plot(
        "messages",
        "Sizes of messages",
        text,
        traces,
        layout(xaxis=axis, yaxis=titled("messages"), showlegend=True, barmode="stack", bargap=0.2),
    )


def _by_collective(run: Run) -> dict[str, Counter[int]]:
    """How many messages there are in each bin of sizes, by its smallest size."""
    found: dict[str, Counter[int]] = {}
    for detail in run.details:
        for message in detail["messages"]:
            bins = found.setdefault(message["collective"], Counter())
            bins[_bin(message["bytes"])] += message["count"]
    return found


def _bin(size: int) -> int:
    """1, 2 or 5 times a power of ten: the largest that is not above the size; 0 for nothing."""
    power = 10 ** (len(str(size)) - 1)
    return 0 if size < 1 else max(step * power for step in (1, 2, 5) if step * power <= size)
