"""The largest magnitudes of each row: digit by digit their limit, and then all that reach it.

    tally_digits, find_digit    for each digit of magnitudes, the leading one first
    count_kept, scan, write_kept

The limit's equals go by index. Nothing is sorted.
"""

from __future__ import annotations

import triton
from triton import language as tl

from .names import (
    ABOVE,
    BASE,
    DIGIT,
    FIELDS,
    FOUND,
    INSIDE,
    KEPT,
    LENGTH,
    PREFIX,
    RANK,
    START,
    THRESHOLD,
)


@triton.jit
def _magnitude(values):
    """`numbers.magnitude`."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def tally_digits(values, state, bins, room, at, shift, width, BLOCK: tl.constexpr):
    """How many candidates have each digit, of those whose digits before it are the prefix.

    Programs share `bins`, and only add to it: integers, in any order.

    Args:
        bins: zeros; `room` of them for each row, those of this digit from `at` on.
        shift, width: of the digit: bits below it, and its own.
    """
    row = tl.program_id(1).to(tl.int64)
    state += row * FIELDS
    first = tl.program_id(0).to(tl.int64) * BLOCK
    length, rank = tl.load(state + LENGTH), tl.load(state + RANK)
    if (first < length) & (rank > 0):
        place = first + tl.arange(0, BLOCK)
        there = place < length
        values += tl.load(state + START)
        bits = _magnitude(tl.load(values + place, mask=there, other=0.0))
        inside = there & (bits >= tl.load(state + THRESHOLD))
        inside = inside & ((bits >> (shift + width)) == tl.load(state + PREFIX))
        digit = (bits >> shift) - ((bits >> (shift + width)) << width)
        tl.atomic_add(bins + row * room + at + digit, 1, mask=inside, sem="relaxed")


@triton.jit
def find_digit(
    state, bins, room, at, aim, WIDTH: tl.constexpr, LEADS: tl.constexpr, CHUNK: tl.constexpr
):
    """The digit of the magnitude that has the rank. A program has a row for itself.

    Args:
        aim: with LEADS, another rank, whose digit is only noted.
        LEADS: this is the leading digit.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * FIELDS
    bins += row * room + at
    rank, prefix = tl.load(state + RANK), tl.load(state + PREFIX)
    found = rank * 0
    for first in range(0, 1 << WIDTH, CHUNK):
        found += tl.sum(tl.load(bins + first + tl.arange(0, CHUNK)).to(tl.int64), 0)
    below, digit, over = rank * 0, rank * 0, rank * 0
    aimed, aimed_above, aimed_inside = rank * 0, rank * 0, rank * 0
    for first in range(0, 1 << WIDTH, CHUNK):
        digits = first + tl.arange(0, CHUNK)
        inside = tl.load(bins + digits).to(tl.int64)
        above = found - below - tl.cumsum(inside, 0)
        below += tl.sum(inside, 0)
        hit = (above < rank) & (above + inside >= rank)
        digit += tl.sum(tl.where(hit, digits, 0), 0)
        over += tl.sum(tl.where(hit, above, 0), 0)
        if LEADS:
            hit = (above < aim) & (above + inside >= aim)
            aimed += tl.sum(tl.where(hit, digits, 0), 0)
            aimed_above += tl.sum(tl.where(hit, above, 0), 0)
            aimed_inside += tl.sum(tl.where(hit, inside, 0), 0)
    if LEADS:
        tl.store(state + FOUND, found)
        tl.store(state + DIGIT, aimed)
        tl.store(state + ABOVE, aimed_above)
        tl.store(state + INSIDE, aimed_inside)
    # Without a rank, or with fewer candidates than that, all candidates are kept.
    known = (rank > 0) & (found >= rank)
    tl.store(state + RANK, tl.where(known, rank - over, 0))
    tl.store(state + PREFIX, tl.where(known, (prefix << WIDTH) + digit, 0))


@triton.jit
def _marks(values, state, first, BLOCK: tl.constexpr):
    """Values of a block, which are above the limit, and which equal it."""
    place = first + tl.arange(0, BLOCK)
    there = place < tl.load(state + LENGTH)
    entries = tl.load(values + tl.load(state + START) + place, mask=there, other=0.0)
    bits, limit = _magnitude(entries), tl.load(state + PREFIX)
    there = there & (bits >= tl.load(state + THRESHOLD))
    return entries, there & (bits > limit), there & (bits == limit)


@triton.jit
def count_kept(values, state, tallies, blocks, BLOCK: tl.constexpr):
    """How many values of each block are above the limit, and how many equal it.

    A program writes the two numbers of its block.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    _, above, equal = _marks(values, state + row * FIELDS, block * BLOCK, BLOCK)
    tallies += 2 * (row * blocks + block)
    tl.store(tallies, tl.sum(above.to(tl.int32), 0))
    tl.store(tallies + 1, tl.sum(equal.to(tl.int32), 0))


@triton.jit
def scan(state, tallies, bases, blocks, WIDE: tl.constexpr):
    """How many are kept, and how many equal the limit, before each block.

    A program has a row for itself. It reads `tallies` and writes `bases`.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * FIELDS
    ties = tl.load(state + RANK)
    kept_before, equal_before = ties * 0, ties * 0
    for first in range(0, blocks, WIDE):
        block = first + tl.arange(0, WIDE)
        there = block < blocks
        at = 2 * (row * blocks + block)
        above = tl.load(tallies + at, mask=there, other=0)
        equal = tl.load(tallies + at + 1, mask=there, other=0)
        equals = equal_before + tl.cumsum(equal, 0) - equal
        kept = above + tl.minimum(tl.maximum(ties - equals, 0), equal)
        tl.store(bases + at, kept_before + tl.cumsum(kept, 0) - kept, mask=there)
        tl.store(bases + at + 1, equals, mask=there)
        kept_before += tl.sum(kept, 0)
        equal_before += tl.sum(equal, 0)
    tl.store(state + KEPT, kept_before)


@triton.jit
def write_kept(
    values, names, state, bases, index, entries, blocks, room, NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept entries of each row, in order. No two programs write to the same place.

    Args:
        names: with NAMED, the index of each value.
        index, entries: the result, `room` places for each row.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    state += row * FIELDS
    found, above, equal = _marks(values, state, block * BLOCK, BLOCK)
    bases += 2 * (row * blocks + block)
    equals = tl.load(bases + 1) + tl.cumsum(equal.to(tl.int32), 0)
    kept = above | (equal & (equals <= tl.load(state + RANK)))
    slot = tl.load(bases) + tl.cumsum(kept.to(tl.int32), 0) - 1
    kept = kept & (slot < room)
    place = block * BLOCK + tl.arange(0, BLOCK)
    if NAMED:
        name = tl.load(names + tl.load(state + START) + place, mask=kept, other=0)
    else:
        name = tl.load(state + BASE) + place
    tl.store(index + row * room + slot, name, mask=kept)
    tl.store(entries + row * room + slot, found, mask=kept)
