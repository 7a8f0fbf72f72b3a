"""Settings as they are written on the command line of the laboratory: KEY=VALUE."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..common.errors import UserError
from ..common.flags import did_you_mean
from ..common.typed import describe, from_text
from ..train.config.options import hints


def read_settings(flag: str, parts: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """The values of options of `Config`, each written as KEY=VALUE.

    Args:
        flag: named in messages.
        known: the options that may be given here.
    """
    kinds, values = hints(), dict[str, Any]()
    for part in parts:
        key, _, text = part.partition("=")
        if key not in known:
            close = did_you_mean(key.replace("-", "_"), known)
            there = close or f"; there are {', '.join(known)}"
            raise UserError(f"{flag} {part}: there is no {key!r}{there}")
        values[key] = read_value(flag, key, kinds[key], text)
    return values


def read_value(where: str, key: str, kind: Any, text: str) -> Any:
    """The value of an option; `where` names the place of a mistake."""
    try:
        return from_text(kind, text)
    except ValueError:
        raise UserError(f"{where}: {key} must be {describe(kind)}, not {text!r}") from None
