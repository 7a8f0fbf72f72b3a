"""Messages are read, whatever their bytes. `recording.py` then judges which are right.

checksum, count_bits, scan, place_bits, read_entries, and a judge
"""

from __future__ import annotations

import triton
from triton import language as tl

from .choosing import _magnitude
from .names import COUNT, QUANTUM, SMALLEST
from .writing import _value


@triton.jit
def _popcount(words):
    """How many bits are set in each uint32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (((words * 0x01010101) >> 24) & 0xFF).to(tl.int32)


@triton.jit
def _bitmap_words(message32, row, first, at, count, stride, BLOCK: tl.constexpr):
    place = first + tl.arange(0, BLOCK)
    words = tl.load(message32 + row * stride + at + place, mask=place < count, other=0)
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def count_bits(message32, tallies, at, count, stride, blocks, BLOCK: tl.constexpr):
    """The bits that are set in each block of a bitmap. A program writes the numbers of its block.

    Args:
        at, count: the bitmap, in 32-bit words.
        tallies: as of `count_kept`, for `scan`.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    words = _bitmap_words(message32, row, block * BLOCK, at, count, stride, BLOCK)
    tallies += 2 * (row * blocks + block)
    tl.store(tallies, tl.sum(_popcount(words), 0))
    tl.store(tallies + 1, 0)


@triton.jit
def place_bits(message32, bases, places, at, count, stride, blocks, most, BLOCK: tl.constexpr):
    """The numbers of the bits that are set, in order, no more than `most`.

    A bit's place is how many bits before it are set, so no two programs write to the same place.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    words = _bitmap_words(message32, row, block * BLOCK, at, count, stride, BLOCK)
    number = _popcount(words)
    before = tl.load(bases + 2 * (row * blocks + block)) + tl.cumsum(number, 0) - number
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    one = bit * 0 + 1
    below = words[:, None] & ((one << bit) - 1)
    slot = before[:, None] + _popcount(below)
    is_set = (((words[:, None] >> bit) & 1) > 0) & (slot < most)
    word = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(places + row * most + slot, 32 * word[:, None] + bit.to(tl.int64), mask=is_set)


@triton.jit
def _offset(places, planes, slot, there, most, LOW: tl.constexpr):
    """The offset of each entry, from its bit and its low bits."""
    offset = tl.load(places + slot, mask=there, other=0)
    if LOW >= 0:
        offset = tl.maximum(offset - slot, 0) << LOW
        for plane in tl.static_range(LOW // 8):
            low = tl.load(planes + plane * most + slot, mask=there, other=0).to(tl.int64)
            offset = offset | (low << (8 * plane))
        if LOW % 8:
            nibbles = planes + (LOW // 8) * most + (slot >> 1)
            low = tl.load(nibbles, mask=there, other=0).to(tl.int64) >> (4 * (slot & 1))
            offset = offset | ((low & 0xF) << (LOW - 4))
    return offset


@triton.jit
def read_entries(
    message, message32, words, boundaries, boundaries_step, places, index, entries, faults,
    values_at, scales_at, positions_at, bitmap, most, stride, WIDTH: tl.constexpr,
    LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Index and value of each entry, and whether any index is out of order or out of its region.

    A program writes entries of its own, and may set the fault of its row to 1.

    Args:
        boundaries_step: from a row's region to that of the next: 0 if all have the same.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(words + row * (stride // 8) + COUNT)
    there = (slot < count) & (slot < most)
    low = tl.load(boundaries + row * boundaries_step)
    high = tl.load(boundaries + row * boundaries_step + 1)
    places += row * most
    planes = message + row * stride + positions_at + bitmap
    offset = _offset(places, planes, slot, there, most, LOW)
    later = there & (slot > 0)
    previous = _offset(places, planes, slot - 1, later, most, LOW)
    fault = there & ((offset < 0) | (offset >= high - low)) | (later & (offset <= previous))
    if tl.max(fault.to(tl.int32), 0) > 0:
        tl.atomic_max(faults + row, 1, sem="relaxed")
    scale = message32 + row * (stride // 4) + scales_at + slot // QUANTUM
    scale = tl.load(scale, mask=there, other=0)
    codes = message + row * stride + values_at
    if WIDTH == 8:
        code = tl.load(codes + slot, mask=there, other=0).to(tl.int32)
    else:
        code = tl.load(codes + (slot >> 1), mask=there, other=0).to(tl.int32)
        code = (code >> (4 * (slot & 1)).to(tl.int32)) & 0xF
    tl.store(index + row * most + slot, low + offset, mask=slot < most)
    tl.store(entries + row * most + slot, _value(code, scale, WIDTH), mask=slot < most)


@triton.jit
def settle(entries, there, shared, most, BLOCK: tl.constexpr):
    """Zeros behind the last entry of each row, and the smallest magnitude that is not zero.

    Programs share the smallest: an integer, in any order.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < tl.load(there + row)
    entries += row * most + slot
    bits = _magnitude(tl.load(entries, mask=inside & (slot < most), other=0.0)).to(tl.int64)
    tl.store(entries, 0.0, mask=(slot < most) & (inside == 0))
    smallest = tl.min(tl.where(bits > 0, bits, 0x7FFFFFFFFFFF), 0)
    tl.atomic_min(shared + SMALLEST, smallest, sem="relaxed")
