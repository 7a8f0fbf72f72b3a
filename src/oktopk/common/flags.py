"""Types of flags, for argparse, and names that are misspelled."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

N = TypeVar("N", int, float)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def whole(least: int, most: int = 10**15) -> Callable[[str], int]:
    """An argparse type: a whole number from the least to the most. 1_000 and 1,000 are 1000."""

    def read(text: str) -> int:
        value = _number(int, text)
        if value is None or value < least:
            raise _refused(text, f"a whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too much, {most} is the most")
        return value

    return read


def real(what: str, valid: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type: a number that is valid; `what` describes such a number."""

    def read(text: str) -> float:
        value = _number(float, text)
        if value is None or not valid(value):
            raise _refused(text, what)
        return value

    return read


def _number(kind: Callable[[str], N], text: str) -> N | None:
    try:
        return kind(text.replace("_", "").replace(",", ""))
    except ValueError:
        return None


def _refused(text: str, what: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text} is not {what}")


positive = whole(1)
share = real("above 0 and at most 1", lambda value: 0 < value <= 1)
