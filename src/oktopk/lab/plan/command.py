"""The command `oktopk plan`: its flags, and all that it does, in `run`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.flags import did_you_mean, positive, real, share
from ...common.format import NOTHING, byte_size, count, digits, plural, table
from ...common.host import cores
from ...common.values import plain
from ...cost import ALGORITHMS, WIRES, Link, Nodes
from ...train.config.recipes import recipe
from ...train.launch.place import Place, place
from ..network.link import Link as Shape
from . import calibration, plots
from .answer import (
    Answer,
    Question,
    Row,
    answer,
    break_even_sentence,
    rate,
    recommendation,
)
from .answer import (
    share as share_of,
)
from .calibration import Calibration

_DESCRIPTION = """Predict what a training step would take: does compression pay for you?

The answer comes from equations, which `docs/laboratory/cost-model.md` explains. They need a few
constants of the machine, such as the time to select an entry. --measure finds those of this machine
in some seconds. Without it, defaults are used that were measured on another machine.
"""

_EPILOG = """columns
  ms            a step: --step-seconds, and the reduction beyond what backward hides
  x dense       how many times as fast as dense
  compute       ms to compress, to sum and to call
  transfer      ms in which bytes travel
  latency       ms of waiting that do not depend on bytes
  MB            that a rank sends in a step, the mean over ranks
  comm          share of the step that the reduction takes, beyond what backward hides
  samples/s     of all ranks, with --step-seconds and --samples

examples:
  oktopk plan an4                                    a recipe's model and workers, at 1 Gbit/s
  oktopk plan --params 1.3e9 --nworkers 64 --ranks-per-node 8 --bandwidth 100gbit \\
      --step-seconds 0.4 --samples 8
  oktopk plan --params 27.6M --nworkers 8 --bandwidth 100mbit --algorithms oktopk topka gtopk \\
      --wires int8 int4 --density 0.01 0.02
  oktopk plan --simulate --nworkers 2 8 64           run the real code of all ranks in one process;
                                                     see oktopk plan --simulate --help
  oktopk plan --measure --save here.json             measure once ...
  oktopk plan lstman4 --machine here.json --plot plan.svg   ... and use it again
  torchrun --nproc-per-node 2 -m oktopk plan --measure --params 110M   links of a job
"""

_BITS, _LATENCY = 1e9, 50e-6
_BUCKET_BYTES = 25e6
_DEFAULTS = ("dense", "fp16", "oktopk", "topka", "topkdsa", "gtopk", "gaussiank")
_seconds = real("a number of seconds, above 0", lambda value: 0 < value < 1e9)
_factor = real("a number of at least 1", lambda value: 1 <= value < 1e6)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def elements(text: str) -> int:
    """An argparse type: 27569568, 1.3e9, 27.6M or 7B."""
    match = re.fullmatch(r"([\d_,]*\.?\d*(?:e\+?\d{1,2})?)([kmbgt]?)", text.strip().lower())
    try:
        value = float(match[1].replace(",", "")) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of parameters: write 27569568, 1.3e9 or 27.6M"
        )
    return round(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.usage = "oktopk plan [RECIPE] [--params N] [--nworkers P] [--FLAG VALUE ...]"
    what = parser.add_argument_group("what is trained").add_argument
    what("recipe", nargs="?", metavar="RECIPE", help="model and workers of `oktopk recipes`")
    what("--params", type=elements, metavar="N", help="of the model: 27569568, 1.3e9, 27.6M")
    what(
        "--step-seconds",
        type=_seconds,
        metavar="S",
        help="forward, backward and optimizer (unknown: the reduction alone is predicted)",
    )
    what("--samples", type=positive, metavar="N", help="of a worker in a step")
    what(
        "--buckets",
        type=positive,
        metavar="N",
        help="parts that are reduced during backward (one for each 25 MB)",
    )
    where = parser.add_argument_group("on what").add_argument
    where("--nworkers", type=positive, metavar="P", help="workers, one rank each (the recipe's, 8)")
    where("--ranks-per-node", type=positive, default=1, metavar="R", help="that share a link (1)")
    where("--bandwidth", metavar="RATE", help="of a node's link, 100mbit say (measured, or 1gbit)")
    where("--latency", metavar="TIME", help="of a message, 50us say (measured, or 50us)")
    where("--inside-bandwidth", default="100gbit", metavar="RATE", help="in a node (100gbit)")
    where("--inside-latency", default="10us", metavar="TIME", help="in a node (10us)")
    where(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="nccl: messages take no processor, and pairs of ranks send both ways at once (gloo)",
    )
    where("--ranks-per-core", type=_factor, metavar="X", help="where ranks share cores (1)")
    how = parser.add_argument_group("how gradients are averaged").add_argument
    how("--algorithms", nargs="+", metavar="NAME", help=f"({' '.join(_DEFAULTS)})")
    how("--wires", nargs="+", metavar="NAME", help=f"of {', '.join(WIRES)} (int8)")
    how("--density", nargs="+", type=share, metavar="X", help="(the recipe's, 0.02)")
    machine = parser.add_argument_group("the machine").add_argument
    machine("--measure", action="store_true", help="measure this one, or the ranks of this job")
    machine("--save", type=Path, metavar="FILE", help="keep what --measure finds")
    machine("--machine", type=Path, metavar="FILE", help="use what --save kept")
    out = parser.add_argument_group("results").add_argument
    out("--json", action="store_true", help="print JSON instead of a table")
    out(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the time of a step over ranks and over bandwidth, as .svg or .png",
    )


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    _check(args)
    here = place() if args.measure else None
    found = _calibration(args, here)
    if here is not None and here.rank > 0:
        return 0
    if args.save:
        calibration.save(args.save, found)
    if args.measure and not args.params and not args.recipe:
        _show_machine(args, found)
        return 0
    question = _question(args, found)
    result = answer(question)
    if args.plot:
        plots.plot(question, args.plot)
    if args.json:
        print(json.dumps(_as_json(question, found, result), indent=1))
    else:
        print("\n".join(_report(question, found, result)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Mistakes that nothing needs to be measured for."""
    if not args.params and not args.recipe and not args.measure:
        raise UserError("name a recipe, or the size of a model: --params 1.3e9")
    if args.save and not args.measure:
        raise UserError("--save keeps what --measure finds: add --measure")
    if args.measure and (here := place()) and here.size < 2:
        raise UserError("--measure needs two ranks to see the link: start more, or none")
    if args.machine and args.measure:
        raise UserError("--machine uses an earlier measurement: leave out --measure, or --machine")
    for flag, names, known in (
        ("--algorithms", args.algorithms, ALGORITHMS),
        ("--wires", args.wires, WIRES),
    ):
        for name in names or ():
            if name not in known:
                close = did_you_mean(name, known) or f"; there are {', '.join(known)}"
                raise UserError(f"{flag} has no {name!r}{close}")
    _shape(args.bandwidth, args.latency)
    _shape(args.inside_bandwidth, args.inside_latency)
    if args.recipe:
        recipe(args.recipe)
    if args.save:
        calibration.check(args.save)
    if args.plot:
        plots.check(args.plot)


def _calibration(args: argparse.Namespace, here: Place | None) -> Calibration:
    """Measured, from a file, or the defaults."""
    if args.machine:
        return calibration.load(args.machine)
    if not args.measure:
        return Calibration()
    from . import measure

    if here is not None:
        return measure.on_this_job(here)
    print("oktopk: measuring this machine, some seconds", file=sys.stderr)
    return measure.on_this_machine(max(2, min(len(cores()), 4)))


def _question(args: argparse.Namespace, found: Calibration) -> Question:
    config = recipe(args.recipe) if args.recipe else None
    numel = args.params or (config.workload.elements() if config else 0)
    size: int = args.nworkers or (config.launch.nworkers if config else None) or 8
    inside = _shape(args.inside_bandwidth, args.inside_latency)
    machine = dataclasses.replace(found.machine, ranks_a_core=args.ranks_per_core or 1.0)
    if args.backend == "nccl":
        machine = dataclasses.replace(machine, duplex=True, copy=0.0, dense=0.0)
    nodes = None
    if args.ranks_per_node > 1:
        nodes = Nodes(args.ranks_per_node, Link.of(inside.bits, inside.seconds))
    return Question(
        numel=numel,
        size=size,
        link=_link(args, found.link),
        machine=machine,
        densities=args.density or [config.compression.density if config else 0.02],
        algorithms=args.algorithms or _DEFAULTS,
        wires=args.wires or ["int8"],
        nodes=nodes,
        compute=args.step_seconds or 0.0,
        samples=args.samples or (config.run.batch_size if config else 0),
        buckets=args.buckets or max(1, round(4 * numel / _BUCKET_BYTES)),
    )


def _link(args: argparse.Namespace, measured: Link | None) -> Link:
    """What flags say of the link, then what was measured, then 1 Gbit/s."""
    known = measured or Link.of(_BITS, _LATENCY)
    given = _shape(args.bandwidth, args.latency)
    bits = given.bits if args.bandwidth else known.bits
    return Link.of(bits, given.seconds if args.latency else known.latency)


def _shape(rate: str | None, delay: str | None) -> Shape:
    """Rate and latency as the laboratory reads them."""
    return Shape(rate, delay)


def _report(question: Question, found: Calibration, result: Answer) -> list[str]:
    nodes = question.nodes
    spread = f", {plural(nodes.ranks, 'rank')} a node" if nodes else ""
    lines = [
        f"{count(question.numel)} parameters in {plural(question.buckets, 'bucket')}, "
        f"P = {question.size}{spread}, {rate(question.link.bits)}, "
        f"latency {digits(question.link.latency * 1e6)} us",
        f"machine: {found.source}",
    ]
    if not question.compute:
        lines.append("without --step-seconds, ms is of the reduction alone")
    rows = [_cells(row) for row in result.rows]
    lines += ["", *table([list(rows[0]), *(list(row.values()) for row in rows)]), ""]
    sentences = (recommendation(question, result), break_even_sentence(result))
    return [*lines, *filter(None, sentences)]


def _cells(row: Row) -> dict[str, str]:
    cost = row.cost
    return {
        "algorithm": row.name,
        "ms": digits(1e3 * row.step.seconds),
        "x dense": digits(row.speedup),
        "compute": digits(1e3 * cost.compute),
        "transfer": digits(1e3 * cost.transfer),
        "latency": digits(1e3 * cost.latency),
        "MB": digits(cost.bytes_sent / 1e6),
        "comm": share_of(row),
        "samples/s": digits(row.samples_per_second) if row.samples_per_second else NOTHING,
    }


def _show_machine(args: argparse.Namespace, found: Calibration) -> None:
    if args.json:
        print(json.dumps(plain(found), indent=1))
        return
    assert found.link is not None
    print(found.source)
    shown = {
        "element": "ns", "scan": "ns", "clear": "ns", "pick": "ns", "encode": "ns", "decode": "ns",
        "reduce": "ns", "apply": "ns", "merge": "ns", "again": "ns", "dense": "ns", "copy": "ns",
        "step": "us", "message": "us", "turn": "us", "crowd": "times",
    }  # fmt: skip
    factors = {"ns": 1e9, "us": 1e6, "times": 1.0}
    values = plain(found.machine)
    rows = [[name, digits(values[name] * factors[unit]), unit] for name, unit in shown.items()]
    print("\n".join(table(rows)))
    link = found.link
    print(f"link: {byte_size(link.rate)}/s each way, latency {digits(link.latency * 1e6)} us")


def _as_json(question: Question, found: Calibration, result: Answer) -> dict[str, Any]:
    rows = [
        {
            "algorithm": row.algorithm,
            "wire": row.wire,
            "density": row.density,
            "seconds": row.step.seconds,
            "speedup": row.speedup,
            "samples_per_second": row.samples_per_second,
            "communication_share": row.step.share,
            **plain(row.cost),
        }
        for row in result.rows
    ]
    return {
        "format": "oktopk plan",
        "version": 1,
        "question": plain(question),
        "machine": found.source,
        "rows": rows,
        "best": result.best.name,
        "break_even_bits": result.break_even,
        "recommendation": recommendation(question, result),
    }
