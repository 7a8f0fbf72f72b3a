"""Messages are written: values, positions and checksum.

Rows have zeros before. The row of `own`, if there is one, is for this rank itself: nothing is
written to its message.
"""

from __future__ import annotations

import triton
from triton import language as tl

from .choosing import _magnitude
from .names import CHECKSUM, LARGEST, MIX_FIRST, MIX_PLACE, MIX_SECOND, OCTAVE_BITS, QUANTUM


@triton.jit
def _value(code, scale, WIDTH: tl.constexpr):
    """The value of a code of `codes.quantise`: finite for any code and any scale."""
    number, scale = code.to(tl.int64), scale.to(tl.int64)
    shift = tl.minimum(scale & 0xFF, 32 - WIDTH)
    most: tl.constexpr = (1 << (WIDTH - 1)) - 1
    bits = (scale & 0x7FFFFF00) + ((number & most) << shift)
    bits = tl.minimum(bits, LARGEST).to(tl.int32)
    # The sign is the first bit.
    bits = tl.where(number > most, bits | -0x80000000, bits).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _code(values, base, shift, WIDTH: tl.constexpr):
    """The code of each value, in a block whose scale is known."""
    half = (tl.full((), 1, tl.int64) << tl.minimum(shift, OCTAVE_BITS)) >> 1
    code = (_magnitude(values).to(tl.int64) - base + half) >> shift
    code = tl.minimum(code, (1 << (WIDTH - 1)) - 1)
    return code + tl.where(values.to(tl.int32, bitcast=True) < 0, 1 << (WIDTH - 1), 0)


@triton.jit
def encode(
    exact, counts, sent, message, message32, values_at, scales_at, most, stride, own,
    WIDTH: tl.constexpr, ERRORS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of QUANTUM values, and what their readers will get.

    A program writes its own codes, scale and results, and reads the last entry of the row, which
    stands for all behind it.

    Args:
        sent: the values as they are read; with ERRORS, minus the exact ones.
        message, message32: the same memory as bytes and as 32-bit words.
        values_at, scales_at: where they begin in a message, in bytes and in 32-bit words.
        stride: bytes from one message to the next.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    pair = block * (QUANTUM // 2) + tl.arange(0, QUANTUM // 2)
    exact += row * most
    last = tl.load(exact + tl.maximum(count - 1, 0), mask=count > 0, other=0.0)
    even = tl.load(exact + 2 * pair, mask=2 * pair < count, other=last)
    odd = tl.load(exact + 2 * pair + 1, mask=2 * pair + 1 < count, other=last)
    read_even, read_odd = even, odd
    in_even, in_odd = 2 * pair < most, 2 * pair + 1 < most
    if row != own:
        smallest = tl.minimum(tl.min(_magnitude(even), 0), tl.min(_magnitude(odd), 0))
        largest = tl.maximum(tl.max(_magnitude(even), 0), tl.max(_magnitude(odd), 0))
        base = (smallest & 0x7FFFFF00).to(tl.int64)
        # The number of bits of the widest difference.
        needed = tl.sum((((largest - base) >> tl.arange(0, 32)) > 0).to(tl.int32), 0)
        shift = tl.maximum(needed - WIDTH + 1, 0).to(tl.int64)
        code_even = _code(even, base, shift, WIDTH)
        code_odd = tl.where(in_odd, _code(odd, base, shift, WIDTH), 0)
        scale = base | shift
        tl.store(message32 + row * (stride // 4) + scales_at + block, scale)
        codes = message + row * stride + values_at
        if WIDTH == 8:
            tl.store(codes + 2 * pair, code_even, mask=in_even)
            tl.store(codes + 2 * pair + 1, code_odd, mask=in_odd)
        else:
            tl.store(codes + pair, code_even | (code_odd << 4), mask=in_even)
        read_even, read_odd = _value(code_even, scale, WIDTH), _value(code_odd, scale, WIDTH)
        if ERRORS:
            read_even, read_odd = read_even - even, read_odd - odd
    tl.store(sent + row * most + 2 * pair, read_even, mask=in_even)
    tl.store(sent + row * most + 2 * pair + 1, read_odd, mask=in_odd)


@triton.jit
def _set_bit(words, at, mask, limit):
    """Programs may set bits of the same word: each in one operation, in any order."""
    one = (at * 0 + 1).to(tl.int32) << (at & 31).to(tl.int32)
    tl.atomic_or(words + (at >> 5), one, mask=mask & (at >= 0) & (at < limit), sem="relaxed")


@triton.jit
def mark_positions(
    index, counts, boundaries, message, message32, positions_at, bitmap, most, stride, own,
    LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions of two times BLOCK entries. A program writes their low bits alone.

    Args:
        boundaries: for each row, where its region begins.
        bitmap: bytes of it.
        LOW: bits that are stored as they are; -1: there is only the bitmap.
    """
    row = tl.program_id(1).to(tl.int64)
    if row != own:
        count, low = tl.load(counts + row), tl.load(boundaries + row)
        pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        index += row * most
        in_even, in_odd = 2 * pair < count, 2 * pair + 1 < count
        even = tl.load(index + 2 * pair, mask=in_even, other=0).to(tl.int64) - low
        odd = tl.load(index + 2 * pair + 1, mask=in_odd, other=0).to(tl.int64) - low
        words = message32 + (row * stride + positions_at) // 4
        if LOW < 0:
            _set_bit(words, even, in_even, 8 * bitmap)
            _set_bit(words, odd, in_odd, 8 * bitmap)
        else:
            _set_bit(words, (even >> LOW) + 2 * pair, in_even, 8 * bitmap)
            _set_bit(words, (odd >> LOW) + 2 * pair + 1, in_odd, 8 * bitmap)
            planes = message + row * stride + positions_at + bitmap
            for plane in tl.static_range(LOW // 8):
                tl.store(planes + 2 * pair, (even >> 8 * plane) & 0xFF, mask=in_even)
                tl.store(planes + 2 * pair + 1, (odd >> 8 * plane) & 0xFF, mask=in_odd)
                planes += most
            if LOW % 8:
                first = (even >> (LOW - 4)) & 0xF
                second = tl.where(in_odd, (odd >> (LOW - 4)) & 0xF, 0)
                tl.store(planes + pair, first | (second << 4), mask=in_even)


@triton.jit
def _mixed(terms, place):
    """`codes.mixed`, for words at these places."""
    terms = terms ^ (place * MIX_PLACE)
    terms = (terms ^ ((terms >> 32) & 0xFFFFFFFF)) * MIX_FIRST
    terms = (terms ^ ((terms >> 32) & 0xFFFFFFFF)) * MIX_SECOND
    return terms ^ ((terms >> 32) & 0xFFFFFFFF)


@triton.jit
def checksum(words, sums, count, stride, sums_stride, own, BLOCK: tl.constexpr):
    """Add the checksum of each row to its place in `sums`, which has zeros.

    The place may be the checksum's own word: nobody reads that one. Programs only add to it.

    Args:
        count, stride: in words of 64 bits.
    """
    row = tl.program_id(1).to(tl.int64)
    if row != own:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = (place < count) & (place != CHECKSUM)
        terms = _mixed(tl.load(words + row * stride + place, mask=there, other=0), place)
        total = tl.sum(tl.where(there, terms, 0), 0)
        tl.atomic_add(sums + row * sums_stride, total, sem="relaxed")
