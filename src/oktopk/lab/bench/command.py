"""The command `oktopk bench`: its flags, and all that it does, in `run`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...common.errors import UserError
from ...common.flags import positive, real, share, whole
from ...train.config.recipes import DEFAULT
from ..interruption import terminated_like_interrupted
from . import files, plots, tables
from .plan import DEFAULT_RATE, OF_RECIPE, Bench, check
from .race import Group, measure
from .ranks import RanksError
from .results import Result, Setting
from .status import Status

_DESCRIPTION = """Compare ways to average gradients, on the same hosts, in one run.

Hosts are network namespaces of this machine, with links of a given rate and delay (needs root).
Without root, or with --loopback, ranks talk over loopback, where bytes cost next to nothing.

workloads
  raw      a gradient of --numel elements is averaged, again and again
  train    the model of a recipe of `oktopk train` is trained in DDP

contenders, each with options behind a colon
  dense                      plain all_reduce; DDP as it is. It always runs, and first; the
                             others are compared with it
  fp16, bf16                 DDP's hooks that send 16 bits an element
  powersgd:2                 DDP's PowerSGD hook, of rank 2; powersgd:2,start=20 begins with 20
                             dense steps. It has one bucket, because Gloo needs that
  oktopk, topka, topkdsa, gtopk, gaussiank, ...
                             this library's algorithms, with their options:
                             oktopk:wire=int8, gtopk:density=0.01
  own-dense                  this library's dense allreduce
In training, a contender may have its own learning rate and so on: powersgd:2,lr=0.001. Where the
recipe has AdamW, sparse contenders are trained with oktopk.AdamW, and all others with torch's.
"""

_EPILOG = f"""{tables.COLUMNS}
examples:
  oktopk bench                                  raw, 4 hosts, 1 Gbit/s
  oktopk bench --loopback --hosts 2 --numel 1000000
  oktopk bench raw --rate 100mbit 1gbit 10gbit --hosts 4 8 --contenders oktopk powersgd:1 fp16 \\
      --json results.json --plot speedup.svg
  oktopk bench raw --contenders oktopk oktopk:wire=plain topka --density 0.01 0.02 --delay 5ms
  oktopk bench train --rate 100mbit --contenders fp16 powersgd:2 oktopk:warmup_steps=20 \\
      --epochs 6 --json results.json --append --plot loss.svg
  oktopk bench train --recipe text --data-dir book.txt --hosts 2 --epochs 2
  oktopk bench train --recipe an4 --data-dir corpora --contenders oktopk oktopk:lr=0.003
  oktopk bench --report-only --json results.json --plot all.svg
"""

_LONG = 1e8
"""Seconds; clocks of the system cannot wait for much more."""
_seconds = real(f"above 0 and at most {_LONG:.0e}", lambda value: 0 < value <= _LONG)
_finite = real("a finite number", math.isfinite)
_seed = whole(0, (1 << 40) - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "oktopk bench [raw|train] [--contenders SPEC ...] [--FLAG VALUE ...]"
    add = parser.add_argument
    add("workload", nargs="?", choices=("raw", "train"), default="raw", help="(raw)")
    what = parser.add_argument_group("what is compared").add_argument
    what("--contenders", nargs="+", metavar="SPEC", help="besides dense (one of each)")
    what(
        "--density",
        nargs="+",
        type=share,
        default=[0.02],
        metavar="X",
        help="of sparse contenders that do not name their own; each runs with each (0.02)",
    )
    network = parser.add_argument_group("the network; several values are all tried").add_argument
    network(
        "--hosts", nargs="+", type=positive, default=[4], metavar="P", help="one rank on each (4)"
    )
    network(
        "--rate", nargs="+", metavar="RATE", help=f"of every link, 100mbit say ({DEFAULT_RATE})"
    )
    network("--delay", nargs="+", metavar="TIME", help="one way, 0.2ms say (none)")
    network("--loss", type=float, default=0.0, metavar="PERCENT", help="of packets (0)")
    network("--loopback", action="store_true", help="no emulated network")
    amount = parser.add_argument_group("how much is measured").add_argument
    amount(
        "--steps", type=positive, metavar="N", help="raw: measured (20); train: all (as --epochs)"
    )
    amount("--skip", type=whole(0), default=10, metavar="N", help="raw: steps before (10)")
    amount(
        "--seconds",
        type=_seconds,
        metavar="S",
        help="a contender's time in each setting; where steps are slow, fewer are measured, but at "
        "least three (raw: 30, train: 900)",
    )
    amount(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="time without a step after which ranks count as dead (600)",
    )
    amount("--threads", type=whole(1, 4096), default=1, metavar="N", help="of each rank (1)")
    amount("--seed", type=_seed, default=1, metavar="N", help="of data and weights (1)")
    raw = parser.add_argument_group("raw").add_argument
    raw("--numel", type=positive, default=27_569_568, metavar="N", help="elements (27,569,568)")
    train = parser.add_argument_group("train").add_argument
    train("--recipe", default=DEFAULT, metavar="NAME", help=f"of `oktopk recipes` ({DEFAULT})")
    train("--data-dir", default="", metavar="DIR", help="its data, as in `oktopk train`")
    train("--epochs", type=positive, metavar="N", help="as many as the recipe's by default")
    train(
        "--warmup-steps",
        type=whole(0),
        default=20,
        metavar="N",
        help="dense steps of sparse contenders that do not name their own (20)",
    )
    train("--target-loss", type=_finite, metavar="X", help="to reach (the last loss of dense)")
    train(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=f"for all contenders: {', '.join(OF_RECIPE)}",
    )
    out = parser.add_argument_group("results").add_argument
    out("--json", type=Path, metavar="FILE", help="keep results in this file")
    out("--append", action="store_true", help="add to those in the file")
    out("--plot", type=Path, metavar="FILE", help="draw them, as .svg or .png")
    out("--report-only", action="store_true", help="measure nothing, show the file's results")


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    if args.plot:
        plots.check(args.plot)
    if args.report_only:
        return _report_only(args)
    bench = check(args)
    runs = files.load(args.json) if args.append and os.path.exists(args.json) else []
    report = _Report(args, bench, runs)
    try:
        with (
            terminated_like_interrupted(),
            Status() as status,
            contextlib.closing(measure(bench, status)) as groups,
        ):
            for group in groups:
                if group.whole:
                    status.clear()
                report.add(group)
    except RanksError as error:
        print(f"oktopk: error: {error}", file=sys.stderr)
        return 1
    finally:
        report.end()
    return 0


class _Report:
    """Keeps results, whatever happens: in the file after every contender, and as a table at the end
    of a setting, or at the end of all."""

    def __init__(
        self, args: argparse.Namespace, bench: Bench, earlier: Sequence[files.Run]
    ) -> None:
        self._json, self._plot, self._earlier = args.json, args.plot, earlier
        self._run = files.new_run(bench.arguments)
        self._group: Group | None = None
        self._tables = 0

    def add(self, group: Group) -> None:
        """The results of a setting until now."""
        self._group = group
        if self._json:
            results, notes = self._run.results + group.results, self._run.notes + group.notes
            this_run = dataclasses.replace(self._run, results=results, notes=notes)
            files.save(self._json, [*self._earlier, this_run])
        if group.whole:
            self._print()

    def end(self) -> None:
        if self._group:
            self._print()
        results = [result for each in (*self._earlier, self._run) for result in each.results]
        if self._plot and results:
            plots.plot(results, self._plot)

    def _print(self) -> None:
        assert self._group is not None
        lines = [tables.report(self._group.results)] if self._group.results else []
        print(("\n" if self._tables else "") + "\n".join([*lines, *self._group.notes]), flush=True)
        self._run.results.extend(self._group.results)
        self._run.notes.extend(self._group.notes)
        self._tables += 1
        self._group = None


def _report_only(args: argparse.Namespace) -> int:
    if not args.json:
        raise UserError("--report-only needs --json FILE, with results")
    runs = files.load(args.json)
    if not any(each.results for each in runs):
        raise UserError(f"--json {args.json} holds no results")
    for number, each in enumerate(runs):
        groups: dict[Setting, list[Result]] = {}
        for result in each.results:
            groups.setdefault(result.setting, []).append(result)
        print(("\n" if number else "") + f"{each.when}, {each.machine.processor}")
        shown = ["\n\n".join(tables.report(group) for group in groups.values())]
        print("\n".join([*filter(None, shown), *each.notes]))
    if args.plot:
        plots.plot([result for each in runs for result in each.results], args.plot)
    return 0
