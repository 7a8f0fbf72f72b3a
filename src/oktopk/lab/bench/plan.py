"""What `oktopk bench` is to measure, made from its arguments.

Everything that a user can have got wrong is looked at here, before the first rank is started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...common import host as room
from ...common.errors import UserError
from ...common.format import byte_size
from ...train.config.config import Config
from ...train.config.recipes import RECIPES
from ..network.network import Link, check_hosts, unavailable
from . import files
from .contenders import BASELINE, OF_OWN_TRAINING, OF_TRAINING, Contender, kinds_of, parse, read

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
    *("dnn", "dataset", "train_manifest", "val_manifest", "features", "augment", "width", "depth"),
    *("bidirectional", "batch_size"),
    *OF_TRAINING,
    *OF_OWN_TRAINING,
)
"""Fields of `Config` that --set can change for all contenders."""


@dataclass(frozen=True)
class Bench:
    """What is to be measured; all of it is known to be right."""

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
    """As they were given, to be kept with the results."""

    def entries(self) -> list[tuple[Contender, float | None]]:
        """All contenders but the first; the sparse ones with each density, unless they have one."""
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
    """Look at all that can be wrong; UserError says what is."""
    training = args.workload == "train"
    specs = args.contenders or _DEFAULT_CONTENDERS[args.workload]
    contenders = [parse(spec, training=training) for spec in dict.fromkeys(specs)]
    dense = next((each for each in contenders if each.name == BASELINE), None)
    others = [each for each in contenders if each is not dense]
    contenders = [dense or parse(BASELINE, training=training), *others]
    if args.append and not args.json:
        raise UserError("--append needs --json FILE, to know where to")
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


def _links(args: argparse.Namespace) -> tuple[bool, list[Link]]:
    """Whether to run on loopback, and the links to try."""
    shaped = bool(args.rate or args.delay or args.loss)
    if args.loopback and shaped:
        raise UserError("--loopback has no --rate, --delay or --loss: leave the one or the others")
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
    kinds = kinds_of(Config)
    for part in args.set:
        key, _, text = part.partition("=")
        if key not in OF_RECIPE:
            raise UserError(f"--set {part}: there is no {key!r}; there are {', '.join(OF_RECIPE)}")
        values[key] = read("--set", key, kinds[key], text)
    return values


def _check_options(bench: Bench) -> None:
    """Algorithms accept their options, with the densities that they will have."""
    try:
        for contender, density in bench.entries():
            if contender.own:
                contender.algorithm(**({"density": density} if density else {}))
    except ValueError as error:
        raise UserError(f"{contender.spec}: {error}") from None


def _check_raw(bench: Bench) -> None:
    """Gradients fit into memory, and the dense steps before the first that counts have an end."""
    needed = 4 * bench.numel * _COPIES * max(bench.hosts)
    left = room.left()
    if left is not None and needed > left:
        raise UserError(
            f"--numel {bench.numel} takes at least {byte_size(needed)} on {max(bench.hosts)} "
            f"hosts, but this machine has {byte_size(left)} left: make one of them smaller"
        )
    for contender in bench.contenders:
        if (steps := contender.dense_steps(0)) > _MOST_DENSE_STEPS:
            raise UserError(
                f"{contender.spec}: raw has nothing to warm up, but would take {steps} dense steps "
                f"before the first that it measures: at most {_MOST_DENSE_STEPS} are allowed"
            )


def _check_training(bench: Bench) -> None:
    """Configurations fit, and the corpus is there; it is made now if need be, in sight."""
    from ...workloads.speech.workload import corpora
    from .training import make_config

    try:
        for contender in bench.contenders:
            config = make_config(bench.recipe, bench.values, contender, bench.warmup_steps)
    except UserError as error:
        raise UserError(f"{contender.spec}: {error}") from None
    corpora(config, sys.stderr.isatty())
