"""Results of `oktopk bench` as a picture. It needs matplotlib, the extra `plots`.

A panel of the raw workload shows speed-ups over dense against the rate of the links, or bars if
there is one rate only. A panel of training shows loss against seconds. There is one panel for each
number of hosts and, in training, for each link.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import UserError
from . import files
from .contenders import BASELINE
from .results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
_BASELINE_COLOUR = "#000000"
# Okabe and Ito chose these so that colour-blind people can tell them apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_LINES = ("-", "--", ":", "-.")
_PANEL = (5.5, 4.0)
_MOST_POINTS = 500


def check(path: Path) -> None:
    """UserError if nothing could be drawn, which the user should know before measuring."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot {path} must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'oktopk[plots]'")
    files.check_writable("--plot", path)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw all results, of one run or several."""
    from matplotlib.figure import Figure

    panels = _panels(results)
    looks = styles([result.name for result in results])
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    with saved(path) as save:
        figure = Figure(figsize=(_PANEL[0] * across, _PANEL[1] * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, draw in zip(grid.flat, panels, strict=False):
            draw(axes, looks)
            tidy(axes)
        save(figure)


@contextlib.contextmanager
def saved(path: Path) -> Iterator[Callable[[Figure], None]]:
    """Give a function that saves a figure, which must be made inside the block."""
    import matplotlib

    def save(figure: Figure) -> None:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with files.replacing("--plot", path) as part:
            figure.savefig(part, dpi=150, metadata=metadata, format=path.suffix[1:])

    # Text stays text, which keeps the file small; and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oktopk"}):
        yield save


def tidy(axes: Axes) -> None:
    """A light grid, and no frame above and to the right."""
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


Styles = dict[str, tuple[str, str]]
"""Colour and line of each contender."""


def styles(names: Sequence[str]) -> Styles:
    """A look for each name. Dense is always black."""
    others = [name for name in dict.fromkeys(names) if name != BASELINE]
    looks = {BASELINE: (_BASELINE_COLOUR, "-")}
    for index, name in enumerate(others):
        turn, colour = divmod(index, len(_COLOURS))
        looks[name] = (_COLOURS[colour], _LINES[turn % len(_LINES)])
    return looks


def _panels(results: Sequence[Result]) -> list[Callable[[Axes, Styles], None]]:
    panels: list[Callable[[Axes, Styles], None]] = []
    raw: dict[tuple[object, ...], list[Result]] = {}
    training: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        setting = result.setting
        if setting.workload == "raw":
            key = (setting.hosts, setting.delay, setting.loss, setting.loopback, result.numel)
            raw.setdefault(key, []).append(result)
        else:
            training.setdefault((setting.hosts, setting.link, result.numel), []).append(result)
    for group in raw.values():
        rates = {result.setting.bits for result in group if result.setting.bits}
        panels.append(partial(_speedups if len(rates) > 1 else _bars, group))
    return panels + [partial(_losses, group) for group in training.values()]


def _speedups(results: Sequence[Result], axes: Axes, looks: Styles) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    setting = results[0].setting
    points: dict[str, dict[float, list[float]]] = {}
    for result in results:
        if result.setting.bits and result.speedup:
            by_rate = points.setdefault(result.name, {})
            by_rate.setdefault(result.setting.bits, []).append(result.speedup)
    for name, by_rate in points.items():
        colour, line = looks[name]
        rates = sorted(by_rate)
        values = [statistics.median(by_rate[rate]) for rate in rates]
        axes.plot(rates, values, color=colour, linestyle=line, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="rate of a link, bit/s", ylabel="times dense")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({rate for by_rate in points.values() for rate in by_rate}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: short_rate(bits)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    delay = f", {setting.delay} delay" if setting.delay else ""
    axes.set_title(f"step of {results[0].numel:,} elements, P = {setting.hosts}{delay}", size=10)
    axes.legend(frameon=False, fontsize=8)


def _bars(results: Sequence[Result], axes: Axes, looks: Styles) -> None:
    speedups: dict[str, list[float]] = {}
    for result in results:
        speedups.setdefault(result.name, []).append(result.speedup or 0.0)
    names = list(speedups)[::-1]
    values = [statistics.median(speedups[name]) for name in names]
    bars = axes.barh(names, values, color=[looks[name][0] for name in names])
    axes.bar_label(bars, fmt="%.3g", padding=3)
    setting = results[0].setting
    title = f"step of {results[0].numel:,} elements, P = {setting.hosts}, {setting.link}"
    axes.set_title(title, size=10)
    axes.set(xlabel="times dense")
    axes.margins(x=0.12)


def _losses(results: Sequence[Result], axes: Axes, looks: Styles) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    drawn = set()
    for result in results:
        colour, line = looks[result.name]
        label = None if result.name in drawn else result.name
        drawn.add(result.name)
        # The first means are of a few batches only.
        curve = result.curve[(result.window or 1) - 1 :] or result.curve
        curve = curve[:: max(1, len(curve) // _MOST_POINTS)]
        seconds, losses = [point[0] for point in curve], [point[1] for point in curve]
        axes.plot(seconds, losses, color=colour, linestyle=line, label=label, linewidth=1.5)
    target = results[0].target_loss
    if target is not None:
        axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds", ylabel="training loss", xlim=(0, None))
    low, high = axes.get_ylim()
    if low > 0 and high / low > 5:  # otherwise a logarithmic axis would be left without numbers
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    setting = results[0].setting
    title = f"training {results[0].numel:,} parameters, P = {setting.hosts}, {setting.link}"
    axes.set_title(title, size=10)
    axes.legend(frameon=False, fontsize=8)


def short_rate(bits: float) -> str:
    """A rate such as 100M or 1G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits >= size:
            return f"{bits / size:g}{unit}"
    return f"{bits:g}"
