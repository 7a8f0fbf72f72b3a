"""The plan of `oktopk bench`, made from its arguments.

All mistakes of a user are found here, before the first rank is started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...common import host
from ...common.errors import UserError
from ...common.format import byte_size
from ...workloads import RECIPES, WORKLOADS
from ..network import Link, check_hosts, unavailable
from ..settings import read_settings
from . import files
from .contenders import BASELINE, OF_OWN_TRAINING, OF_TRAINING, Contender, parse

_DEFAULT_CONTENDERS = {
    "raw": ("fp16", "bf16", "powersgd:1", "oktopk", "topka", "topkdsa", "gtopk", "gaussiank"),
    "train": ("fp16", "bf16", "powersgd:1", "powersgd:2", "powersgd:4", "oktopk"),
}
DEFAULT_RATE = "1gbit"
_COPIES = 4
"""Tensors of --numel elements that a rank holds for certain."""
_MOST_DENSE_STEPS = 1000
SECONDS = {"raw": 30.0, "train": 900.0}
OF_RECIPE = (
    *dict.fromkeys(name for each in WORKLOADS for name in each.options() if name != "data_dir"),
    "batch_size",
    *OF_TRAINING,
    *OF_OWN_TRAINING,
)
"""Options of `Config` that --set can change for all contenders."""


@dataclass(frozen=True)
class Bench:
    """Everything that is to be measured. All of it has been checked."""

    workload: str
    contenders: Sequence[Contender]
    """The first one is dense, and all others are compared with it."""
    densities: Sequence[float]
    hosts: Sequence[int]
    links: Sequence[Link]
    loopback: bool
    steps: int | None
    skip: int
    seconds: float
    timeout: float
    threads: int
    seed: int
    numel: int
    recipe: str
    values: Mapping[str, Any]
    warmup_steps: int
    target_loss: float | None
    arguments: Mapping[str, Any]
    """As the user gave them, to be kept with the results."""

    def entries(self) -> list[tuple[Contender, float | None]]:
        """All contenders but the first. Sparse ones without a density run with each density."""
        return [
            (contender, density)
            for contender in self.contenders[1:]
            for density in self._densities_of(contender)
        ]

    def _densities_of(self, contender: Contender) -> Sequence[float | None]:
        if not contender.sparse:
            return [None]
        own = contender.options.get("density")
        return self.densities if own is None else [own]


def check(args: argparse.Namespace) -> Bench:
    """The plan; UserError says what is wrong with the arguments."""
    training = args.workload == "train"
    contenders = _contenders(args, training)
    if args.append and not args.json:
        raise UserError("--append needs --json FILE")
    for hosts in args.hosts:
        check_hosts(hosts)
    loopback, links = _links(args)
    bench = Bench(
        workload=args.workload,
        contenders=contenders,
        densities=list(dict.fromkeys(args.density)),
        hosts=list(dict.fromkeys(args.hosts)),
        links=links,
        loopback=loopback,
        steps=args.steps,
        skip=args.skip,
        seconds=args.seconds or SECONDS[args.workload],
        timeout=args.timeout,
        threads=args.threads,
        seed=args.seed,
        numel=args.numel,
        recipe=args.recipe,
        values=_values(args) if training else {},
        warmup_steps=args.warmup_steps,
        target_loss=args.target_loss,
        arguments={
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name != "command"
        },
    )
    _check_options(bench)
    if training:
        _check_training(bench)
    else:
        _check_raw(bench)
    if args.json:
        files.check_file(args.json, args.append)
    return bench


def _contenders(args: argparse.Namespace, training: bool) -> list[Contender]:
    """Dense, and all others in their order."""
    specs = args.contenders or _DEFAULT_CONTENDERS[args.workload]
    found = [parse(spec, training=training) for spec in dict.fromkeys(specs)]
    dense = next((each for each in found if each.name == BASELINE), None)
    others = [each for each in found if each is not dense]
    return [dense or parse(BASELINE, training=training), *others]


def _links(args: argparse.Namespace) -> tuple[bool, list[Link]]:
    """Whether to run on loopback, and the links to try."""
    shaped = bool(args.rate or args.delay or args.loss)
    if args.loopback and shaped:
        raise UserError("--loopback has no --rate, --delay or --loss: leave out one or the other")
    reason = None if args.loopback else unavailable()
    if reason and shaped:
        raise UserError(reason)
    if reason:
        print(f"oktopk: {reason}; going on with loopback", file=sys.stderr)
    if args.loopback or reason:
        return True, [Link()]
    rates, delays = args.rate or [DEFAULT_RATE], args.delay or [None]
    return False, [Link(rate, delay, args.loss) for delay, rate in product(delays, rates)]


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `Config` that differ from the recipe's, for all contenders."""
    if args.recipe not in RECIPES:
        raise UserError(f"unknown recipe {args.recipe!r}; there are {', '.join(RECIPES)}")
    values: dict[str, Any] = {"seed": args.seed, "data_dir": args.data_dir}
    if args.epochs:
        values["max_epochs"] = args.epochs
    return values | read_settings("--set", args.set, OF_RECIPE)


def _check_options(bench: Bench) -> None:
    """Check that algorithms accept their options, with the densities that they will have."""
    try:
        for contender, density in bench.entries():
            if contender.own:
                contender.algorithm(**({"density": density} if density else {}))
    except ValueError as error:
        raise UserError(f"{contender.spec}: {error}") from None


def _check_raw(bench: Bench) -> None:
    """Check that gradients fit into memory, and that dense steps at the beginning are few."""
    needed = 4 * bench.numel * _COPIES * max(bench.hosts)
    left = host.left()
    if left is not None and needed > left:
        raise UserError(
            f"--numel {bench.numel} takes at least {byte_size(needed)} on {max(bench.hosts)} "
            f"hosts, but this machine has {byte_size(left)} left: make one of them smaller"
        )
    for contender in bench.contenders:
        if (steps := contender.dense_steps(0)) > _MOST_DENSE_STEPS:
            raise UserError(
                f"{contender.spec}: raw would take {steps} dense steps before it measures the "
                f"first: at most {_MOST_DENSE_STEPS} are allowed"
            )


def _check_training(bench: Bench) -> None:
    """Check that configurations are valid, and that the corpus is there, or make it now."""
    from .training import make_config  # needs the extras of the workload

    try:
        for contender in bench.contenders:
            config = make_config(bench.recipe, bench.values, contender, bench.warmup_steps)
    except UserError as error:
        raise UserError(f"{contender.spec}: {error}") from None
    config.workload.prepare(sys.stderr.isatty())
