"""Entries of a sparse vector, and the bytes they travel as.

A message holds the values and the indexes of its entries one after the other, without a
header: both sides know the number of entries. Values travel in the residual's own precision,
so nothing is rounded on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entries:
    """A sparse vector: sorted, unique indexes and their values, in two tensors of one length."""

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def __getitem__(self, part: slice) -> Entries:
        return Entries(self.indices[part], self.values[part])


def concatenate(parts: list[Entries]) -> Entries:
    """Entries of consecutive index ranges as one list."""
    return Entries(
        torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    )


@dataclass(frozen=True)
class Wire:
    """How entries are written: the type of an index and the type of a value."""

    index_dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        return self.index_dtype.itemsize + self.value_dtype.itemsize

    def encode(self, entries: Entries, out: Tensor | None = None) -> Tensor:
        """One message of len(entries) * entry_bytes bytes, written to the front of `out`."""
        if out is None:
            out = torch.empty(
                len(entries) * self.entry_bytes, dtype=torch.uint8, device=entries.values.device
            )
        written = self.decode(out, len(entries))
        written.indices.copy_(entries.indices)
        written.values.copy_(entries.values)
        return out

    def decode(self, message: Tensor, count: int | None = None) -> Entries:
        """The first `count` entries' room in `message` (all of it if None), as views."""
        if count is None:
            count = message.numel() // self.entry_bytes
        # The wider type goes first, so that both parts are aligned whatever the count.
        index_first = self.index_dtype.itemsize > self.value_dtype.itemsize
        split = count * (self.index_dtype if index_first else self.value_dtype).itemsize
        first, second = message[:split], message[split : count * self.entry_bytes]
        indices, values = (first, second) if index_first else (second, first)
        return Entries(indices.view(self.index_dtype), values.view(self.value_dtype))
