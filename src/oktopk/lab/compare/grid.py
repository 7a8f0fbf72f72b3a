"""The grid: every variant with every seed. All mistakes of a user are found here, before the first
cell is trained."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from ...common.errors import UserError
from ...common.flags import did_you_mean
from ...common.host import cores
from ...train.config.config import Compression, Config, Optimizer
from ...train.config.options import hints
from ...train.config.recipes import recipe
from ...workloads import RECIPES
from ..network import Link, check_hosts, unavailable
from ..settings import read_settings, read_value
from .setting import OF_THE_GRID, OF_THE_RUN, Links, Setting

SEEDS_BELOW = 1 << 40
_MOST_CELLS = 10_000
_OF_A_COMPRESSOR = tuple(
    name
    for name in (*Compression.options(), *Optimizer.options())
    if name not in ("compressor", "compression")
)
"""Options that a compressor may have for itself, behind a colon."""
_INSTEAD = {
    **{"compressor": "--compressors", "compression": "--compressors dense"},
    **{"density": "--densities", "warmup_steps": "--warmups", "sigma_scale": "--sigma-scales"},
    **{"seed": "--seeds", "nworkers": "--nworkers", "run_dir": "--dir"},
    **{"recipe": "oktopk compare RECIPE"},
}


@dataclass(frozen=True)
class Variant:
    """A way to average gradients: a row of the table. A knob that it does not have is None."""

    compressor: str
    """`oktopk`, or with options of its own `oktopk:wire=int4`."""
    density: float | None = None
    warmup_steps: int | None = None
    sigma_scale: float | None = None

    @property
    def name(self) -> str:
        """Names its folders: `oktopk-d0.01-w50`."""
        parts = [self.compressor.replace(":", "-").replace(",", "-")]
        parts += [f"d{self.density!r}"] if self.density is not None else []
        parts += [f"w{self.warmup_steps}"] if self.warmup_steps is not None else []
        parts += [f"s{self.sigma_scale!r}"] if self.sigma_scale is not None else []
        return "-".join(parts)

    @property
    def values(self) -> dict[str, Any]:
        """Options of `Config`."""
        name, own = parse(self.compressor)
        knobs = {
            "density": self.density,
            "warmup_steps": self.warmup_steps,
            "sigma_scale": self.sigma_scale,
        }
        given = {knob: value for knob, value in knobs.items() if value is not None}
        return {"compressor": name, **own, **given}


@dataclass(frozen=True)
class Cell:
    """One run: a variant with a seed."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-seed{self.seed}"

    def config(self, setting: Setting) -> Config:
        """The configuration that it is trained with."""
        return setting.config({**self.variant.values, "seed": self.seed})


@dataclass(frozen=True)
class Grid:
    """Everything that is to be trained. All of it has been checked."""

    setting: Setting
    variants: Sequence[Variant]
    seeds: Sequence[int]

    def cells(self) -> list[Cell]:
        """In their order: all variants with one seed, before the next seed."""
        return [Cell(variant, seed) for seed, variant in product(self.seeds, self.variants)]


def check(args: argparse.Namespace) -> Grid:
    """The grid; UserError says what is wrong with the arguments."""
    base = _base(args)
    links = _links(args, base)
    if links.emulated and not base.launch.threads:
        # Each host believes that it has all cores.
        base = base.replace(threads=max(1, len(cores()) // links.workers))
    setting = Setting.of(base, links)
    variants = list(dict.fromkeys(_variants(args, base)))
    seeds = read_seeds(args.seeds)
    if len(variants) * len(seeds) > _MOST_CELLS:
        raise UserError(
            f"the grid has {len(variants) * len(seeds)} cells, but at most {_MOST_CELLS} are "
            "trained: take fewer --seeds, --densities or --compressors"
        )
    for variant in variants:
        _check_variant(variant, setting)
    return Grid(setting, variants, seeds)


def _check_variant(variant: Variant, setting: Setting) -> None:
    try:
        config = Cell(variant, 1).config(setting)
    except UserError as error:
        raise UserError(f"--compressors {variant.compressor}: {error}") from None
    steps, dense = config.run.max_steps, variant.warmup_steps
    if steps is not None and dense is not None and dense >= steps:
        raise UserError(
            f"{variant.name} would take no sparse step: its warm-up is {dense} of {steps} steps; "
            f"give fewer --warmups, such as {steps // 4}, or more --max-steps"
        )


def _base(args: argparse.Namespace) -> Config:
    """The recipe's configuration, changed by --set and the flags beside it."""
    if args.recipe not in RECIPES:
        close = did_you_mean(args.recipe, RECIPES)
        raise UserError(f"unknown recipe {args.recipe!r}{close or f'; {_listed(RECIPES)}'}")
    known = [name for name in hints() if name not in (*OF_THE_GRID, *OF_THE_RUN)]
    for part in args.set:
        key = part.partition("=")[0].replace("-", "_")
        if key in _INSTEAD:
            raise UserError(f"--set {part}: write it as {_INSTEAD[key]}")
    # Event files take a second of every cell's start, and a page one of its end.
    values: dict[str, Any] = {"report_to": "none", "page": False}
    values |= read_settings("--set", args.set, known)
    flags = ("data_dir", "max_epochs", "max_steps")
    values |= {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    return recipe(args.recipe, **values)


def _links(args: argparse.Namespace, base: Config) -> Links:
    shaped = args.rate is not None or args.delay is not None or args.loss
    if args.hosts is None:
        if shaped:
            raise UserError("--rate, --delay and --loss need --hosts N: loopback is not shaped")
        workers = args.nworkers or base.launch.nworkers or 2
        return Links(workers)
    if args.nworkers is not None:
        raise UserError("--hosts has one worker on each host: leave out --nworkers")
    check_hosts(args.hosts)
    Link(args.rate, args.delay, args.loss)
    if reason := unavailable():
        raise UserError(f"--hosts: {reason}")
    return Links(args.hosts, True, args.rate, args.delay, args.loss)


def _variants(args: argparse.Namespace, base: Config) -> Iterator[Variant]:
    """Each compressor, with every value of the knobs that it has and does not name itself."""
    compression = base.compression
    for spec in split(args.compressors):
        name, own = parse(spec)
        values: dict[str, Sequence[Any]] = {
            "density": args.densities or [compression.density],
            "warmup_steps": args.warmups or [compression.warmup_steps],
            "sigma_scale": args.sigma_scales or [compression.sigma_scale],
        }
        given = {knob: [own[knob]] if knob in own else values[knob] for knob in _knobs(name)}
        for chosen in product(*given.values()):
            yield Variant(spec, **dict(zip(given, chosen, strict=True)))


def _knobs(name: str) -> tuple[str, ...]:
    """The knobs of a compressor."""
    from ...algorithms import Dense, algorithm  # here: help does without torch

    made = algorithm(name)
    if isinstance(made, Dense):
        return ()
    has_scale = any(each.name == "sigma_scale" for each in fields(made))
    return ("density", "warmup_steps", *(("sigma_scale",) if has_scale else ()))


def split(specs: Sequence[str]) -> list[str]:
    """Compressors from words that hold one or several, with commas between them; in lower case.

    A comma also separates the options of a compressor: `dense,oktopk:wire=int4,lr=0.002,gtopk` are
    three compressors, because no name has an equals sign.
    """
    found: list[str] = []
    for word in specs:
        parts = word.split(",")
        for place, part in enumerate(parts):
            if place and "=" in part and ":" not in part and ":" in found[-1]:
                found[-1] += f",{part}"
            elif part.strip():
                name, colon, rest = part.strip().partition(":")
                found.append(f"{name.lower()}{colon}{rest}")
    if not found:
        raise UserError("--compressors has no name: write some, as dense,oktopk")
    return list(dict.fromkeys(found))


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """The name of a compressor, and its own values of options of `Config`."""
    from ...algorithms import names

    name, colon, rest = spec.partition(":")
    if name not in names():
        if name in RECIPES:
            raise UserError(f"the recipe comes first: oktopk compare {name} --compressors ...")
        close = did_you_mean(name, names())
        raise UserError(f"--compressors: unknown {name!r}{close or f'; {_listed(names())}'}")
    if colon and not rest:
        raise UserError(f"--compressors {spec}: no options follow the colon: add some")
    kinds, own = hints(), dict[str, Any]()
    for part in rest.split(",") if rest else ():
        key, _, text = part.partition("=")
        if key not in _OF_A_COMPRESSOR:
            close = did_you_mean(key, _OF_A_COMPRESSOR) or f"; {_listed(_OF_A_COMPRESSOR)}"
            raise UserError(f"--compressors {spec}: there is no option {key!r}{close}")
        if key in OF_THE_GRID and key not in _knobs(name):
            raise UserError(f"--compressors {spec}: {name} has no {key}: leave it out")
        own[key] = read_value(f"--compressors {spec}", key, kinds[key], text)
    return name, own


def read_seeds(text: str) -> list[int]:
    """`3` is seeds 1, 2 and 3; `4,7` names them, and `7,` names one."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    seeds = list(dict.fromkeys(numbers))
    if "," not in text and seeds and seeds[0] >= 0:
        if not 1 <= seeds[0] <= _MOST_CELLS:
            raise UserError(f"--seeds {text}: take 1 to {_MOST_CELLS}, or name one as `{text},`")
        return list(range(1, 1 + seeds[0]))
    if not seeds or not all(0 <= seed < SEEDS_BELOW for seed in seeds):
        raise UserError(
            f"--seeds {text}: write how many, as `3`, or name them, as `4,7`; each is a whole "
            f"number from 0 to {SEEDS_BELOW - 1}"
        )
    return seeds


def _listed(names: Any) -> str:
    return f"there are {', '.join(names)}"
