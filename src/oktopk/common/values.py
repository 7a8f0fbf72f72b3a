"""What is read from files, as dataclasses: all fields are there, of their types, and finite.

A file may be damaged, or somebody else's. `read` raises OSError, `parse` and `build` raise
ValueError, with a message that says what is wrong, and none of them anything else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
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


def build(kind: type[T], values: object, where: str = "") -> T:
    """A dataclass from the values of its fields. Further values are left out.

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
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        return _convert(next(each for each in inner if each is not types.NoneType), value, name)
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


def _scalar(hint: type, value: object, name: str) -> Any:
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 1000 else math.inf
    if type(value) is not hint or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} is {_show(value)}, but must be {_NAMES[hint]}")
    return value


def _show(value: object) -> str:
    """The beginning of a value; of a list or an object only what it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
