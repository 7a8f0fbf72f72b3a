"""Steps that `oktopk bench raw` measured, next to what the cost model predicts for them.

    oktopk lab --hosts 8 --rate 1gbit -- oktopk plan --measure --save machine.json
    oktopk bench raw --hosts 2 4 8 --rate 100mbit 500mbit 1gbit --numel 2700000 \\
        --contenders topka gtopk oktopk --steps 6 --skip 4 --seconds 4 --json results.json
    oktopk bench raw --hosts 2 4 8 --rate 100mbit 500mbit 1gbit --numel 27600000 \\
        --contenders topka gtopk oktopk --steps 6 --skip 4 --seconds 4 --json results.json --append
    python benchmarks/cost_model.py results.json --machine machine.json --plot cost-model.svg

Nothing is fitted to the results: constants are from the machine's file, and rates from the results'
settings. Ranks of a race share the cores of one machine, and the model knows how many. Eight ranks
measure, so that the file also knows what waiting for a core takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import parser_for, table
from oktopk.common.errors import UserError
from oktopk.common.flags import real
from oktopk.cost import ALGORITHMS, Link, predict
from oktopk.lab.bench import files, plots
from oktopk.lab.bench.contenders import parse
from oktopk.lab.bench.results import Result
from oktopk.lab.network.link import Link as Shape
from oktopk.lab.plan import calibration
from oktopk.lab.plan.calibration import Calibration


@dataclass(frozen=True)
class Cell:
    """One contender in one setting."""

    result: Result
    predicted: float
    """Seconds of a step."""

    @property
    def measured(self) -> float:
        return self.result.seconds.median

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="of oktopk bench raw --json")
    parser.add_argument("--machine", type=Path, required=True, help="of oktopk plan --save")
    parser.add_argument(
        "--within",
        type=real("above 0", lambda value: value > 0),
        default=0.25,
        metavar="X",
        help="a cell is right if predicted / measured is 1 - X to 1 + X (0.25)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .svg or .png")
    args = parser.parse_args()
    if args.plot:
        plots.check(args.plot)
    found = calibration.load(args.machine)
    cells = cells_of(args.results, found)
    right = [abs(cell.ratio - 1) <= args.within for cell in cells]
    print(found.source)
    print(table([row(cell, hit) for cell, hit in zip(cells, right, strict=True)], left=3))
    print(f"within {args.within:.0%}: {sum(right)} of {len(cells)} cells")
    off = math.exp(sum(abs(math.log(cell.ratio)) for cell in cells) / len(cells)) - 1
    print(f"mean distance (geometric): {off:.0%}")
    if args.plot:
        draw(cells, args.within, args.plot)


def cells_of(path: Path, found: Calibration) -> list[Cell]:
    """All raw results of algorithms that the model knows."""
    cells = [
        Cell(result, prediction(result, found))
        for run in files.load(path)
        for result in run.results
        if result.setting.workload == "raw" and result.setting.bits and known(result)
    ]
    if not cells:
        raise UserError(f"{path} has no results of oktopk bench raw on links with a rate")
    return cells


def known(result: Result) -> bool:
    return parse(result.contender, training=False).name in ALGORITHMS


def prediction(result: Result, found: Calibration) -> float:
    """Seconds of a step, from the setting alone."""
    setting, contender = result.setting, parse(result.contender, training=False)
    assert setting.bits is not None
    assert found.link is not None  # it is from a file
    density, wire = 1.0, "float32"
    if contender.sparse:
        options = {"density": result.density} if result.density else {}
        algorithm = contender.algorithm(**options)
        density, wire = algorithm.density, algorithm.wire
    delay = Shape(setting.rate, setting.delay).seconds
    # Gloo's receiver says that it is ready before the sender sends.
    link = Link.of(setting.bits, found.link.latency + 2 * delay)
    share = max(1.0, setting.hosts * setting.threads / setting.cores)
    machine = dataclasses.replace(found.machine, ranks_a_core=share)
    k = max(1, round(density * result.numel))
    cost = predict(contender.name, result.numel, k, setting.hosts, wire, link, machine)
    return cost.seconds


def row(cell: Cell, right: bool) -> dict[str, object]:
    setting = cell.result.setting
    return {
        "contender": cell.result.name,
        "link": setting.link,
        "within": "yes" if right else "NO",
        "elements": cell.result.numel,
        "P": setting.hosts,
        "measured ms": 1e3 * cell.measured,
        "predicted ms": 1e3 * cell.predicted,
        "ratio": cell.ratio,
    }


def draw(cells: Sequence[Cell], within: float, path: Path) -> None:
    """Predicted against measured, on logarithmic axes."""
    from matplotlib.figure import Figure

    looks = plots.styles([cell.result.contender for cell in cells])
    marks = dict(zip(sorted({cell.result.setting.hosts for cell in cells}), "o^sDv*", strict=False))
    with plots.saved(path) as save:
        figure = Figure(figsize=(6.5, 5.5), layout="constrained")
        axes = figure.subplots()
        for name, (colour, _) in looks.items():
            for size, mark in marks.items():
                mine = [
                    cell
                    for cell in cells
                    if (cell.result.contender, cell.result.setting.hosts) == (name, size)
                ]
                axes.scatter(
                    [1e3 * cell.measured for cell in mine],
                    [1e3 * cell.predicted for cell in mine],
                    color=colour,
                    marker=mark,
                    s=26,
                    label=f"{name}, P = {size}",
                )
        ends = [1e3 * edge(cell.measured for cell in cells) for edge in (min, max)]
        axes.plot(ends, ends, color="0.4", linewidth=0.8)
        low, high = ([(1 + sign * within) * end for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color="0.9", zorder=0, label=f"within {within:.0%}")
        axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=7)
        save(figure)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"cost_model.py: {error}") from None
