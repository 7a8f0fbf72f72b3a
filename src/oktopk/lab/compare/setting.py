"""What all cells of a comparison share: the recipe, its values, the workers and their links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...common.errors import UserError
from ...common.format import plural
from ...train.config.config import Config
from ..network import Hosts, Link, Loopback, Network

OF_THE_GRID = ("compressor", "compression", "density", "warmup_steps", "sigma_scale", "seed")
"""Options of `Config` that cells differ in."""
OF_THE_RUN = ("recipe", "run_dir", "resume", "nworkers", "nwpernode")
"""Those that the command decides for itself."""


@dataclass(frozen=True)
class Links:
    """The workers, and how they are connected."""

    workers: int
    emulated: bool = False
    """One host for each worker, on a network of their own; else all talk over loopback."""
    rate: str | None = None
    delay: str | None = None
    """One way."""
    loss: float = 0.0
    """Per cent of packets."""

    @property
    def link(self) -> Link:
        return Link(self.rate, self.delay, self.loss)

    @property
    def ranks_per_host(self) -> int:
        return 1 if self.emulated else self.workers

    def hosts(self) -> Hosts:
        """Hosts of their own, shaped before any rank connects."""
        return Network(self.workers, self.link) if self.emulated else Loopback(1)

    def __str__(self) -> str:
        if not self.emulated:
            return f"{plural(self.workers, 'worker')} on loopback"
        parts = [plural(self.workers, "host"), self.rate or "unlimited rate"]
        parts += [f"{self.delay} delay"] if self.delay else []
        parts += [f"{self.loss:g} % lost"] if self.loss else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Setting:
    """The conditions of a comparison. Cells of other conditions do not belong to it."""

    recipe: str
    values: dict[str, Any]
    """All options of `Config` but those that cells differ in."""
    links: Links

    @classmethod
    def of(cls, config: Config, links: Links) -> Setting:
        values = config.as_dict()
        left_out = (*OF_THE_GRID, *OF_THE_RUN)
        kept = {name: value for name, value in values.items() if name not in left_out}
        return cls(config.run.recipe, kept, links)

    def config(self, values: Mapping[str, Any]) -> Config:
        """The configuration of a cell, which adds its own values."""
        own = {"recipe": self.recipe, "nworkers": self.links.workers}
        return Config.of(**{**self.values, **own, **values})

    def difference(self, other: Setting) -> str:
        """What the other has and this one has not; empty if they are the same."""
        if self.recipe != other.recipe:
            return f"the recipe {other.recipe}, not {self.recipe}"
        if self.links != other.links:
            return f"{other.links}, not {self.links}"
        try:  # options that are new since then have their defaults
            mine, theirs = self.config({}).as_dict(), other.config({}).as_dict()
        except (UserError, TypeError):
            return "options that this version of oktopk does not have"
        return first_difference(mine, theirs)


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first value that differs; empty if all are the same."""
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"{name} = {_shown(theirs, name)}, not {_shown(mine, name)}"
    return ""


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "unset")
    return repr(value) if value == "" else str(value)
