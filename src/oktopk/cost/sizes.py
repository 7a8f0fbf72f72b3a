"""Bytes of a message, as kernels/plan.py and wire/ lay it out. A test compares all three.

message = head + padded(values) + padded(positions)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HEAD = 5 * 8
"""Bytes of a message's head: five 64-bit words."""
BLOCK = 128
"""Values that share a scale."""
INDEX = 4
"""Bytes of an index in memory, below 2**31 elements; it is twice as long from there on."""
_LOW_BITS = (4, 8, 12, 16)


@dataclass(frozen=True)
class Wire:
    """How a wire format stores an entry of a float32 gradient."""

    value: float
    """Bytes of a value."""
    scale: int = 0
    """Bytes of the scale of a block of values."""
    coded: bool = True
    """Whether positions are coded; if not, an index travels as it is in memory."""

    def values(self, count: int) -> int:
        """Bytes of `count` values: codes, padded to a word, and a scale for each block."""
        codes = math.ceil(count * self.value)
        return padded(codes) + -(-count // BLOCK) * self.scale if self.scale else codes


WIRES = {
    "plain": Wire(4, coded=False),
    "float32": Wire(4),
    "bfloat16": Wire(2),
    "float16": Wire(2, scale=1),
    "int8": Wire(1, scale=4),
    "int4": Wire(0.5, scale=4),
}
"""All wire formats of the library, by name."""


def wire_of(name: str) -> Wire:
    """The wire format of a name."""
    if name not in WIRES:
        raise ValueError(f"wire is {name!r}, but must be one of {', '.join(WIRES)}")
    return WIRES[name]


def padded(nbytes: int) -> int:
    """Round up to a whole 64-bit word."""
    return -(-nbytes // 8) * 8


def positions(count: int, span: int) -> int:
    """Bytes of the positions of `count` entries among `span` elements: the shortest code.

    A bitmap takes span/8 bytes. Elias-Fano with b low bits takes, in bits, for each entry b + 1,
    and one for each 2^b elements.
    """
    least = -(-span // 8)
    for bits in _LOW_BITS:
        highs = 8 * -(-(count + ((span - 1) >> bits)) // 64)
        lows = bits // 8 * count + bits % 8 // 4 * -(-count // 2)
        least = min(least, highs + lows)
    return least


def message(wire: str, count: float, span: float, added: int = 0) -> int:
    """Bytes of a message of `count` entries among `span` elements, with `added` words.

    head + padded(values) + padded(positions)
    """
    form, count, span = wire_of(wire), max(0, round(count)), max(1, round(span))
    count = min(count, span)
    index = INDEX if span < 1 << 31 else 2 * INDEX
    coded = positions(count, span) if form.coded else count * index
    if count in (0, span):  # neighbours have no positions
        coded = 0
    return HEAD + 8 * added + padded(form.values(count)) + padded(coded)


def room(wire: str, count: int, span: int) -> int:
    """Bytes of a fixed-size message with room for `count` entries among `span` elements."""
    form = wire_of(wire)
    coded = positions(count, span) if form.coded else count * INDEX
    return HEAD + padded(form.values(count)) + padded(coded)
