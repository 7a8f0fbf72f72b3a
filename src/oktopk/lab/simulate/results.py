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
    heads = "algorithm P kB-a-rank largest words balance messages applied ms".split()
    rows = [[head.replace("-", " ") for head in heads]]
    rows += [
        [
            cell.algorithm,
            str(cell.size),
            digits(cell.bytes_mean / 1e3),
            digits(cell.bytes_largest / 1e3),
            digits(cell.words),
            f"{cell.balance:.2f}",
            count(cell.messages),
            digits(cell.applied),
            digits(1e3 * cell.seconds),
        ]
        for cell in sorted(cells, key=lambda cell: (names.index(cell.algorithm), cell.size))
    ]
    return "\n".join(table(rows))


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
