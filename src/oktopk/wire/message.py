"""Entries of a sparse vector, and the bytes they travel as.

A message is a head, and then the values and the positions of its entries:

    head       five 64-bit words: format, counts, a size, a checksum, the first index
    added      64-bit words that the sender adds; the wire does not look at them
    values     of the entries in order of their index; see codecs.py
    positions  of the entries, relative to the first; see positions.py

`decode` trusts nothing. For any bytes, it returns entries that are in order and inside the bounds
that the receiver knows, or it raises DamagedMessageError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.layout import CHECKSUM, COUNT_SHIFT, HEAD_WORDS, padded
from . import DamagedMessageError
from .codecs import CODECS, FORMATS, Codec
from .positions import Positions

__all__ = ["FORMATS", "DamagedMessageError", "Entries", "Wire", "concatenate"]

_MAGIC = 0x4F6B5471
"""First 32 bits of a message; another layout of messages needs another number."""


@dataclass(eq=False)
class Entries:
    """A sparse vector: sorted, unique indexes and their values, in two tensors of one length."""

    __slots__ = ("indices", "values")

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def __getitem__(self, part: slice) -> Entries:
        return Entries(self.indices[part], self.values[part])


def concatenate(parts: Sequence[Entries]) -> Entries:
    """Entries of consecutive index ranges as one list."""
    if len(parts) == 1:
        return parts[0]
    return Entries(
        torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    )


@dataclass(frozen=True)
class Wire:
    """The format of messages, and the types of entries in memory."""

    format: str
    index_dtype: torch.dtype
    value_dtype: torch.dtype

    @cached_property
    def codec(self) -> Codec:
        """Writes and reads the values."""
        return CODECS[self.format](self.value_dtype)

    @cached_property
    def positions(self) -> Positions:
        """Writes and reads the indexes."""
        return Positions(self.index_dtype, self.codec.codes_positions)

    @property
    def always_finite(self) -> bool:
        """Whether `decode` returns finite values for any message."""
        return self.codec.always_finite

    def encode(
        self, entries: Entries, added: Sequence[int] = (), nbytes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """One message, and the values that its receiver will read.

        Args:
            entries: any number of them.
            added: numbers to travel with them.
            nbytes: size of the message; None: as small as it can be.
        """
        count, device = len(entries), entries.values.device
        first = int(entries.indices[0]) if count else 0
        code, room = self.positions.shortest(entries.indices, first)
        split, start, end = self._places(count, len(added), room)
        used = split + self.codec.nbytes(count)
        message = torch.empty(end if nbytes is None else nbytes, dtype=torch.uint8, device=device)
        message[used:start] = 0
        message[start + room :] = 0
        sent = self.codec.write(entries.values, message[split:used])
        self.positions.write(code, entries.indices, first, message[start : start + room])
        words = message[:end].view(torch.int64)
        head = [self._what | code, count << COUNT_SHIFT | len(added), room, 0, first]
        words[: split // 8] = torch.tensor([*head, *added])
        words[CHECKSUM] = for_device(device).checksum(words)
        return message, sent

    def decode(
        self, message: Tensor, low: int, high: int, added: int = 0
    ) -> tuple[Entries, list[int]]:
        """The entries of a message, all of elements `low` to `high`, and the numbers added.

        Args:
            message: any bytes at all.
            added: how many numbers must have been added.
        """
        if message.numel() < 8 * HEAD_WORDS:
            raise DamagedMessageError(f"it has {message.numel()} bytes, less than its head")
        head = message[: 8 * HEAD_WORDS].view(torch.int64).tolist()
        what, counts, room, checksum, first = head
        code, count = what & 0xFF, counts >> COUNT_SHIFT
        if what - code != self._what:
            raise DamagedMessageError("its head is that of no message of this format")
        if counts & ((1 << COUNT_SHIFT) - 1) != added or not 0 <= count <= high - low or room < 0:
            raise DamagedMessageError("its head has counts that cannot be")
        split, start, end = self._places(count, added, room)
        if end > message.numel():
            raise DamagedMessageError(f"it has {message.numel()} bytes and should have {end}")
        words = message[:end].view(torch.int64)
        if for_device(message.device).checksum(words) != checksum:
            raise DamagedMessageError("its checksum is not right")
        coded = message[start : start + room]
        indices = self.positions.read(code, coded, count, first, low, high)
        if indices.numel() != count:
            raise DamagedMessageError(
                f"it has {count} entries, but not as many positions of elements {low} to {high}"
            )
        values = self.codec.read(message[split : split + self.codec.nbytes(count)], count)
        return Entries(indices, values), words[HEAD_WORDS : split // 8].tolist()

    def room(self, count: int, numel: int, added: int = 0) -> int:
        """Bytes in which any `count` entries of `numel` elements fit."""
        return self._places(count, added, self.positions.most_bytes(count, numel))[-1]

    @cached_property
    def _what(self) -> int:
        """The first word of a message, without the code of its positions."""
        return _MAGIC << 24 | self.codec.number << 8

    def _places(self, count: int, added: int, room: int) -> tuple[int, int, int]:
        """Where in a message the values begin, where the positions begin, and where it ends."""
        split = 8 * (HEAD_WORDS + added)
        start = split + padded(self.codec.nbytes(count))
        return split, start, start + padded(room)
