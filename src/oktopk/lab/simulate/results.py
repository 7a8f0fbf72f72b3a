"""What was found of an algorithm on P ranks, as a table and in a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.format import count, digits, table
from ..bench import files

if TYPE_CHECKING:
    from ...core.stats import StepStats

WORD = 4
"""Bytes of a word: of an index, or of a value."""


@dataclass(frozen=True)
class Cell:
    """One algorithm on P ranks: means over steps."""

    algorithm: str
    size: int
    """P."""
    numel: int
    k: int
    bytes_mean: float
    """That a rank sends in a step, the mean over ranks."""
    bytes_largest: float
    """The same of the rank that sends most."""
    messages: float
    """The most of any rank."""
    applied: float
    """Entries that a step applies, over k."""
    seconds: float
    """That the messages of a step take."""

    @staticmethod
    def of(name: str, size: int, steps: Sequence[Sequence[StepStats]], seconds: float) -> Cell:
        """From what each rank reports of each step."""
        first = steps[0][0]
        sent = [
            sum(rank.bytes_sent for rank in ranks) / len(steps)
            for ranks in zip(*steps, strict=True)
        ]
        applied = sum(ranks[0].selected_global for ranks in steps)
        return Cell(
            algorithm=name,
            size=size,
            numel=first.numel,
            k=first.target,
            bytes_mean=sum(sent) / size,
            bytes_largest=max(sent),
            messages=sum(max(rank.messages for rank in ranks) for ranks in steps) / len(steps),
            applied=applied / len(steps) / first.target,
            seconds=seconds,
        )

    @property
    def unit(self) -> float:
        """k(P-1)/P"""
        return self.k * (self.size - 1) / self.size

    @property
    def words(self) -> float:
        """Words that a rank sends, in multiples of k(P-1)/P."""
        return self.bytes_mean / WORD / self.unit

    @property
    def balance(self) -> float:
        """The largest over the mean."""
        return self.bytes_largest / self.bytes_mean


def report(cells: Sequence[Cell]) -> str:
    """A table, by algorithm and P."""
    names = list(dict.fromkeys(cell.algorithm for cell in cells))
    rows = [_row(cell) for cell in sorted(cells, key=lambda cell: names.index(cell.algorithm))]
    return "\n".join(table([list(rows[0]), *(list(row.values()) for row in rows)]))


def _row(cell: Cell) -> dict[str, str]:
    return {
        "algorithm": cell.algorithm,
        "P": str(cell.size),
        "kB a rank": digits(cell.bytes_mean / 1e3),
        "largest": digits(cell.bytes_largest / 1e3),
        "words": digits(cell.words),
        "balance": f"{cell.balance:.2f}",
        "messages": count(cell.messages),
        "applied": digits(cell.applied),
        "ms": digits(1e3 * cell.seconds),
    }


def save(path: Path, arguments: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Replace the file."""
    content = {
        "format": "oktopk plan --simulate",
        "version": 1,
        "arguments": {name: _plain(value) for name, value in arguments.items()},
        "cells": [
            dataclasses.asdict(cell) | {"words": cell.words, "balance": cell.balance}
            for cell in cells
        ],
    }
    with files.replacing("--json", path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
