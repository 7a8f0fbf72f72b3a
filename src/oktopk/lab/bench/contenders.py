"""Contenders: ways to average gradients, as they are written on the command line of `oktopk bench`.

A contender is a name, and options behind a colon: `dense`, `powersgd:2`, `gtopk:density=0.01`,
`oktopk:wire=int8,warmup_steps=20,lr=0.002`. Which options there are, and of what type, is read from
the dataclasses that take them, so an algorithm's new knob can be used here at once.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from ...common.errors import UserError
from ...train.config.config import Config
from ...train.config.options import did_you_mean

if TYPE_CHECKING:
    from ...algorithms import Algorithm

BASELINE = "dense"
"""What everything is compared with: DDP as it is, or a plain all_reduce."""
OWN_DENSE = "own-dense"
"""The library's dense algorithm; its name, dense, is taken by the baseline."""
HOOKS = ("fp16", "bf16", "powersgd")
"""DDP's own communication hooks."""

OF_TRAINING = (
    *("optimizer", "lr", "momentum", "weight_decay", "schedule", "clip", "autocast"),
    "bucket_mb",
)
"""Fields of `Config` that a contender may have its own values of."""
OF_OWN_TRAINING = ("norm_clip", "refresh_interval", "scope", "dense_below")
"""The same, for the library's algorithms only."""
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class PowerSGD:
    """Options of DDP's PowerSGD hook."""

    rank: int = 1
    """Of the matrices that approximate a gradient."""
    start: int = 2
    """Dense steps before the first compressed one; DDP needs at least 2."""
    min_compression_rate: float = 2.0
    """Matrices that would not become smaller by this factor are sent as they are."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"the rank is {self.rank}, but must be at least 1")
        if self.start < 2:
            raise ValueError(f"start is {self.start}, but must be at least 2: DDP needs two steps")
        if self.min_compression_rate < 0:
            raise ValueError(
                f"min_compression_rate is {self.min_compression_rate}, but must be at least 0"
            )


@dataclass(frozen=True)
class Contender:
    """One way to average gradients."""

    spec: str
    """As it was written."""
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the algorithm, or of PowerSGD."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Config` that this contender is trained with."""

    @property
    def own(self) -> bool:
        """Whether it is an algorithm of this library."""
        return self.name != BASELINE and self.name not in HOOKS

    @property
    def sparse(self) -> bool:
        """Whether it has a density."""
        return self.own and self.name != OWN_DENSE

    def algorithm(self, **defaults: Any) -> Algorithm:
        """The library's algorithm; options that were not written have the defaults given."""
        from ...algorithms import algorithm  # here, not above: help does without torch

        if self.name == OWN_DENSE:
            defaults = {}
        return algorithm(_registered(self.name), **{**defaults, **self.options})

    def power_sgd(self) -> PowerSGD:
        return PowerSGD(**self.options)

    def dense_steps(self, warmup_steps: int) -> int:
        """Steps at the beginning which are not yet as all later ones."""
        if self.name == "powersgd":
            return self.power_sgd().start
        return self.algorithm(warmup_steps=warmup_steps).warmup_steps if self.sparse else 0


def known() -> list[str]:
    """All names."""
    from ...algorithms import names

    own = [OWN_DENSE if name == BASELINE else name for name in names()]
    return [BASELINE, *HOOKS, *own]


def parse(spec: str, *, training: bool) -> Contender:
    """A contender as it is written; what is wrong with it is a UserError that names the fix.

    Args:
        training: whether there is a training, whose options may be given, too.
    """
    name, _, rest = spec.partition(":")
    name = name.lower()
    if name not in known():
        close = did_you_mean(name, known()) or f"; the known ones are {', '.join(known())}"
        raise UserError(f"unknown contender {name!r}{close}")
    owner = _owner(name)
    kinds = kinds_of(owner) if owner is not None else {}
    of_training = OF_TRAINING + (OF_OWN_TRAINING if name not in (BASELINE, *HOOKS) else ())
    config = {key: kind for key, kind in kinds_of(Config).items() if key in of_training}
    options: dict[str, Any] = {}
    for_training: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, equals, text = part.partition("=")
        if not equals and name == "powersgd":
            key, text = "rank", part
        if key in kinds:
            options[key] = read(spec, key, kinds[key], text)
        elif key in config and training:
            for_training[key] = read(spec, key, config[key], text)
        elif key in config:
            raise UserError(f"{spec}: {key} is an option of training, leave it out here")
        else:
            there = ", ".join((*kinds, *(config if training else ()))) or "none"
            raise UserError(f"{spec}: there is no option {key!r} for {name}; there are: {there}")
    contender = Contender(spec, name, options, for_training)
    try:
        if owner is PowerSGD:
            contender.power_sgd()
        elif owner is not None:
            contender.algorithm()
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from None
    return contender


def _registered(name: str) -> str:
    """A name as `oktopk.algorithm` knows it."""
    return BASELINE if name == OWN_DENSE else name


def _owner(name: str) -> type | None:
    """The dataclass that takes a contender's options."""
    if name == "powersgd":
        return PowerSGD
    if name == BASELINE or name in HOOKS:
        return None
    from ...algorithms import algorithm

    return type(algorithm(_registered(name)))


def kinds_of(owner: type) -> dict[str, Any]:
    """A dataclass's fields and their types."""
    hints = get_type_hints(owner)
    return {knob.name: hints[knob.name] for knob in dataclasses.fields(owner)}


def read(where: str, key: str, kind: Any, text: str) -> Any:
    """The value of an option; `where` it was written is told if it is none."""
    try:
        return _convert(kind, text)
    except ValueError:
        raise UserError(f"{where}: {key} must be {_describe(kind)}, not {text!r}") from None


def _convert(kind: Any, text: str) -> Any:
    """Text to a value of a type; ValueError if it is none."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in inner:
            return None
        return _convert(next(each for each in inner if each is not type(None)), text)
    if origin is Literal:
        if text not in inner:
            raise ValueError
        return text
    if origin is tuple:  # commas separate options
        return tuple(_convert(inner[0], part) for part in text.split("/") if part)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError
        return _BOOLEANS[text.lower()]
    convert: Callable[[str], Any] = kind
    value = convert(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _describe(next(each for each in inner if each is not type(None))) + " or none"
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple:
        return f"{_describe(inner[0])}, or several with / between them"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return plain.get(kind, str(kind))
