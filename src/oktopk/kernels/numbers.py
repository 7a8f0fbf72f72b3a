"""Numbers and their bits, as all kernels and the wire understand them."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

QUANTUM = 128
"""Values that share a scale in a message."""
LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""
LEADING_BITS = 13
"""Bits of the leading digit of a magnitude."""
MIX = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
"""Odd factors of the checksum: one for places, and those of MurmurHash3 for words."""
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
OCTAVE_BITS = 23
"""Bits of the fraction of a float32."""
OCTAVE = {torch.float32: 1 << OCTAVE_BITS, torch.float64: 1 << 52}
"""How much larger the bits of twice a number are than its own."""
_LETTERS = {torch.float32: ("i", "f"), torch.float64: ("q", "d")}
"""Of an integer and a number of the same width, for `struct`."""


def index_dtype(numel: int) -> torch.dtype:
    """The smallest integer type that can name each of `numel` elements."""
    return torch.int32 if numel <= 2**31 - 1 else torch.int64


def magnitude(values: Tensor) -> Tensor:
    """|values| as integers of the same width, in the same order.

    Without its sign bit, an IEEE number orders like the integer with the same bits. So infinities
    and NaNs are the largest of all (never lost, always found), denormals are ordinary numbers, and
    no comparison depends on rounding.
    """
    bits = values.view(_BITS[values.dtype])
    return bits & torch.iinfo(bits.dtype).max


def threshold_bits(threshold: float, dtype: torch.dtype) -> int:
    """|threshold| rounded to `dtype`, as an integer to compare magnitudes with."""
    whole, real = _LETTERS[dtype]
    try:
        return int(struct.unpack(f"={whole}", struct.pack(f"={real}", abs(threshold)))[0])
    except OverflowError:  # it is beyond the largest number
        return infinity(dtype)


def from_bits(bits: int, dtype: torch.dtype) -> float:
    """The number whose magnitude has these bits."""
    return reals(dtype, bits)[0]


def reals(dtype: torch.dtype, *bits: int) -> tuple[float, ...]:
    """`from_bits` of several, in two calls."""
    whole, real = _LETTERS[dtype]
    return struct.unpack(f"={len(bits)}{real}", struct.pack(f"={len(bits)}{whole}", *bits))


def infinity(dtype: torch.dtype) -> int:
    """The bits of infinity: as a threshold, there is none yet."""
    return (1 << (8 * dtype.itemsize - 1)) - OCTAVE[dtype]


def logarithm(count: int, dtype: torch.dtype) -> int:
    """The bits of a count as a float: about its logarithm, in units of 1 / octave."""
    return threshold_bits(float(count), dtype)


def leading_shift(dtype: torch.dtype) -> int:
    """How far to shift a magnitude so that its leading digit is left.

    The digit has the exponent and five bits more of a float32: bins of a 32nd of an octave, few
    enough for the nearest cache.
    """
    return dtype.itemsize * 8 - 1 - LEADING_BITS


def fixed_point(least: float, numel: int) -> tuple[float, float]:
    """The bound of the squares in `step_square`, and their scale.

    Squares are multiplied by the scale and rounded to integers: a sum of integers is the same in
    any order. The scale is such that the sum of `numel` squares fits in 64 bits.
    """
    most = 1 / (least * least)
    return most, 2.0**62 / (most * numel)
