"""Checks of saved states. They are composed in the same way as the state.

A check takes a value and returns the mistake in it, or None. The text begins with the place
inside the value: `["buckets"][2]["step"] is "six", but must be a whole number, at least 0`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Any], str | None]

_LARGEST = 2**53
"""Of whole numbers: no counter gets as far, and JSON keeps all of these."""


def anything(value: Any) -> None:
    return None


def whole(least: int = 0, most: int = _LARGEST) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is int and least <= value <= most:
            return None
        limit = f"at least {least}" if most == _LARGEST else f"{least} to {most}"
        return f" is {shown(value)}, but must be a whole number, {limit}"

    return check


def number(least: float = -math.inf, most: float = math.inf, finite: bool = True) -> Check:
    """Between both, which are included; never NaN."""

    def check(value: Any) -> str | None:
        real = type(value) is float or not whole(-_LARGEST)(value)
        if real and least <= value <= most and (math.isfinite(value) or not finite):
            return None
        kind = "a finite number" if finite else "a number"
        return f" is {shown(value)}, but must be {kind} of {least} to {most}"

    return check


def flag(value: Any) -> str | None:
    return None if type(value) is bool else f" is {shown(value)}, but must be true or false"


def text(value: Any) -> str | None:
    return None if type(value) is str else f" is {shown(value)}, but must be a text"


def matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: Any) -> str | None:
        fits = type(value) is str and pattern.fullmatch(value)
        return None if fits else f" is {shown(value)}, but must be {what}"

    return check


def plain(value: Any) -> str | None:
    """A text, flag, number or None, or a list of these, or such values by name."""
    if isinstance(value, Mapping):
        return entries(plain_leaf)(value)
    return several(plain_leaf)(value) if isinstance(value, list | tuple) else plain_leaf(value)


def plain_leaf(value: Any) -> str | None:
    simple = value is None or type(value) in (str, bool) or not number(finite=False)(value)
    return None if simple else f" is {shown(value)}, but must be a plain value"


def tensor(*dtypes: torch.dtype, dims: int | None = None, least: float = -math.inf) -> Check:
    """A finite one, of one of the types, and with no element below the least."""

    def check(value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return f" is {shown(value)}, but must be a tensor"
        if value.dtype not in dtypes:
            names = " or ".join(map(str, dtypes))
            return f" is a tensor of {value.dtype}, but must be of {names}"
        if value.layout != torch.strided or value.is_meta:
            return f" is a tensor of {value.layout} on {value.device}, but must be an ordinary one"
        if dims is not None and value.ndim != dims:
            return f" is a tensor of {value.ndim} dimensions, but must have {dims}"
        if not bool(value.isfinite().all()):
            return " holds NaN or Inf"
        if value.numel() and least > -math.inf and float(value.min()) < least:
            return f" holds {float(value.min())}, but no element may be below {least}"
        return None

    return check


def several(each: Check, length: int | None = None) -> Check:
    """A list."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list | tuple):
            return f" is {shown(value)}, but must be a list"
        if length is not None and len(value) != length:
            return f" has {len(value)} elements, but must have {length}"
        return _first((f"[{index}]", each(item)) for index, item in enumerate(value))

    return check


def pair(first: Check, second: Check) -> Check:
    """A list of two values, each with a check of its own."""

    def check(value: Any) -> str | None:
        return several(anything, length=2)(value) or _first(
            (f"[{index}]", each(value[index])) for index, each in enumerate((first, second))
        )

    return check


def entries(each: Check) -> Check:
    """Values by name."""

    def check(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f" is {shown(value)}, but must be a mapping"
        for key in value:
            if type(key) is not str:
                return f" has the key {shown(key)}, but keys must be texts"
        return _first((f"[{shown(key)}]", each(item)) for key, item in value.items())

    return check


def record(fields: Mapping[str, Check], others: Check | None = None) -> Check:
    """A mapping with exactly these keys; with `others`, any of them and more besides."""

    def check(value: Any) -> str | None:
        wrong = entries(anything)(value)
        if wrong:
            return wrong
        if others is None and value.keys() != fields.keys():
            found = {
                " lacks {}": fields.keys() - value.keys(),
                " has {}, which does not belong there": value.keys() - fields.keys(),
            }
            return " and".join(said.format(listed(names)) for said, names in found.items() if names)
        checks = ((key, fields.get(key, others)) for key in value)
        return _first((f"[{shown(key)}]", each(value[key])) for key, each in checks if each)

    return check


def empty_or(check: Check) -> Check:
    """A mapping without entries, or one that passes the check."""
    return lambda value: None if isinstance(value, Mapping) and not value else check(value)


def empty_list_or(check: Check) -> Check:
    """A list without elements, or one that passes the check."""
    return lambda value: None if isinstance(value, list) and not value else check(value)


def regions(numel: int) -> Check:
    """Boundaries of regions of a vector, in order; an empty list means none yet."""

    def check(value: Any) -> str | None:
        wrong = several(whole())(value)
        if wrong or not value:
            return wrong
        in_order = list(value) == sorted(value) and (value[0], value[-1]) == (0, numel)
        if len(value) < 2 or not in_order:
            return f" must increase from 0 to {numel}, the number of elements"
        return None

    return check


def shown(value: Any) -> str:
    """Any value for a message: short, and in ASCII."""
    if type(value) is str:
        return json.dumps(value if len(value) <= 80 else value[:77] + "...")
    if type(value) is int and abs(value) > _LARGEST:
        return "a number too large"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    return f"of type {type(value).__name__}".encode("ascii", "replace").decode()


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names for a message, in order, but not too many of them."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(shown, names[:most])) or "nothing") + more


def _first(found: Iterable[tuple[str, str | None]]) -> str | None:
    """The first mistake that checks at several places found."""
    return next((place + wrong for place, wrong in found if wrong), None)
