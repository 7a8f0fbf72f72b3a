"""Contenders: ways to average gradients, as they are written on the command line of `oktopk bench`.

A contender is a name, and options behind a colon: `dense`, `powersgd:2`, `gtopk:density=0.01`,
`oktopk:wire=int8,warmup_steps=20,lr=0.002`. Options and their types come from the dataclasses that
take them, so a new knob of an algorithm can be written here at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from ...common.errors import UserError
from ...common.flags import did_you_mean
from ...train.config.options import hints
from ..settings import read_value

if TYPE_CHECKING:
    from ...algorithms import Algorithm

BASELINE = "dense"
"""The contender that all others are compared with: DDP as it is, or a plain all_reduce."""
OWN_DENSE = "own-dense"
"""The library's dense algorithm; its name, dense, is taken by the baseline."""
HOOKS = ("fp16", "bf16", "powersgd")
"""DDP's own communication hooks."""

OF_TRAINING = (
    *("optimizer", "lr", "momentum", "weight_decay", "schedule", "clip", "autocast"),
    "bucket_mb",
)
"""Fields of `Config` that a contender may set for itself."""
OF_OWN_TRAINING = ("norm_clip", "refresh_interval", "scope", "dense_below")
"""Further ones, for the library's algorithms only."""


@dataclass(frozen=True)
class PowerSGD:
    """Options of DDP's PowerSGD hook."""

    rank: int = 1
    """Of the matrices that approximate a gradient."""
    start: int = 2
    """Dense steps before the first compressed one; DDP needs at least 2."""
    min_compression_rate: float = 2.0
    """A matrix that does not get smaller by this factor is sent uncompressed."""

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
    """As the user wrote it."""
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
        """The library's algorithm; the defaults stand for options that were not written."""
        from ...algorithms import algorithm  # here, not above: help does without torch

        if self.name == OWN_DENSE:
            defaults = {}
        return algorithm(_registered(self.name), **{**defaults, **self.options})

    def power_sgd(self) -> PowerSGD:
        return PowerSGD(**self.options)

    def dense_steps(self, warmup_steps: int) -> int:
        """Dense steps at the beginning, before compression starts."""
        if self.name == "powersgd":
            return self.power_sgd().start
        return self.algorithm(warmup_steps=warmup_steps).warmup_steps if self.sparse else 0

    def settling(self) -> int:
        """Steps of the raw workload before the first that is like all later ones."""
        from ...algorithms import Auto  # here, not above: help does without torch

        if not self.own:
            return self.dense_steps(0) + 1
        algorithm = self.algorithm()
        measuring = algorithm.measuring if isinstance(algorithm, Auto) else 0
        return self.dense_steps(0) + measuring + 3


def known() -> list[str]:
    """All names."""
    from ...algorithms import names

    own = [OWN_DENSE if name == BASELINE else name for name in names()]
    return [BASELINE, *HOOKS, *own]


def parse(spec: str, *, training: bool) -> Contender:
    """Read a contender. A mistake is a UserError that names the fix.

    Args:
        training: accept options of training, too.
    """
    name, colon, rest = spec.partition(":")
    name = name.lower()
    if name not in known():
        close = did_you_mean(name, known()) or f"; the known ones are {', '.join(known())}"
        raise UserError(f"unknown contender {name!r}{close}")
    if colon and not rest:
        raise UserError(f"{spec}: no options follow the colon: add some, or leave it out")
    contender = Contender(spec, name, *_options(spec, name, rest, training))
    try:
        if contender.name == "powersgd":
            contender.power_sgd()
        elif contender.own:
            contender.algorithm()
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from None
    return contender


def _options(
    spec: str, name: str, rest: str, training: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the algorithm, and those of training."""
    owner = _owner(name)
    kinds = kinds_of(owner) if owner is not None else {}
    of_training = OF_TRAINING + (OF_OWN_TRAINING if name not in (BASELINE, *HOOKS) else ())
    config = {key: kind for key, kind in hints().items() if key in of_training}
    options: dict[str, Any] = {}
    for_training: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, equals, text = part.partition("=")
        if not equals and name == "powersgd":
            key, text = "rank", part
        if key in kinds:
            options[key] = read_value(spec, key, kinds[key], text)
        elif key in config and training:
            for_training[key] = read_value(spec, key, config[key], text)
        elif key in config:
            raise UserError(f"{spec}: {key} is an option of training, leave it out here")
        else:
            there = ", ".join((*kinds, *(config if training else ()))) or "none"
            raise UserError(f"{spec}: there is no option {key!r} for {name}; there are: {there}")
    return options, for_training


def _registered(name: str) -> str:
    """The name that `oktopk.algorithm` knows."""
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
    return {each.name: hints[each.name] for each in fields(owner)}
