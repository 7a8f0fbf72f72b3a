"""Curves of `oktopk plan`: the time of a step over ranks, and over bandwidth. They need matplotlib,
the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.plots import check, saved, short_rate, styles, tidy
from .answer import Question, Row, rate, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check", "plot"]

SIZES = [2**power for power in range(1, 13)]
"""Ranks, up to 4,096."""
RATES = [1e7 * 10 ** (power / 10) for power in range(47)]
"""Bits a second, 10 Mbit/s to 400 Gbit/s."""


def plot(question: Question, path: Path) -> None:
    """Draw both panels."""
    from matplotlib.figure import Figure

    with saved(path) as save:
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _curves(left, SIZES, lambda size: rows_of(question.of(int(size))))
        left.set(xlabel="ranks", title=f"at {rate(question.link.bits)}")
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter("{x:,.0f}")
        _curves(right, RATES, lambda bits: rows_of(question.at(bits)))
        right.set(xscale="log", xlabel="rate of a link, bit/s", title=f"with {question.size} ranks")
        right.xaxis.set_major_formatter(lambda bits, _: short_rate(bits))
        right.axvline(question.link.bits, color="0.6", linewidth=0.8, linestyle="--")
        left.axvline(question.size, color="0.6", linewidth=0.8, linestyle="--")
        right.legend(frameon=False, fontsize=8)
        figure.suptitle(f"predicted step, {question.numel:,} parameters", size=11)
        save(figure)


def _curves(axes: Axes, places: Sequence[float], rows: Callable[[float], list[Row]]) -> None:
    found = [rows(place) for place in places]
    looks = styles([row.name for row in found[0]])
    for index, row in enumerate(found[0]):
        colour, line = looks[row.name]
        times = [1e3 * each[index].step.seconds for each in found]
        axes.plot(places, times, color=colour, linestyle=line, label=row.name, linewidth=1.5)
    axes.set(yscale="log", ylabel="ms a step")
    axes.yaxis.set_major_formatter("{x:g}")
    tidy(axes)
