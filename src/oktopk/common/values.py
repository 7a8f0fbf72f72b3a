"""JSON as dataclasses: files and messages are checked where they are read.

A file may be damaged, or somebody else's. `read` raises OSError, and `parse` and `build` raise
ValueError, with a message that says what is wrong. They raise nothing else. After `build`, all
fields are there, of their types, and finite.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import stat
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SHOWN = 40
_LARGEST = 1 << 24


def read(path: Path) -> bytes:
    """A file's content. Devices such as /dev/zero, which have no end, are refused."""
    with path.open("rb") as file:
        if not stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            return file.read()
        content = file.read(_LARGEST)
        if len(content) == _LARGEST:
            raise OSError(errno.EFBIG, "it is a device that has no end")
        return content


def parse(text: str | bytes) -> Any:
    """JSON, of any depth that fits on the stack."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: bytes) -> dict[str, Any]:
    """TOML. ImportError if there is no reader: before Python 3.11 it is the package tomli."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values: dict[str, Any] = toml.loads(text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return values


def plain(value: Any) -> Any:
    """The reverse of `build`: values that JSON has. Numbers that are not finite become null."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build(kind: type[T], values: object, where: str = "") -> T:
    """A dataclass from the values of its fields. Values without a field are ignored.

    Args:
        where: comes before the names of fields in messages.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'it'} is {_show(values)}, but must be an object")
    made: Any = kind  # any dataclass
    found: dict[str, Any] = {}
    for name, (hint, optional) in _fields(made).items():
        if name in values:
            found[name] = _convert(hint, values[name], where + name)
        elif not optional:
            raise ValueError(f"{where}{name} is missing")
    return kind(**found)


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Type of each field, and whether it has a default."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is not MISSING or field.default_factory is not MISSING,
        )
        for field in fields(kind)
    }


def _convert(hint: Any, value: object, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, name)
    if is_dataclass(hint):
        return build(hint, value, name + ".")  # type: ignore[arg-type]
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise ValueError(f"{name} is {_show(value)}, but must be a list")
        made = (_convert(inner[0], each, f"{name}[{at}]") for at, each in enumerate(value))
        return origin(made)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {_show(value)}, but must be an object")
        return {key: _convert(inner[1], each, f"{name}.{key}") for key, each in value.items()}
    return _scalar(hint, value, name)


def _one_of(hints: Sequence[Any], value: object, name: str) -> Any:
    """A value of the only type, or of the first of several simple types that it fits."""
    if value is None and types.NoneType in hints:
        return None
    kinds = [each for each in hints if each is not types.NoneType]
    if len(kinds) == 1:
        return _convert(kinds[0], value, name)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _scalar(kind, value, name)
    wanted = " or ".join(KINDS[kind] for kind in kinds)
    raise ValueError(f"{name} is {_show(value)}, but must be {wanted}")


def _scalar(hint: type, value: object, name: str) -> Any:
    if hint is float and type(value) is int:
        value = as_float(value)
    if type(value) is not hint or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} is {_show(value)}, but must be {KINDS[hint]}")
    return value


def as_float(value: int) -> float:
    """The same, or infinity: JSON and TOML may have whole numbers that no float can hold."""
    return float(value) if abs(value) < 1 << 1000 else math.inf


def _show(value: object) -> str:
    """The beginning of a value; a list or an object is only named."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
