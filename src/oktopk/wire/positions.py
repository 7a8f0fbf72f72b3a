"""How the positions of entries travel, relative to the first entry.

    gaps, 8 bits    one byte for the number of elements between an entry and the one before; 255
                    means 255 elements, and that the next byte goes on. For densities of about
                    0.4 % to 12 %.
    gaps, 16 bits   the same with two bytes, for thinner entries
    bitmap          one bit for each element, for denser ones
    plain           indexes as they are in memory, for a format without codes
    consecutive     no bytes at all: the entries are neighbours

Each message takes the shortest that its format allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.layout import BITMAP, CONSECUTIVE, GAPS8, GAPS16, PLAIN
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
        short, long = for_device(indices.device).count_gaps(indices, first)
        sizes = {GAPS8: short, GAPS16: 2 * long, BITMAP: -(-span // 8)}
        code = min(sizes, key=lambda code: sizes[code])
        return code, sizes[code]

    def most_bytes(self, count: int, numel: int) -> int:
        """Bytes in which the positions of any `count` entries of `numel` elements fit."""
        if not self.coded:
            return count * self.dtype.itemsize
        return min(count + numel // 255, 2 * (count + numel // 65535), -(-numel // 8))

    def write(self, code: int, indices: Tensor, first: int, room: Tensor) -> None:
        """Fill `room`, which has as many bytes as `shortest` said."""
        kernels = for_device(room.device)
        if code == PLAIN:
            room.view(self.dtype).copy_(indices)
        elif code == BITMAP:
            kernels.pack_bits(indices, first, room)
        elif code != CONSECUTIVE:
            kernels.pack_gaps(indices, first, room if code == GAPS8 else room.view(torch.int16))

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
        elif code == GAPS8:
            return kernels.unpack_gaps(room, first, high, dtype)
        elif code == GAPS16 and nbytes % 2 == 0:
            return kernels.unpack_gaps(room.view(torch.int16), first, high, dtype)
        elif code == BITMAP:
            return kernels.unpack_bits(room, first, high, dtype)
        raise DamagedMessageError("its positions have a code that is not of this format")


def _in_order(indices: Tensor, first: int, high: int) -> Tensor:
    """Indexes that begin with `first`, if they are in order and below `high`."""
    inside = int(indices[0]) == first and int(indices[-1]) < high
    if not inside or not bool((indices[1:] > indices[:-1]).all()):
        raise DamagedMessageError("its positions are not in order, or not where they should be")
    return indices
