"""Loops over whole vectors, and over the entries that change them."""

from __future__ import annotations

import triton
from triton import language as tl

from .choosing import _magnitude
from .names import (
    ALL_FINITE,
    BAD,
    DAMAGED,
    INFINITY,
    KEPT,
    LOCAL,
    REACHED,
    TOTAL,
)


@triton.jit
def _lower_bound(names, count, wanted, STEPS: tl.constexpr):
    """How many of `count` sorted names are less than each of those that are wanted.

    Args:
        STEPS: at least the number of bits of `count`.
    """
    low, high = wanted * 0, wanted * 0 + count
    for _ in range(STEPS):
        middle = (low + high) >> 1
        open_ = low < high
        less = open_ & (tl.load(names + middle, mask=open_, other=0) < wanted)
        low = tl.where(less, middle + 1, low)
        high = tl.where(open_ & (less == 0), middle, high)
    return low


@triton.jit
def _measure(bits, there, carried, shared):
    """Programs share these numbers, and only add to them."""
    reached = tl.sum((there & (bits >= carried)).to(tl.int32), 0)
    tl.atomic_add(shared + REACHED, reached.to(tl.int64), sem="relaxed")
    if tl.max(tl.where(there, bits, 0), 0) >= INFINITY:
        one = tl.full((), 1, tl.int64)
        tl.atomic_max(shared + BAD, one, sem="relaxed")


@triton.jit
def accumulate(
    gradient, residual, values, velocity, velocity_after, before, shared, start, count, factor,
    momentum, EVERYTHING: tl.constexpr, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values = residual + factor * gradient, for one part of the vector; and what they reach.

    With MOMENTUM, what is added is the new velocity: momentum * velocity + factor * gradient.

    Args:
        start: of the part in the vector.
        EVERYTHING: the carried threshold is 1.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    added = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32) * factor
    place += start
    if MOMENTUM:
        added = added + tl.load(velocity + place, mask=there, other=0.0) * momentum
        tl.store(velocity_after + place, added, mask=there)
    total = tl.load(residual + place, mask=there, other=0.0) + added
    tl.store(values + place, total, mask=there)
    carried = tl.maximum(tl.load(before + LOCAL), 1)
    if EVERYTHING:
        carried = carried * 0 + 1
    _measure(_magnitude(total), there, carried, shared)


@triton.jit
def measure(values, before, shared, count, EVERYTHING: tl.constexpr, BLOCK: tl.constexpr):
    """Whether sums are finite, and how many reach the carried threshold."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    carried = tl.maximum(tl.load(before + TOTAL), 1)
    if EVERYTHING:
        carried = carried * 0 + 1
    bits = _magnitude(tl.load(values + place, mask=there, other=0.0))
    _measure(bits, there, carried, shared)


@triton.jit
def add_entries(index, entries, there, boundary, sums, most, span, BLOCK: tl.constexpr):
    """Add the entries of one source to the sums of a region.

    The names of a source differ, so no two programs touch the same sum. Sources are launched in the
    order of ranks.
    """
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (slot < most) & (slot < tl.load(there))
    place = tl.load(index + slot, mask=inside, other=0).to(tl.int64) - tl.load(boundary)
    inside = inside & (place >= 0) & (place < span)
    added = tl.load(entries + slot, mask=inside, other=0.0)
    total = tl.load(sums + place, mask=inside, other=0.0) + added
    tl.store(sums + place, total, mask=inside)


@triton.jit
def clear_entries(
    values, velocity, index, amounts, counts, applied, state, most, MOMENTUM: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Amounts of applied entries leave the values, and with MOMENTUM their velocity ends.

    All names of all rows differ, so no two programs touch the same value.

    Args:
        applied: the names that are applied; `state` says how many.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (slot < most) & (slot < tl.load(counts + row))
    name = tl.load(index + row * most + slot, mask=inside, other=0).to(tl.int64)
    count = tl.load(state + KEPT)
    place = _lower_bound(applied, count, name, STEPS)
    taken = inside & (place < count)
    taken = taken & (tl.load(applied + place, mask=taken, other=0) == name)
    amount = tl.load(amounts + row * most + slot, mask=taken, other=0.0)
    left = tl.load(values + name, mask=taken, other=0.0) - amount
    tl.store(values + name, left, mask=taken)
    if MOMENTUM:
        moving = tl.load(velocity + name, mask=taken, other=0.0)
        tl.store(velocity + name, moving - moving, mask=taken)


@triton.jit
def _rounded(values, BFLOAT: tl.constexpr):
    """Finite values, rounded to the nearest of 16 bits, and to the even one of two."""
    if BFLOAT:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = values.to(tl.float16).to(tl.float32)
    return values


@triton.jit
def average(
    values, applied, sums, averages, state, limit, size, scale, undone, largest, rank, ranks,
    ROUNDED: tl.constexpr, BFLOAT: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Averages of the applied entries. This rank keeps the errors of its share.

    Applied names differ, so no two programs touch the same value.

    Args:
        limit: no more are applied.
        size: P, as a float. `rank` and `ranks` are integers.
        undone: what turns a rounded average into a sum again.
        largest: number of the type that averages are rounded to.
        ROUNDED: whether they are rounded to 16 bits.
        BFLOAT: to bfloat16 instead of float16.

    Flags stand for types: to compare types goes wrong before Triton 3.4.
    """
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(state + KEPT)
    inside = (slot < count) & (slot < limit)
    total = tl.load(sums + slot, mask=inside, other=0.0)
    # Rounded once more this is the float32 quotient. Before Triton 3.6, a division of float32 gives
    # zero for the smallest numbers.
    mean = (total.to(tl.float64) / size).to(tl.float32)
    if SCALED:
        mean = mean * scale
    if ROUNDED:
        mean = tl.minimum(tl.maximum(mean, -largest), largest)
        mean = _rounded(mean, BFLOAT)
        name = tl.load(applied + slot, mask=inside, other=0).to(tl.int64)
        # The share ends before count * (rank + 1) / P, without an overflow.
        share = (slot >= count * rank // ranks) & (slot < count * (rank + 1) // ranks) & inside
        error = total - mean * undone
        left = tl.load(values + name, mask=share, other=0.0) + error
        tl.store(values + name, left, mask=share)
    tl.store(averages + slot, mean, mask=inside)


@triton.jit
def _fine(after):
    """Whether the step is applied."""
    return (tl.load(after + DAMAGED) == 0) & (tl.load(after + ALL_FINITE) > 0)


@triton.jit
def blank(out, after, count, BLOCK: tl.constexpr):
    """Zeros for one part of the averages, if the step is applied."""
    if _fine(after):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + place, tl.zeros([BLOCK], out.dtype.element_ty), mask=place < count)


@triton.jit
def scatter(out, applied, averages, bounds, after, start, count, BLOCK: tl.constexpr):
    """The applied averages of one part, if the step is applied. Each has a place of its own.

    Args:
        bounds: for this part, its first entry and that of the next part.
        start, count: the part in the vector.
    """
    if _fine(after):
        slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK) + tl.load(bounds)
        inside = slot < tl.load(bounds + 1)
        place = tl.load(applied + slot, mask=inside, other=0).to(tl.int64) - start
        mean = tl.load(averages + slot, mask=inside, other=0.0).to(out.dtype.element_ty)
        tl.store(out + place, mean, mask=inside & (place >= 0) & (place < count))
