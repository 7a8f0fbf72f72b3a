"""The command `oktopk compare`: its flags and its help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from ...common.flags import positive, real, share, whole
from ...train.config.recipes import DEFAULT
from ...workloads import RECIPES

_DESCRIPTION = """Train one recipe with several algorithms, densities, warm-ups and seeds, and
compare losses, metrics, bytes and times.

Each cell of the grid is a run of `oktopk train` in processes of its own. Its run folder is
DIR/cells/NAME. The same command again goes on where it ended: cells that are finished are not
trained again, and cells that failed are tried again. More seeds or densities extend the grid.

--densities, --warmups and --sigma-scales multiply only compressors that have these knobs. Dense has
none, so it runs once for each seed.
"""

_COLUMNS = """columns
  seeds            finished runs
  training loss    mean of the last epoch's steps, or of the last half of a run that is shorter than
                   two epochs; rank 0's batches
  val loss, ...    the workload's metrics, validated at the end
  samples/s        over all steps, dense warm-up included
  bytes a step     sent by rank 0 in a sparse step; in a dense one where no step is sparse
  x fewer          how many times fewer bytes than a dense step
  ratio            elements by elements applied, of the sparse steps
  to target        seconds of training until the training loss reaches --target-loss, or the final
                   training loss of the baseline with the same seed; `(2)`: reached by 2 seeds only
in the tables of final values, A ± B is mean and standard deviation over seeds; in the table of
differences to the baseline with the same seed, mean and half of its 95 % interval, by Student's t.
better or worse: the interval leaves out zero
"""

_EPILOG = f"""{_COLUMNS}
examples:
  oktopk compare text --seeds 3                         dense and oktopk, three seeds, on loopback
  oktopk compare text --compressors dense,oktopk,gtopk --densities 0.01,0.02 --warmups 50 --seeds 3
  oktopk compare an4 --data-dir corpora --compressors dense,gaussiank --sigma-scales 2.5,3
  oktopk compare text --compressors dense,oktopk:wire=int4,oktopk:lr=0.002 --max-steps 400
  oktopk compare text --set width=64 depth=2 batch_size=16 --seeds 4,7 --dir small
  oktopk compare text --hosts 4 --rate 1gbit --delay 0.2ms    in the emulated network (needs root)
  oktopk compare --report-only small --baseline oktopk-d0.01-w50 --target-loss 1.5
"""

N = TypeVar("N", int, float)


def _several(read: Callable[[str], N]) -> Callable[[str], list[N]]:
    """An argparse type: values with commas between them, each one once."""

    def read_all(text: str) -> list[N]:
        values = list(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r} has no value")
        return values

    return read_all


_seconds = real("a number of seconds above 0", lambda value: 0 < value <= 1e8)
_finite = real("a finite number", math.isfinite)
_scale = real("above 0", lambda value: 0 < value < math.inf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.usage = "oktopk compare [RECIPE] [--compressors NAMES] [--seeds N] [--FLAG VALUE ...]"
    add = parser.add_argument
    add("recipe", nargs="?", default=DEFAULT, metavar="RECIPE", help=f"{', '.join(RECIPES)}")
    grid = parser.add_argument_group("the grid; several values have commas between them")
    grid.add_argument(
        "--compressors",
        nargs="+",
        default=["dense,oktopk"],
        metavar="NAMES",
        help="as of `oktopk train`, each with its own options behind a colon (dense,oktopk)",
    )
    for flag, kind, metavar, text in (
        ("--densities", _several(share), "X", "shares of elements to apply (the recipe's)"),
        ("--warmups", _several(whole(0)), "N", "dense steps at the start (the recipe's)"),
        ("--sigma-scales", _several(_scale), "X", "of gaussiank (2.5)"),
    ):
        grid.add_argument(flag, type=kind, metavar=f"{metavar},...", help=text)
    grid.add_argument(
        "--seeds", default="1", metavar="N", help="3 is 1, 2 and 3; 4,7 names them; 7, is 7 (1)"
    )
    shared = parser.add_argument_group("for all cells").add_argument
    shared(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of `oktopk train`, such as batch_size=4 lr=0.001",
    )
    shared("--data-dir", metavar="PATH", help="the data, as in `oktopk train`")
    shared("--max-epochs", type=positive, metavar="N", help="passes over the data (the recipe's)")
    shared("--max-steps", type=positive, metavar="N", help="end after this many, if that is sooner")
    network = parser.add_argument_group("where").add_argument
    network("--nworkers", type=whole(1, 256), metavar="N", help="on loopback (the recipe's, or 2)")
    network(
        "--hosts", type=int, metavar="P", help="emulated hosts with one worker each; needs root"
    )
    network("--rate", metavar="RATE", help="of every host, each way: 1gbit, 100mbit (unlimited)")
    network("--delay", metavar="TIME", help="one way between hosts: 0.2ms (none)")
    network("--loss", type=float, default=0.0, metavar="PERCENT", help="of packets (0)")
    network(
        "--timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="time without a step after which a cell has failed (1800)",
    )
    out = parser.add_argument_group("results").add_argument
    out("--dir", metavar="DIR", help="their folder (runs/compare-RECIPE)")
    out("--baseline", metavar="NAME", help="of a variant, for differences (dense)")
    out("--target-loss", type=_finite, metavar="X", help="to reach (the final one of the baseline)")
    out("--drop-checkpoints", action="store_true", help="of cells once they are finished")
    out("--report-only", metavar="DIR", help="train nothing, show the results in DIR")


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    from . import work  # needs torch, for which help does not wait

    return work.run(args)
