"""Numbers as people read them, tables of them, and a configuration as TOML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

NOTHING = "-"
"""Stands for a missing number."""


def number(value: float) -> str:
    """A loss, an error rate: `3.214`, `312.4`, `1.2e+06`."""
    if not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size and size < 0.001:
        return f"{value:.1e}"
    if size < 99.9995:
        return f"{value:.3f}"
    return f"{value:.1f}" if size < 9999.95 else f"{value:.1e}"


def count(value: float) -> str:
    """How many: `27,569,568`."""
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def digits(value: float | None) -> str:
    """A measurement, to three digits: `0.0123`, `31.4`, `12,345`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def byte_size(size: float) -> str:
    """Bytes in powers of 1000: `1.2 MB`, `110 MB`."""
    if not math.isfinite(size):
        return NOTHING
    units = ["B", "kB", "MB", "GB", "TB"]
    # 999.5 would be rounded to 1000, which is 1 of the next unit.
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    places = 0 if units[0] == "B" or abs(size) >= 99.95 else 1
    return f"{size:.{places}f} {units[0]}"


def duration(seconds: float) -> str:
    """`12.3s`, `2m03s`, `1h02m`, `2d03h`."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    if seconds < 3599.5:
        return "{}m{:02}s".format(*divmod(round(seconds), 60))
    if seconds < 86370:
        return "{}h{:02}m".format(*divmod(round(seconds / 60), 60))
    return "{}d{:02}h".format(*divmod(round(seconds / 3600), 24))


def percent(share: float) -> str:
    """`98.0%`; `100.0%` only for exactly 1."""
    if not math.isfinite(share):
        return NOTHING
    places = 1
    while share < 1 and places < 4 and round(share * 100, places) == 100:
        places += 1
    return f"{share * 100:.{places}f}%"


def ratio(value: float) -> str:
    """How many times: `50x`, `97.6x`."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:.3g}x" if abs(value) < 999.5 else f"{value:.0f}x"


def plural(value: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of aligned columns: the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def toml(values: Mapping[str, str | int | float | bool]) -> str:
    """Flat values as a TOML document. Names must be letters, digits, - and _."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # Python writes 1e-05, inf and nan as TOML does
    # JSON escapes as TOML does, except for DEL, which TOML forbids.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
