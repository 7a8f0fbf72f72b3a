"""Curves of `oktopk plan --simulate`: bytes and time over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.plots import check, saved, styles, tidy
from .results import WORD, Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check", "plot"]

_BOUND = 6
"""Words of Ok-Topk, in multiples of k(P-1)/P: the bound of the paper."""


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw both panels."""
    from matplotlib.figure import Figure

    with saved(path) as save:
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _curves(left, cells, lambda cell: cell.bytes_mean / 1e3)
        _bounds(left, cells)
        left.set(ylabel="kB a rank sends in a step")
        _curves(right, cells, lambda cell: 1e3 * cell.seconds)
        right.set(ylabel="ms that the messages of a step take")
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
        figure.suptitle(f"simulated ranks, {cells[0].numel:,} elements", size=11)
        save(figure)


def _curves(axes: Axes, cells: Sequence[Cell], value: Callable[[Cell], float]) -> None:
    looks = styles([cell.algorithm for cell in cells])
    for name in dict.fromkeys(cell.algorithm for cell in cells):
        colour, line = looks[name]
        own = [cell for cell in cells if cell.algorithm == name]
        sizes, values = [cell.size for cell in own], [value(cell) for cell in own]
        axes.plot(sizes, values, color=colour, linestyle=line, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="P, the number of ranks")
    axes.set_xticks(sorted({cell.size for cell in cells}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    tidy(axes)


def _bounds(axes: Axes, cells: Sequence[Cell]) -> None:
    """What the equations allow, of the sparse algorithms' k."""
    sparse = {cell.size: cell for cell in cells if cell.k < cell.numel}
    sizes = sorted(sparse)
    if not sizes:
        return
    bound = [_BOUND * WORD * sparse[size].unit / 1e3 for size in sizes]
    linear = [2 * WORD * sparse[size].k * (size - 1) / 1e3 for size in sizes]
    axes.plot(sizes, bound, color="0.3", linewidth=0.9, linestyle="--", label="6k(P-1)/P words")
    axes.plot(sizes, linear, color="0.6", linewidth=0.9, linestyle=":", label="2k(P-1) words")
