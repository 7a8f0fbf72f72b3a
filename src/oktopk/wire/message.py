"""Entries of a sparse vector, and the bytes they travel as.

A message is a head, and then the values and the positions of its entries:

    head       five 64-bit words: what this is, counts, a size, a checksum, the first index
    added      64-bit words of the sender's, of which the wire knows nothing
    values     of the entries in order of their index
    positions  of the entries, relative to the first

Values travel as `plain` (in their own precision), or are rounded to `float32`, `bfloat16`,
`float16` or `int8`. The last two are scaled in blocks of QUANTUM values, and the scales follow the
values: `float16` by a power of two, so that the largest of a block just fits, `int8` as `quantise`
in kernels/reference.py says. `encode` returns what the receiver will read, so that the sender can
keep the difference.

`plain` is also the format whose positions are not coded: 8 bytes an entry. In all others the
shortest of three codes is taken for each message:

    gaps, 8 bits    one byte tells how many elements are passed over; 255 means that 255 are passed
                    over and that the next byte goes on. For densities of about 0.4 % to 12 %.
    gaps, 16 bits   the same with two bytes, for thinner entries
    bitmap          one bit for each element, for denser ones

Entries of consecutive elements need no positions, in any format.

`decode` trusts nothing: whatever bytes it is given, the entries that it returns are in order and
inside the bounds that the receiver knows, or it raises DamagedMessageError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.reference import QUANTUM, magnitude

FORMATS = ("plain", "float32", "bfloat16", "float16", "int8")

_MAGIC = 0x4F6B5470
"""First 32 bits of a message; another layout of messages needs another number."""
_HEAD_WORDS = 5
_CHECKSUM = 3
_PLAIN, _GAPS8, _GAPS16, _BITMAP, _CONSECUTIVE = range(5)
_ROUNDED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCALED = {"float16": (torch.float16, torch.uint8), "int8": (torch.uint8, torch.int32)}
"""Types of a value and of the scale of a block."""
_LARGEST_HALF = 32752.0
"""The largest float16 below 2**15. Blocks are scaled to it, so that no value that is scaled back
becomes infinite."""


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
        first = int(entries.indices[0]) if count else 0
        kind, room = self._code(entries, first)
        split, start, end = self._places(count, len(added), room)
        message = torch.empty(end if nbytes is None else nbytes, dtype=torch.uint8, device=device)
        message[start + room :] = 0
        sent = self._write_values(entries.values, message[split:start])
        self._write_positions(entries.indices, first, kind, message[start : start + room])
        words = message[:end].view(torch.int64)
        head = [self._what | kind, count << 24 | len(added), room, 0, first]
        words[: split // 8] = torch.tensor([*head, *added])
        words[_CHECKSUM] = for_device(device).checksum(words)
        return message, sent

    def decode(
        self, message: Tensor, low: int, high: int, added: int = 0
    ) -> tuple[Entries, list[int]]:
        """The entries of a message, all of elements `low` to `high`, and the numbers added.

        Args:
            message: any bytes at all.
            added: how many numbers must have been added.
        """
        if message.numel() < 8 * _HEAD_WORDS:
            raise DamagedMessageError(f"it has {message.numel()} bytes, less than its head")
        head = message[: 8 * _HEAD_WORDS].view(torch.int64).tolist()
        what, counts, room, checksum, first = head
        kind, count = what & 0xFF, counts >> 24
        if what - kind != self._what:
            raise DamagedMessageError("its head is that of no message of this format")
        if counts & 0xFFFFFF != added or not 0 <= count <= high - low or room < 0:
            raise DamagedMessageError("its head has counts that cannot be")
        split, start, end = self._places(count, added, room)
        if end > message.numel():
            raise DamagedMessageError(f"it has {message.numel()} bytes and should have {end}")
        words = message[:end].view(torch.int64)
        if for_device(message.device).checksum(words) != checksum:
            raise DamagedMessageError("its checksum is not right")
        indices = self._read_positions(message[start : start + room], kind, count, first, low, high)
        if indices.numel() != count:
            raise DamagedMessageError(
                f"it has {count} entries, but not as many positions of elements {low} to {high}"
            )
        values = self._read_values(message[split:start], count)
        return Entries(indices, values), words[_HEAD_WORDS : split // 8].tolist()

    def room(self, count: int, numel: int, added: int = 0) -> int:
        """Bytes in which any `count` entries of `numel` elements fit."""
        if self.format == "plain":
            positions = count * self.index_dtype.itemsize
        else:
            positions = min(count + numel // 255, 2 * (count + numel // 65535), -(-numel // 8))
        return self._places(count, added, positions)[-1]

    @property
    def _what(self) -> int:
        """The first word of a message, but for the code of its positions."""
        return _MAGIC << 24 | FORMATS.index(self.format) << 8

    def _places(self, count: int, added: int, room: int) -> tuple[int, int, int]:
        """Where in a message the values begin, where the positions begin, and where it ends."""
        split = 8 * (_HEAD_WORDS + added)
        start = split + self._value_bytes(count)
        return split, start, start + _padded(room)

    def _code(self, entries: Entries, first: int) -> tuple[int, int]:
        """The shortest code of the positions, and its bytes."""
        count = len(entries)
        span = int(entries.indices[-1]) - first + 1 if count else 0
        if span == count:
            return _CONSECUTIVE, 0
        if self.format == "plain":
            return _PLAIN, count * self.index_dtype.itemsize
        short, long = for_device(entries.indices.device).count_gaps(entries.indices, first)
        sizes = {_GAPS8: short, _GAPS16: 2 * long, _BITMAP: -(-span // 8)}
        kind = min(sizes, key=lambda code: sizes[code])
        return kind, sizes[kind]

    def _write_positions(self, indices: Tensor, first: int, kind: int, room: Tensor) -> None:
        kernels = for_device(room.device)
        if kind == _PLAIN:
            room.view(self.index_dtype).copy_(indices)
        elif kind == _BITMAP:
            kernels.pack_bits(indices, first, room)
        elif kind != _CONSECUTIVE:
            kernels.pack_gaps(indices, first, room if kind == _GAPS8 else room.view(torch.int16))

    def _read_positions(
        self, room: Tensor, kind: int, count: int, first: int, low: int, high: int
    ) -> Tensor:
        """Indexes in order, from `low` to `high`; as many as there are, whatever the bytes say."""
        kernels, dtype, nbytes = for_device(room.device), self.index_dtype, room.numel()
        if kind == _CONSECUTIVE and not nbytes and not count:
            return torch.empty(0, dtype=dtype, device=room.device)
        if not low <= first < high:
            raise DamagedMessageError(f"its first entry is none of elements {low} to {high}")
        if kind == _CONSECUTIVE and not nbytes:
            return torch.arange(first, min(first + count, high), dtype=dtype, device=room.device)
        if self.format == "plain":
            if kind == _PLAIN and nbytes == count * dtype.itemsize > 0:
                return _in_order(room.view(dtype), first, high)
        elif kind == _GAPS8:
            return kernels.unpack_gaps(room, first, high, dtype)
        elif kind == _GAPS16 and nbytes % 2 == 0:
            return kernels.unpack_gaps(room.view(torch.int16), first, high, dtype)
        elif kind == _BITMAP:
            return kernels.unpack_bits(room, first, high, dtype)
        raise DamagedMessageError("its positions have a code that is not of this format")

    def _value_bytes(self, count: int) -> int:
        if self.format in _SCALED:
            value, scale = _SCALED[self.format]
            return _padded(count * value.itemsize) + _padded(_blocks(count) * scale.itemsize)
        return _padded(count * _ROUNDED.get(self.format, self.value_dtype).itemsize)

    def _write_values(self, values: Tensor, room: Tensor) -> Tensor:
        """Into a message; returns them as they will be read."""
        if self.format in _SCALED:
            codes, scales = self._scale(values.to(torch.float32))
            split = _padded(codes.nbytes)
            room.zero_()
            room[: codes.nbytes] = codes.view(torch.uint8)
            room[split : split + scales.nbytes] = scales.view(torch.uint8)
            return self._unscale(codes, scales).to(values.dtype)
        dtype = _ROUNDED.get(self.format, self.value_dtype)
        used = values.numel() * dtype.itemsize
        room[used:] = 0
        written = room[:used].view(dtype)
        if dtype == values.dtype:
            written.copy_(values)
            return values
        limit = torch.finfo(dtype).max
        written.copy_(values.clamp(-limit, limit))
        return written.to(values.dtype)

    def _read_values(self, room: Tensor, count: int) -> Tensor:
        if self.format in _SCALED:
            value, scale = _SCALED[self.format]
            split, blocks = _padded(count * value.itemsize), _blocks(count)
            codes = room[: count * value.itemsize].view(value)
            scales = room[split : split + blocks * scale.itemsize].view(scale)
            return self._unscale(codes, scales).to(self.value_dtype)
        dtype = _ROUNDED.get(self.format, self.value_dtype)
        return room[: count * dtype.itemsize].view(dtype).to(self.value_dtype)

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.format == "float16":
            return _halve(values)
        return for_device(values.device).quantise(values)

    def _unscale(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.format == "float16":
            return _unhalve(codes, scales)
        return for_device(codes.device).dequantise(codes, scales)


def _in_order(indices: Tensor, first: int, high: int) -> Tensor:
    """Indexes that begin with `first`, if they are in order and below `high`."""
    inside = int(indices[0]) == first and int(indices[-1]) < high
    if not inside or not bool((indices[1:] > indices[:-1]).all()):
        raise DamagedMessageError("its positions are not in order, or not where they should be")
    return indices


def _halve(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as float16, and the exponent of the power of two that multiplies each block.

    An exponent is that of a float32, biased, as is that of the largest value of the block, which
    lies between 2**14 and 2**15 when the power is taken out.
    """
    whole, rest = _in_blocks(values)
    rest = torch.nn.functional.pad(rest, (0, -rest.numel() % QUANTUM)).view(-1, QUANTUM)
    largest = torch.cat([magnitude(part).amax(1) for part in (whole, rest)])
    exponents = ((largest >> 23) - 14).clamp(1, 240)
    scaled = _multiplied(values, 254 - exponents).clamp_(-_LARGEST_HALF, _LARGEST_HALF)
    return scaled.to(torch.float16), exponents.to(torch.uint8)


def _unhalve(halves: Tensor, exponents: Tensor) -> Tensor:
    """The float32 values that `_halve` wrote."""
    return _multiplied(halves.float(), exponents.int())


def _multiplied(values: Tensor, exponents: Tensor) -> Tensor:
    """Each block times its power of two; a power is a float32 with only an exponent."""
    powers = (exponents << 23).view(torch.float32)
    product = torch.empty_like(values)
    blocks = values.numel() // QUANTUM
    for part, out in zip(_in_blocks(values), _in_blocks(product), strict=True):
        torch.mul(part, powers[:blocks, None] if part.ndim == 2 else powers[blocks:], out=out)
    return product


def _in_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks, one in each row, and the rest."""
    end = values.numel() // QUANTUM * QUANTUM
    return values[:end].view(-1, QUANTUM), values[end:]


def _blocks(count: int) -> int:
    """Blocks of values that share a scale."""
    return -(-count // QUANTUM)


def _padded(nbytes: int) -> int:
    """Up to a whole word, so that what follows is aligned."""
    return -(-nbytes // 8) * 8
