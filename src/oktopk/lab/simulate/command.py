"""The command `oktopk plan --simulate`: its flags, and all that it does, in `run`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...common import host
from ...common.errors import UserError
from ...common.flags import positive, share, whole
from ...common.format import byte_size, count, plural
from ...cost import Link, Machine, Nodes
from ..bench import contenders, files
from ..bench.status import Status
from ..network.link import Link as Shape
from . import plots
from .results import Cell, report, save

if TYPE_CHECKING:
    from ...cost.contention import Network
    from .gradients import Source

_SHAPES = ("noise", "skewed", "apart")
_DEFAULTS = ("dense", "topka", "gtopk", "oktopk")
_NUMEL = 100_000
_RECORDED = 2
"""Steps of which links are computed: the last ones."""
_DESCRIPTION = """Run the real code of all ranks in one process, and predict how long messages take.

Every rank has its own gradients and residual, and each message is the one that real ranks would
send through Gloo. From the messages comes the time that they take on links of a given rate, where
messages that are on their way together share links. The time is that of messages: it does not
include forward, backward, selection and summation.

gradients
  noise     synthetic: heavy tails, a part that all ranks have, and drift over steps
  skewed    the same, but nearly all large values are in a tenth of the elements, which moves
  apart     the same, but the large values of each rank are in other elements
  FILE.pt   recorded ones: a list of tensors, or a tensor with a gradient in each row. Ranks take
            them in turn
"""
_EPILOG = """columns, of the second half of the steps
  kB a rank   that a rank sends in a step, the mean over ranks
  largest     the same of the rank that sends most
  words       4-byte words that a rank sends, in multiples of k(P-1)/P
  balance     largest / mean
  messages    to one rank, or collectives, in a step; the most of any rank
  applied     entries that a step applies, over k
  ms          that the messages of a step take

examples:
  oktopk plan --simulate --nworkers 2 4 8 16 32 64 128 256 --plot simulate.svg
  oktopk plan --simulate --nworkers 64 --algorithms oktopk oktopk:wire=plain topkdsa \\
      --gradients skewed --bandwidth 100mbit
  oktopk plan --simulate --nworkers 32 --ranks-per-node 8 --gradients recorded.pt --density 0.01
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.usage = "oktopk plan --simulate [--nworkers P ...] [--FLAG VALUE ...]"
    what = parser.add_argument_group("what is simulated").add_argument
    what(
        "--nworkers",
        nargs="+",
        type=whole(2, 1024),
        default=[2, 4, 8, 16],
        metavar="P",
        help="numbers of ranks (2 4 8 16)",
    )
    what(
        "--algorithms",
        nargs="+",
        default=list(_DEFAULTS),
        metavar="SPEC",
        help=f"with options behind a colon, oktopk:wire=plain say ({' '.join(_DEFAULTS)})",
    )
    what("--density", type=share, default=0.02, metavar="X", help="of sparse algorithms (0.02)")
    what("--gradients", default="noise", metavar="NAME", help="noise, skewed, apart, FILE.pt")
    what("--numel", type=positive, metavar="N", help=f"elements of a gradient ({_NUMEL:,})")
    what("--steps", type=whole(2, 10_000), default=8, metavar="S", help="of each (8)")
    what("--seed", type=whole(0, 1 << 20), default=1, metavar="N", help="of the gradients (1)")
    where = parser.add_argument_group("links").add_argument
    where("--bandwidth", default="1gbit", metavar="RATE", help="of a rank, or a node (1gbit)")
    where("--latency", default="50us", metavar="TIME", help="of a message (50us)")
    where("--call", metavar="TIME", help="to start a message (50us)")
    where("--ranks-per-node", type=positive, default=1, metavar="R", help="that share a link (1)")
    where("--inside-bandwidth", default="100gbit", metavar="RATE", help="in a node (100gbit)")
    where("--inside-latency", default="10us", metavar="TIME", help="in a node (10us)")
    out = parser.add_argument_group("results").add_argument
    out("--json", type=Path, metavar="FILE", help="keep results in this file")
    out("--plot", type=Path, metavar="FILE", help="draw bytes and time over P, as .svg or .png")


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    chosen = [_algorithm(spec) for spec in dict.fromkeys(args.algorithms)]
    if args.plot:
        plots.check(args.plot)
    if args.json:
        files.check_writable("--json", args.json)
    _network(args, 2)
    source = _source(args)
    sizes = sorted(set(args.nworkers))
    cells: list[Cell] = []
    print(_title(args, source), flush=True)
    try:
        with Status() as status:
            status.expect(len(sizes) * len(chosen))
            for size in sizes:
                for contender in chosen:
                    cells.append(_cell(args, contender, source, size, status))
                    status.finished()
                    if args.json:
                        save(args.json, vars(args), cells)
    finally:
        if cells:
            print("\n" + report(cells), flush=True)
    if args.plot:
        plots.plot(cells, args.plot)
    return 0


def _algorithm(spec: str) -> contenders.Contender:
    contender = contenders.parse(spec, training=False)
    if contender.name in contenders.HOOKS:
        raise UserError(f"--algorithms {spec}: only algorithms of this library can be simulated")
    if contender.name == "auto":
        raise UserError(
            f"--algorithms {spec}: auto measures seconds, which simulated ranks do not "
            "take; simulate what it chooses from, dense and oktopk"
        )
    return contender


def _source(args: argparse.Namespace) -> Source:
    from .gradients import Noise, Recorded

    if args.gradients in _SHAPES:
        numel = args.numel or _NUMEL
        _check_memory(args, numel)
        return Noise(args.gradients, numel, args.seed)
    path = Path(args.gradients)
    if path.suffix != ".pt":
        raise UserError(f"--gradients {args.gradients} must be {', '.join(_SHAPES)} or a file *.pt")
    if args.numel:
        raise UserError("--numel is of synthetic gradients: leave it out, the file says it")
    source = Recorded(path)
    _check_memory(args, source.numel)
    return source


def _check_memory(args: argparse.Namespace, numel: int) -> None:
    """Each rank has three vectors, and may hold the entries of all ranks."""
    size = max(args.nworkers)
    needed = size * (12 * numel + 24 * args.density * numel * size)
    left = host.left()
    if left is not None and needed > left:
        raise UserError(
            f"{plural(size, 'rank')} with {plural(numel, 'element')} each take about "
            f"{byte_size(needed)} of memory, and {byte_size(left)} are left: take a smaller "
            "--numel, or fewer --nworkers"
        )


def _network(args: argparse.Namespace, size: int) -> Network:
    from ...cost.contention import Network

    link, inside = (
        Link.of(shape.bits, shape.seconds)
        for shape in (
            Shape(args.bandwidth, args.latency),
            Shape(args.inside_bandwidth, args.inside_latency),
        )
    )
    nodes = Nodes(args.ranks_per_node, inside) if args.ranks_per_node > 1 else None
    call = Machine().message if args.call is None else Shape(None, args.call).seconds
    return Network(size, link, nodes, call)


def _cell(
    args: argparse.Namespace,
    contender: contenders.Contender,
    source: Source,
    size: int,
    status: Status,
) -> Cell:
    """One algorithm on one number of ranks."""
    from ...algorithms import algorithm
    from ...cost.contention import finish
    from .simulation import simulate

    where = f"{contender.spec}, P = {size}"
    dense = contender.name == contenders.BASELINE
    chosen = algorithm("dense") if dense else contender.algorithm(density=args.density)

    def watch(rank: int, step: int, *_: object) -> None:
        status.show(f"{where}: step {step + 1} of {args.steps}, {rank + 1} of {size} ranks")

    recorded = min(_RECORDED, args.steps // 2)
    with _enough_threads(size):
        result = simulate(chosen, source, size, args.steps, recorded, watch)
    status.show(f"{where}: links")
    seconds = finish(result.schedule, _network(args, size)).max() / result.recorded
    steps = result.stats[args.steps // 2 :]
    return Cell.of(contender.spec, size, steps, float(seconds))


@contextlib.contextmanager
def _enough_threads(size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise UserError(
            f"this system does not allow {size} threads: raise `ulimit -u`, or take fewer "
            "--nworkers"
        ) from None


def _title(args: argparse.Namespace, source: Source) -> str:
    from .gradients import Recorded

    nodes = f", {args.ranks_per_node} ranks a node" if args.ranks_per_node > 1 else ""
    text = (
        f"{count(source.numel)} elements, density {args.density:g}, gradients {source.name}, "
        f"{args.bandwidth}, latency {args.latency}{nodes}"
    )
    if isinstance(source, Recorded) and source.count < max(args.nworkers):
        text += (
            f"\nthe file has {plural(source.count, 'gradient')}, so some of "
            f"{max(args.nworkers)} ranks have the same: entries meet more often than in real runs"
        )
    return text
