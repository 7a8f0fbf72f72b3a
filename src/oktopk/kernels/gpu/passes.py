"""Chains of kernels that the phases share: selections, and messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import numbers
from ..layout import BITMAP, ELIAS_FANO, padded
from ..plan import CHECKSUM, Plan
from ..reference.step import Step
from . import launching
from .launching import blocks, power
from .loops import choosing, names, reading, writing

WIDTHS = {"int8": 8, "int4": 4}
"""Bits of a code, for each wire format that has kernels."""
DIGITS = ((18, 13, 0), (9, 9, 1 << 13), (0, 9, (1 << 13) + (1 << 9)))
"""Of a magnitude: bits below the digit, its own bits, and the first of its bins."""
BINS = (1 << 13) + 2 * (1 << 9)


class Passes(Step):
    """The reference's memory, scratch for the kernels, and how they are chained."""

    BLOCK = 1024
    """Elements of a vector or a list that a program has."""
    CHUNK = 1024
    """Bins that a program looks at together."""
    WORDS = 64
    """32-bit words of a bitmap that a program has."""

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, dtype, device)
        self._width = WIDTHS.get(plan.codec.name, 0) if dtype == torch.float32 else 0
        if plan.code != BITMAP and plan.code < ELIAS_FANO:
            self._width = 0
        if not self._width:
            return

        def new(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        size, most, k, whole = plan.size, plan.most, plan.k, torch.int64
        index, real = numbers.index_dtype(plan.numel), torch.float32
        self._low_bits = -1 if plan.code == BITMAP else plan.low_bits
        self._scales_at = plan.values_at + padded(-(-most * self._width // 8))
        self._row_most = min(k, plan.span)
        self._ranks, self._steps = power(size + 1), max(most, k).bit_length()
        self._shared = new(whole, names.NUMBERS.value)
        """Numbers of a phase; see `loops/names.py`."""
        self._state = new(whole, 1, names.FIELDS.value)
        """Of a selection from one vector."""
        self._rows = new(whole, size, names.FIELDS.value)
        """Of a selection from each region's part of the offer."""
        self._bits = new(whole, size, names.FIELDS.value)
        """How many bits are set in each bitmap. These states never have a rank."""
        self._bins = new(index, size, BINS)
        tallies = max(
            blocks(max(plan.numel, plan.span, size * most), self.BLOCK),
            size * blocks(self._row_most, self.BLOCK),
            size * blocks(plan.bitmap // 4, self.WORDS),
        )
        self._tallies, self._bases = new(whole, tallies, 2), new(whole, tallies, 2)
        """Two counts for each block, and their sums before it."""
        self._chosen, self._chosen_values = new(index, k), new(real, k)
        """The offer, and later the applied entries and their sums."""
        self._exact = new(real, size, most)
        """Entries before they are rounded."""
        self._read, self._read_values = new(index, size, most), new(real, size, most)
        """Entries of messages."""
        self._places = new(whole, size, most)
        """The bits that are set in each bitmap."""
        self._checks, self._faults = new(whole, size), new(whole, size)
        """The checksum of each message, and whether its positions are wrong."""
        self._there = new(whole, size)
        """How many entries of each message count."""
        self._sums = new(real, plan.span)
        self._averages = new(real, k)
        self._bounds = new(whole, len(plan.parts) + 1)
        """For each part, how many applied entries lie before it."""

    def _select(
        self, values: Tensor, named: Tensor | None, state: Tensor, longest: int, aim: int,
        index: Tensor, entries: Tensor, room: int,
    ) -> None:  # fmt: skip
        """The entries of each row that its state asks for.

        Args:
            named: the index of each value. If None, they are counted from the state's base.
            longest: no row is longer.
            room: entries in each row of the result.
        """
        rows, count = len(state), blocks(longest, self.BLOCK)
        self._bins[:rows].zero_()
        for shift, width, at in DIGITS:
            self._blocks(
                choosing.tally_digits, longest, rows, values, state, self._bins, BINS, at, shift,
                width,
            )  # fmt: skip
            launching.launch(
                choosing.find_digit, (rows,), state, self._bins, BINS, at, aim, WIDTH=width,
                LEADS=at == 0, CHUNK=min(self.CHUNK, 1 << width),
            )  # fmt: skip
        self._blocks(choosing.count_kept, longest, rows, values, state, self._tallies, count)
        self._scan(state, count)
        self._blocks(
            choosing.write_kept, longest, rows, values, values if named is None else named, state,
            self._bases, index, entries, count, room, NAMED=named is not None,
        )  # fmt: skip

    def _scan(self, state: Tensor, count: int) -> None:
        launching.launch(
            choosing.scan, (len(state),), state, self._tallies, self._bases, count, WIDE=self.BLOCK
        )

    def _write(
        self, messages: Tensor, rows: int, index: Tensor, counts: Tensor, sent: Tensor,
        boundaries: Tensor, own: int, errors: bool,
    ) -> None:  # fmt: skip
        """Messages whose heads are written, and whose other bytes are zero."""
        plan, words = self.plan, messages.view(torch.int32)
        launching.launch(
            writing.encode, (blocks(plan.most, numbers.QUANTUM), rows), self._exact, counts, sent,
            messages, words, plan.values_at, self._scales_at // 4, plan.most, plan.stride, own,
            WIDTH=self._width, ERRORS=errors, num_warps=1,
        )  # fmt: skip
        self._blocks(
            writing.mark_positions, -(-plan.most // 2), rows, index, counts, boundaries, messages,
            words, plan.positions_at, plan.bitmap, plan.most, plan.stride, own, LOW=self._low_bits,
        )  # fmt: skip
        words, stride = messages.view(torch.int64), plan.stride // 8
        self._blocks(
            writing.checksum, plan.room // 8, rows, words, words[:, CHECKSUM:], plan.room // 8,
            stride, stride, own,
        )  # fmt: skip

    def _read_messages(self, messages: Tensor, boundaries: Tensor, step: int) -> None:
        """All messages, as if they were right, and what a judge needs to know of them.

        Args:
            step: from the boundaries of a message's region to those of the next.
        """
        plan, size, words = self.plan, self.plan.size, messages.view(torch.int32)
        for numbers_of_messages in (self._shared, self._checks, self._faults):
            numbers_of_messages.zero_()
        self._blocks(
            writing.checksum, plan.room // 8, size, messages.view(torch.int64), self._checks,
            plan.room // 8, plan.stride // 8, 1, -1,
        )  # fmt: skip
        count = blocks(plan.bitmap // 4, self.WORDS)
        bitmap = plan.positions_at // 4, plan.bitmap // 4, plan.stride // 4, count
        launching.launch(
            reading.count_bits, (count, size), words, self._tallies, *bitmap, BLOCK=self.WORDS
        )
        self._scan(self._bits, count)
        launching.launch(
            reading.place_bits, (count, size), words, self._bases, self._places, *bitmap, plan.most,
            BLOCK=self.WORDS,
        )  # fmt: skip
        self._blocks(
            reading.read_entries, plan.most, size, messages, words, messages.view(torch.int64),
            boundaries, step, self._places, self._read, self._read_values, self._faults,
            plan.values_at, self._scales_at // 4, plan.positions_at, plan.bitmap, plan.most,
            plan.stride, WIDTH=self._width, LOW=self._low_bits,
        )  # fmt: skip

    def _run(self, kernel: Callable[..., Any], *arguments: Any, **constants: Any) -> None:
        """Launch one program of one warp."""
        launching.launch(kernel, (1,), *arguments, num_warps=1, **constants)

    def _blocks(
        self, kernel: Callable[..., Any], longest: int, rows: int, *arguments: Any, **constants: Any
    ) -> None:
        """Launch a program for each BLOCK elements of each row."""
        grid = blocks(longest, self.BLOCK), rows
        launching.launch(kernel, grid, *arguments, BLOCK=self.BLOCK, **constants)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        device = self.before.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
