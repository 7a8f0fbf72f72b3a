"""One reader of typed values, for flags, TOML files and the options of contenders.

Types are those of dataclass fields: bool, int, float, str, `Literal`, a tuple of one type, and any
of them `| None`.
"""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin

from .values import KINDS, as_float

WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""Booleans as they are written."""


def from_text(hint: Any, text: str) -> Any:
    """The value that a text stands for; ValueError if there is none."""
    try:
        value = _read(hint, text)
        if not isinstance(value, float) or math.isfinite(value):
            return value
    except (ValueError, KeyError):
        pass
    raise ValueError(f"expected {describe(hint)}, not {text!r}")


def from_toml(hint: Any, value: object) -> Any:
    """A value of a TOML file, as the type has it; ValueError if it is of another type."""
    kind = without_none(hint)
    if kind is float and type(value) is int:
        return as_float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r}, but must be {describe(kind)}")
    return value


def describe(hint: Any) -> str:
    """What a value must be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return f"{describe(without_none(hint))} or none"
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple:
        return f"{describe(inner[0])}, or several with / between them"
    return KINDS.get(hint, str(hint))


def _read(hint: Any, text: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if text.lower() == "none" else _read(without_none(hint), text)
    if origin is Literal:
        return {each: each for each in inner}[text]
    if origin is tuple:  # commas separate options
        return tuple(from_text(inner[0], part) for part in text.split("/") if part)
    return WORDS[text.lower()] if hint is bool else hint(text)


def without_none(hint: Any) -> Any:
    """`int` for `int | None`."""
    inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next(each for each in inner if each is not types.NoneType)
