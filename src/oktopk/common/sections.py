"""Sections of a configuration: dataclasses whose fields are flags and keys of a TOML file.

    @dataclass(frozen=True)
    class Optimizer(Section):
        lr: float = option(0.01, "Learning rate.", above=0)

A field's help, choices and limits are in its metadata. A section refuses values that break them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

from .errors import UserError
from .typed import without_none

S = TypeVar("S", bound="Section")

_LARGEST = 10**15
"""Of whole numbers. Sums and products of larger ones may not fit into a float."""


@dataclass(frozen=True)
class Option:
    """A field of a section, as a user sees it."""

    field: str
    hint: Any
    """Its type, such as `int` or `int | None`."""
    default: Any
    name: str
    """As it is written in a TOML file, and with dashes on the command line."""
    help: str
    choices: Sequence[str] = ()
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    path: bool = False
    several: bool = False
    """Whether the value may have several of the choices, with spaces or commas between them."""

    @property
    def kind(self) -> type:
        """bool, int, float or str."""
        kind: type = without_none(self.hint)
        return kind

    def check(self, value: Any) -> None:
        """UserError if the value is out of range."""
        if value is None:
            return
        if wanted := self._problem(value):
            shown = repr(value) if self.choices else value
            raise UserError(f"{flag(self.name)} is {shown}, but must be {wanted}")

    def _problem(self, value: Any) -> str:
        """The condition that the value breaks; empty if there is none."""
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        if isinstance(value, str) and ("\0" in value or _broken(value)):
            return "text in UTF-8: rename it"
        names = words(value) if self.several else [value]
        if self.choices and not set(names) <= set(self.choices):
            return f"{'some' if self.several else 'one'} of {', '.join(self.choices)}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}: the default is {self.default}"
        if self.least is not None and value < self.least:
            return f"at least {self.least}"
        if self.below is not None and not value < self.below:
            return f"below {self.below}"
        most = _LARGEST if self.most is None and type(value) is int else self.most
        if most is not None and value > most:
            return f"at most {most}"
        return ""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a section.

    Args:
        more: fields of `Option`: `choices`, limits, `path`, `several`, and `name` if it is not the
            field's.
    """
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Section:
    """A part of a configuration. Subclasses are frozen dataclasses of options."""

    title: ClassVar[str]
    """Stands above its flags in the help."""

    def __post_init__(self) -> None:
        for each in self.options().values():
            each.check(getattr(self, each.field))

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """By name."""
        section: Any = cls
        return _options(section)

    @classmethod
    def of(cls: type[S], values: Mapping[str, Any]) -> S:
        """A section with its share of the values; others are left out. None is the default."""
        known = cls.options()
        mine = {name: value for name, value in values.items() if name in known}
        return cls(
            **{known[name].field: value for name, value in mine.items() if value is not None}
        )

    def as_dict(self) -> dict[str, Any]:
        """Values by name, without those that are unset."""
        values = {name: getattr(self, each.field) for name, each in self.options().items()}
        return {name: value for name, value in values.items() if value is not None}


@cache
def _options(section: Any) -> Mapping[str, Option]:
    hints, found = get_type_hints(section), {}
    for each in dataclasses.fields(section):
        facts = {"name": each.name, **each.metadata}
        found[facts["name"]] = Option(each.name, hints[each.name], each.default, **facts)
    return found


def words(value: str) -> list[str]:
    """The parts of an option that may have several."""
    return value.replace(",", " ").split()


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def _broken(text: str) -> bool:
    """Neither TOML nor torch takes names that are not UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)
