"""Entries of a sparse vector, and the bytes they travel as.

A message is a head, and then the values and the positions of its entries:

    head       five 64-bit words: what this is, counts, sizes, a checksum, the first index
    added      64-bit words of the sender's, of which the wire knows nothing
    values     of the entries in order of their index
    positions  of the entries, relative to the first

Values travel as `plain` (in their own precision), or are rounded to `float32`, `bfloat16`,
`float16` (times a power of two, so that the largest just fits) or `int8` (see kernels). `encode`
returns what the receiver will read, so that the sender can keep the difference. `plain` is also the
format whose positions are not coded: 8 bytes an entry. In all others the shortest of three codes is
taken for each message:

    gaps, 8 bits    one byte tells how many elements are passed over; 255 means that 255 are passed
                    over and that the next byte goes on. For densities of about 0.4 % to 12 %.
    gaps, 16 bits   the same with two bytes, for thinner entries
    bitmap          one bit for each element, for denser ones
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import for_device
from .kernels.reference import QUANTUM

FORMATS = ("plain", "float32", "bfloat16", "float16", "int8")

_MAGIC = 0x4F6B546F
"""First 32 bits of a message; another layout of messages needs another number."""
_HEAD_WORDS = 5
_CHECKSUM = 3
_BIAS = 128
_PLAIN, _GAPS8, _GAPS16, _BITMAP = range(4)
_ROUNDED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class DamagedMessageError(RuntimeError):
    """A message is not what its sender wrote."""


@dataclass(frozen=True)
class Entries:
    """A sparse vector: sorted, unique indexes and their values, in two tensors of one length."""

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
    """How entries are written, and of which types they are in memory."""

    format: str
    index_dtype: torch.dtype
    value_dtype: torch.dtype

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
        kernels = for_device(device)
        low = int(entries.indices[0]) if count else 0
        kind, room = self._code(entries, low)
        split = 8 * (_HEAD_WORDS + len(added))
        start = split + self._value_bytes(count)
        end = start + _padded(room)
        message = torch.empty(end if nbytes is None else nbytes, dtype=torch.uint8, device=device)
        message[start + room :] = 0
        sent, power = self._write_values(entries.values, message[split:start])
        positions = message[start : start + room]
        if kind == _PLAIN:
            positions.view(self.index_dtype).copy_(entries.indices)
        elif kind == _BITMAP:
            kernels.pack_bits(entries.indices, low, positions)
        else:
            words = positions if kind == _GAPS8 else positions.view(torch.int16)
            kernels.pack_gaps(entries.indices, low, words)
        what = _MAGIC << 24 | FORMATS.index(self.format) << 8 | kind
        sizes = [count << 24 | len(added), room << 8 | power + _BIAS]
        words = message[:end].view(torch.int64)
        words[: split // 8] = torch.tensor([what, *sizes, 0, low, *added])
        words[_CHECKSUM] = kernels.checksum(words)
        return message, sent

    def decode(self, message: Tensor, low: int, high: int) -> tuple[Entries, list[int]]:
        """The entries of a message, all of elements `low` to `high`, and the numbers added."""
        kernels = for_device(message.device)
        if message.numel() < 8 * _HEAD_WORDS:
            raise DamagedMessageError(f"it has {message.numel()} bytes, less than its head")
        head = message[: 8 * _HEAD_WORDS].view(torch.int64).tolist()
        what, counts, room, checksum, first = head
        kind, count, added = what & 0xFF, counts >> 24, counts & 0xFFFFFF
        power, room = (room & 0xFF) - _BIAS, room >> 8
        if what - kind != _MAGIC << 24 | FORMATS.index(self.format) << 8:
            raise DamagedMessageError("its head is that of no message of this format")
        split = 8 * (_HEAD_WORDS + added)
        start = split + self._value_bytes(count)
        end = start + _padded(room)
        if not (0 <= count <= high - low and room >= 0 and end <= message.numel()):
            raise DamagedMessageError(f"it has {message.numel()} bytes and should have {end}")
        words = message[:end].view(torch.int64)
        if kernels.checksum(words) != checksum:
            raise DamagedMessageError("its checksum is not right")
        positions = message[start : start + room]
        if (kind == _PLAIN) != (self.format == "plain") or kind > _BITMAP:
            raise DamagedMessageError("its positions have a code that is not of this format")
        if kind == _PLAIN:
            indices = positions.view(self.index_dtype)
            if not bool((indices[1:] > indices[:-1]).all()):
                raise DamagedMessageError("its positions are not in order")
        elif kind == _BITMAP:
            indices = kernels.unpack_bits(positions, first, self.index_dtype)
        else:
            stream = positions if kind == _GAPS8 else positions.view(torch.int16)
            indices = kernels.unpack_gaps(stream, first, self.index_dtype)
        if indices.numel() != count or (count and not low <= first <= int(indices[-1]) < high):
            raise DamagedMessageError("its positions do not fit its number of entries")
        values = self._read_values(message[split:start], count, power)
        return Entries(indices, values), words[_HEAD_WORDS : split // 8].tolist()

    def room(self, count: int, numel: int, added: int = 0) -> int:
        """Bytes in which any `count` entries of `numel` elements fit."""
        if self.format == "plain":
            positions = count * self.index_dtype.itemsize
        else:
            positions = min(count + numel // 255, 2 * (count + numel // 65535), -(-numel // 8))
        return 8 * (_HEAD_WORDS + added) + self._value_bytes(count) + _padded(positions)

    def _code(self, entries: Entries, low: int) -> tuple[int, int]:
        """The shortest code of the positions, and its bytes."""
        if self.format == "plain":
            return _PLAIN, len(entries) * self.index_dtype.itemsize
        span = int(entries.indices[-1]) - low + 1 if len(entries) else 0
        short, long = for_device(entries.indices.device).count_gaps(entries.indices, low)
        sizes = {_GAPS8: short, _GAPS16: 2 * long, _BITMAP: -(-span // 8)}
        kind = min(sizes, key=lambda code: sizes[code])
        return kind, sizes[kind]

    def _value_bytes(self, count: int) -> int:
        if self.format == "int8":
            return _padded(count) + _padded(4 * -(-count // QUANTUM))
        return _padded(count * _ROUNDED.get(self.format, self.value_dtype).itemsize)

    def _write_values(self, values: Tensor, room: Tensor) -> tuple[Tensor, int]:
        """Into a message; returns them as they will be read, and the power they are scaled by."""
        count = values.numel()
        if self.format == "int8":
            kernels = for_device(values.device)
            codes, scales = kernels.quantise(values.to(torch.float32))
            room.zero_()
            room[:count] = codes
            split = _padded(count)
            room[split : split + 4 * scales.numel()].view(torch.int32).copy_(scales)
            return kernels.dequantise(codes, scales).to(values.dtype), 0
        dtype = _ROUNDED.get(self.format, self.value_dtype)
        used = count * dtype.itemsize
        room[used:] = 0
        written = room[:used].view(dtype)
        if dtype == values.dtype:
            written.copy_(values)
            return values, 0
        power = 0
        if self.format == "float16" and count:
            largest = float(values.abs().max())
            if 0 < largest < math.inf:
                power = max(-127, min(127, 15 - math.frexp(largest)[1]))
                values = values * 2.0**power
        limit = torch.finfo(dtype).max
        written.copy_(values.clamp(-limit, limit))
        sent = written.to(values.dtype)
        return sent * 2.0**-power if power else sent, power

    def _read_values(self, room: Tensor, count: int, power: int) -> Tensor:
        if self.format == "int8":
            split, blocks = _padded(count), -(-count // QUANTUM)
            scales = room[split : split + 4 * blocks].view(torch.int32)
            values = for_device(room.device).dequantise(room[:count], scales)
            return values.to(self.value_dtype)
        dtype = _ROUNDED.get(self.format, self.value_dtype)
        values = room[: count * dtype.itemsize].view(dtype).to(self.value_dtype)
        return values * 2.0**-power if power else values


def _padded(nbytes: int) -> int:
    """Up to a whole word, so that what follows is aligned."""
    return -(-nbytes // 8) * 8
