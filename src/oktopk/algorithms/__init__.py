"""The algorithms, one file each, and their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from .auto import Auto
from .base import Algorithm, Reduced, State, Written
from .dense import Dense
from .gaussiank import Gaussiank
from .gtopk import GTopk
from .oktopk import OkTopk
from .oktopk_variable import OkTopkVariable
from .topka import TopkA
from .topkdsa import TopkDSA

__all__ = [
    "Algorithm",
    "Auto",
    "Dense",
    "GTopk",
    "Gaussiank",
    "OkTopk",
    "OkTopkVariable",
    "Reduced",
    "State",
    "TopkA",
    "TopkDSA",
    "Written",
    "algorithm",
    "names",
    "register",
]

_BY_NAME: dict[str, Callable[..., Algorithm]] = {
    "dense": Dense,
    "topka": TopkA,
    "topka2": partial(TopkA, global_topk=True),
    "topkaopt": partial(TopkA, threshold_interval=32),
    "topkdsa": TopkDSA,
    "gtopk": GTopk,
    "gaussiank": Gaussiank,
    "oktopk": OkTopk,
    "oktopk-variable": OkTopkVariable,
    "auto": Auto,
}
_ALIASES = {"none": "dense", "topksa": "topkdsa"}


def names() -> list[str]:
    """The names that `algorithm` knows, without aliases."""
    return list(_BY_NAME)


def register(name: str, make: type[Algorithm]) -> None:
    """Let `algorithm` find one of your own by name. Every process must do it, before it is used."""
    _BY_NAME[name.lower()] = make


def algorithm(name: str, **options: Any) -> Algorithm:
    """An algorithm by name, upper or lower case: algorithm("oktopk", density=0.02)."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in _BY_NAME:
        raise ValueError(
            f"unknown algorithm {name!r}; the known ones are {', '.join(names())} "
            f"(and {', '.join(f'{alias} for {known}' for alias, known in _ALIASES.items())})"
        )
    make = _BY_NAME[key]
    known = [field.name for field in fields(make.func if isinstance(make, partial) else make)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ValueError(
                f"algorithm {name!r} has no option {option!r}; it has {', '.join(known)}"
            )
    return make(**options)
