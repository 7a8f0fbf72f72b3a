"""How the positions of entries travel, relative to the first entry.

    Elias-Fano    the last 4, 8, 12 or 16 bits of an entry's offset from the first entry, and a
                  bitmap of the other bits in unary. It has a bit for each entry, and one for each
                  16, 256, 4096 or 65536 elements between the first and the last entry.
    bitmap        one bit for each element, for denser entries
    plain         indexes as they are in memory, for a format without codes
    consecutive   no bytes at all: the entries are neighbours

Each message takes the shortest that its format allows. Its size depends only on the number of
entries and on the elements between the first and the last of them. Elias-Fano codes are those of
P. Elias, "Efficient storage and retrieval by content and address of static files", 1974. The
bit of entry j is the j-th that is set, so a GPU can find all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.layout import BITMAP, CONSECUTIVE, ELIAS_FANO, LOW_BITS, PLAIN, shortest
from . import DamagedMessageError


@dataclass(frozen=True)
class Positions:
    """Writes the indexes of entries and reads them again."""

    dtype: torch.dtype
    """Type of indexes in memory."""
    coded: bool
    """False: as they are in memory, or nothing if they are consecutive."""

    def shortest(self, indices: Tensor, first: int) -> tuple[int, int]:
        """The shortest code for sorted indexes that begin with `first`, and its bytes."""
        count = indices.numel()
        span = int(indices[-1]) - first + 1 if count else 0
        if span == count:
            return CONSECUTIVE, 0
        if not self.coded:
            return PLAIN, count * self.dtype.itemsize
        return shortest(count, span)

    def most_bytes(self, count: int, numel: int) -> int:
        """Bytes in which the positions of at most `count` of `numel` elements fit."""
        return shortest(count, numel)[1] if self.coded else count * self.dtype.itemsize

    def write(self, code: int, indices: Tensor, first: int, room: Tensor) -> None:
        """Fill `room`, which has as many bytes as `shortest` said."""
        kernels = for_device(room.device)
        if code == PLAIN:
            room.view(self.dtype).copy_(indices)
        elif code == BITMAP:
            kernels.pack_bits(indices, first, room)
        elif code != CONSECUTIVE:
            kernels.pack_elias_fano(indices, first, LOW_BITS[code - ELIAS_FANO], room)

    def read(self, code: int, room: Tensor, count: int, first: int, low: int, high: int) -> Tensor:
        """Indexes in order, from `low` to `high`, for any bytes.

        There may be more or fewer than `count`; the caller checks that.

        Raises:
            DamagedMessageError: these bytes give no such indexes.
        """
        kernels, dtype, nbytes = for_device(room.device), self.dtype, room.numel()
        if code == CONSECUTIVE and not nbytes and not count:
            return torch.empty(0, dtype=dtype, device=room.device)
        if not low <= first < high:
            raise DamagedMessageError(f"its first entry is none of elements {low} to {high}")
        if code == CONSECUTIVE and not nbytes:
            return torch.arange(first, min(first + count, high), dtype=dtype, device=room.device)
        if not self.coded:
            if code == PLAIN and nbytes == count * dtype.itemsize > 0:
                return _in_order(room.view(dtype), first, high)
        elif code == BITMAP:
            return kernels.unpack_bits(room, first, high, dtype)
        elif count and 0 <= code - ELIAS_FANO < len(LOW_BITS):
            bits = LOW_BITS[code - ELIAS_FANO]
            return kernels.unpack_elias_fano(room, count, bits, first, high, dtype)
        raise DamagedMessageError("its positions have a code that is not of this format")


def _in_order(indices: Tensor, first: int, high: int) -> Tensor:
    """Indexes that begin with `first`, if they are in order and below `high`."""
    inside = int(indices[0]) == first and int(indices[-1]) < high
    if not inside or not bool((indices[1:] > indices[:-1]).all()):
        raise DamagedMessageError("its positions are not in order, or not where they should be")
    return indices
