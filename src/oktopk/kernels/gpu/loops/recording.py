"""What is decided between the passes: thresholds, counts, heads of messages and records.

All kernels here, but for `cut_parts`, have one program. It reads a number before it writes it.
"""

from __future__ import annotations

import triton
from triton import language as tl

from .dense import _lower_bound
from .names import (
    ABOVE,
    ALL_FINITE,
    APPLIED,
    BAD,
    BASE,
    CHECKSUM,
    COUNT,
    DAMAGED,
    DAMAGED_SHIFT,
    DIGIT,
    FIELDS,
    FINITE,
    FLAGS,
    FOUND,
    INFINITY,
    INSIDE,
    KEPT,
    LEADING,
    LENGTH,
    LOCAL,
    LOCAL_LIMIT,
    LOCAL_TREND,
    MOST_TREND,
    OFF,
    OFFERED,
    OVERFLOW,
    POINT,
    PREFIX,
    RANK,
    REACHED,
    REGIONS,
    SHORT,
    SMALLEST,
    START,
    THRESHOLD,
    TOTAL,
    TOTAL_LIMIT,
    TOTAL_TREND,
    TREND,
    WHAT,
    WRONG,
)


@triton.jit
def _begin(state, start, length, base, threshold, rank):
    """A selection begins: for one row or, with vectors, for several."""
    tl.store(state + START, start)
    tl.store(state + LENGTH, length)
    tl.store(state + BASE, base)
    tl.store(state + THRESHOLD, threshold)
    tl.store(state + RANK, rank)
    tl.store(state + PREFIX, rank * 0)


@triton.jit
def _clamp(number, low, high):
    return tl.minimum(tl.maximum(number, low), high)


@triton.jit
def _logarithm(count):
    """`numbers.logarithm`, of an int64."""
    return count.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _right(state, threshold, wanted):
    """The threshold that would have found about `wanted` candidates; `control.py` explains it."""
    found, digit = tl.load(state + FOUND), tl.load(state + DIGIT)
    inside = tl.maximum(tl.load(state + INSIDE), 1)
    one = inside * 0 + 1
    rest = inside - (wanted - tl.load(state + ABOVE))
    about = (digit << LEADING) + (one << LEADING) // inside * rest
    few = _logarithm(found * 0 + wanted) - _logarithm(tl.maximum(found, 1))
    lowered = tl.maximum(threshold - (few * SHORT >> 8), 1)
    return tl.where(found < wanted, lowered, about)


@triton.jit
def _forecast(right, carried, trend):
    """`control.forecast`."""
    known = (right >= 1) & (right < INFINITY) & (carried >= 1) & (carried < INFINITY)
    surprise = _clamp(right - carried, -MOST_TREND, MOST_TREND)
    trend = _clamp(trend + (surprise * TREND >> 8), -MOST_TREND, MOST_TREND)
    value = _clamp(right + trend, 1, INFINITY - 1)
    return tl.where(known, value, right), tl.where(known, trend, 0)


@triton.jit
def _head(words, what, count, flags, point, mask):
    """The words of a head but for its checksum, for one message or for several."""
    tl.store(words + WHAT, what, mask=mask)
    tl.store(words + COUNT, count, mask=mask)
    tl.store(words + FLAGS, flags, mask=mask)
    tl.store(words + POINT, point, mask=mask)


@triton.jit(do_not_specialize=["least"])
def begin_offer(before, shared, state, numel, k, least, EVERYTHING: tl.constexpr):
    """Phase 1, step 2: which values are candidates."""
    carried = tl.maximum(tl.load(before + LOCAL), 1)
    if EVERYTHING:
        carried = carried * 0 + 1
    threshold = tl.where(tl.load(shared + REACHED) < least, 1, carried)
    zero = threshold * 0
    _begin(state, zero, zero + numel, zero, threshold, zero + k)


@triton.jit
def begin_rows(
    state, rows, chosen, boundaries, ranks, most, RANKS: tl.constexpr, STEPS: tl.constexpr
):
    """Phase 1, step 4: which part of the offer is in each region. A short one is kept whole."""
    row = tl.arange(0, RANKS).to(tl.int64)
    count = tl.load(state + KEPT)
    inner, there = (row > 0) & (row < ranks), row < ranks
    low = tl.load(boundaries + row, mask=inner, other=0)
    start = tl.where(inner, _lower_bound(chosen, count, low, STEPS), 0)
    inner = row + 1 < ranks
    high = tl.load(boundaries + row + 1, mask=inner, other=0)
    end = tl.where(inner, _lower_bound(chosen, count, high, STEPS), count)
    length = tl.maximum(end - start, 0)
    rank = tl.where(length > most, most, 0).to(tl.int64)
    rows += row * FIELDS
    tl.store(rows + START, start, mask=there)
    tl.store(rows + LENGTH, length, mask=there)
    tl.store(rows + THRESHOLD, row * 0 + 1, mask=there)
    tl.store(rows + RANK, rank, mask=there)
    tl.store(rows + PREFIX, row * 0, mask=there)


@triton.jit(do_not_specialize=["point"])
def record_offer(
    before, after, shared, state, rows, counts, words, what, point, aim, rank, ranks, stride,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Phase 1, steps 3 and 5: the record so far, and the heads of messages."""
    row = tl.arange(0, RANKS).to(tl.int64)
    there = row < ranks
    kept = tl.load(rows + row * FIELDS + KEPT, mask=there, other=0)
    tl.store(counts + row, kept, mask=there)
    finite = tl.where(tl.load(shared + BAD) > 0, 0, 1).to(tl.int64)
    _head(words + row * stride, what, kept, finite * FINITE, point, there & (row != rank))

    threshold, limit = tl.load(state + THRESHOLD), tl.load(state + PREFIX)
    offered = tl.load(state + KEPT)
    right = _right(state, threshold, aim)
    carried, trend = tl.load(before + LOCAL), tl.load(before + LOCAL_TREND)
    carried, trend = _forecast(right, carried, trend)
    tl.store(after + LOCAL, carried)
    tl.store(after + LOCAL_TREND, trend)
    tl.store(after + LOCAL_LIMIT, tl.where(limit > 0, limit, threshold))
    tl.store(after + OFFERED, offered)
    tl.store(after + OVERFLOW, offered - tl.sum(kept, 0))
    tl.store(after + ALL_FINITE, finite)
    tl.store(after + DAMAGED, 0)
    tl.store(after + REGIONS + 1 + ranks + rank, point)


@triton.jit
def _judge(words, row, stride, what, most, checks, bits, faults, mask):
    """Which messages are right, and their counts and flags."""
    words += row * stride
    count = tl.load(words + COUNT, mask=mask, other=0)
    right = mask & (tl.load(words + WHAT, mask=mask, other=0) == what)
    right = right & (count >= 0) & (count <= most)
    right = right & (tl.load(words + CHECKSUM, mask=mask, other=0) == tl.load(
        checks + row, mask=mask, other=0))  # fmt: skip
    right = right & (tl.load(bits + row * FIELDS + KEPT, mask=mask, other=0) == count)
    right = right & (tl.load(faults + row, mask=mask, other=1) == 0)
    flags = tl.load(words + FLAGS, mask=mask, other=0)
    return right, tl.where(right, count, 0), tl.where(right, flags, FINITE)


@triton.jit
def judge_offers(
    after, words, checks, bits, faults, counts, there, what, most, rank, ranks, stride,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Phase 2, step 1: how many entries of each source count. Those of this rank always do."""
    row = tl.arange(0, RANKS).to(tl.int64)
    others = (row < ranks) & (row != rank)
    right, count, flags = _judge(
        words, row, stride, what, most, checks, bits, faults, others
    )  # fmt: skip
    own = tl.load(counts + rank)
    tl.store(there + row, tl.where(row == rank, own, count), mask=row < ranks)
    first = tl.min(tl.where(others & (right == 0), row, ranks), 0)
    damaged = tl.where(first < ranks, first + 1 + rank * ranks, 0)
    tl.store(after + DAMAGED, damaged)
    finite = tl.min(flags & FINITE, 0)
    tl.store(after + ALL_FINITE, tl.load(after + ALL_FINITE) & finite)
    sealed = tl.load(words + row * stride + CHECKSUM, mask=others, other=0) == tl.load(
        checks + row, mask=others, other=0)  # fmt: skip
    point = tl.load(words + row * stride + POINT, mask=others & sealed, other=0)
    point = tl.where(sealed, point, tl.load(after + REGIONS + 1 + ranks + rank))
    tl.store(after + REGIONS + 1 + ranks + row, point, mask=others)


@triton.jit
def begin_sums(
    before, after, shared, state, boundary, span, most, share, fewest, EVERYTHING: tl.constexpr
):
    """Phase 2, step 3: whether the threshold is wrong, and how many sums to send."""
    threshold = tl.maximum(tl.load(before + TOTAL), 1)
    if EVERYTHING:
        threshold = threshold * 0 + 1
    zero = threshold * 0
    wrong = (tl.load(shared + REACHED) < fewest) & (threshold > 1)
    tl.store(shared + OFF, tl.where(wrong, 1, zero))
    finite = tl.where(tl.load(shared + BAD) > 0, 0, tl.load(after + ALL_FINITE))
    tl.store(after + ALL_FINITE, finite)
    rank = tl.where(wrong, zero + share, zero + most)
    _begin(state, zero, zero + span, tl.load(boundary), tl.where(wrong, 1, threshold), rank)


@triton.jit
def record_sums(after, shared, state, counts, words, what, rank, ranks):
    """Phase 2, step 4: the head of the reply."""
    kept, damaged = tl.load(state + KEPT), tl.load(after + DAMAGED)
    tl.store(counts + ranks, kept)
    damaged = tl.where(damaged > 0, damaged - ranks * rank, 0)
    flags = tl.load(after + ALL_FINITE) * FINITE | tl.load(shared + OFF) * WRONG
    flags = flags | (damaged << DAMAGED_SHIFT)
    point = tl.load(after + REGIONS + 1 + ranks + rank)
    _head(words, what, kept, flags, point, kept >= 0)


@triton.jit
def judge_replies(
    after, shared, state, words, checks, bits, faults, there, what, most, k, rank, ranks, stride,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Phase 3, step 1: what counts of each reply. Of the others, the first damaged one is told."""
    row = tl.arange(0, RANKS).to(tl.int64)
    all_ = row < ranks
    right, count, flags = _judge(words, row, stride, what, most, checks, bits, faults, all_)
    tl.store(there + row, count, mask=all_)
    told = flags >> DAMAGED_SHIFT
    told = tl.where((told > 0) & (told <= ranks), told + ranks * row, 0)
    told = tl.where(right, told, 1 + row + ranks * rank)
    told = tl.where(all_, told, 0)
    first = tl.min(tl.where(told > 0, row, ranks), 0)
    told = tl.sum(tl.where(row == first, told, 0), 0)
    damaged = tl.load(after + DAMAGED)
    tl.store(after + DAMAGED, tl.where(damaged > 0, damaged, told))
    finite = tl.min(flags & FINITE, 0)
    tl.store(after + ALL_FINITE, tl.load(after + ALL_FINITE) & finite)
    off = tl.max(tl.where(right & ((flags & WRONG) > 0), 1, 0), 0).to(tl.int64)
    tl.store(shared + OFF, off)
    zero = off * 0
    tl.store(shared + SMALLEST, zero + INFINITY)
    _begin(state, zero, most * (zero + ranks), zero, zero + 1, zero + k)


@triton.jit
def record_totals(
    before, after, shared, state, applied, k, wanted, ranks, RANKS: tl.constexpr,
    EVERYTHING: tl.constexpr,
):  # fmt: skip
    """Phase 3, steps 2 and 4: the global threshold and the next regions."""
    total = tl.maximum(tl.load(before + TOTAL), 1)
    if EVERYTHING:
        total = total * 0 + 1
    smallest, off = tl.load(shared + SMALLEST), tl.load(shared + OFF) > 0
    smallest = tl.where(smallest < INFINITY, smallest, 1)
    threshold = tl.where(off, smallest, total)
    right = _right(state, threshold, wanted)
    carried, trend = tl.load(before + TOTAL), tl.load(before + TOTAL_TREND)
    carried, trend = _forecast(right, tl.where(off, INFINITY, carried), trend)
    tl.store(after + TOTAL, carried)
    tl.store(after + TOTAL_TREND, trend)
    found, limit, count = (
        tl.load(state + FOUND), tl.load(state + PREFIX), tl.load(state + KEPT)
    )  # fmt: skip
    tl.store(after + TOTAL_LIMIT, tl.where(found > k, limit, threshold))
    tl.store(after + APPLIED, count)

    row = tl.arange(0, RANKS).to(tl.int64)
    region = tl.load(before + REGIONS + row, mask=row <= ranks, other=0)
    if not EVERYTHING:
        inner = (row > 0) & (row < ranks)
        cut = tl.load(applied + tl.minimum(row * count // ranks, k - 1), mask=inner, other=0)
        cut = tl.where(inner, cut, region)
        region = tl.where(count > 0, cut, region)
    tl.store(after + REGIONS + row, region, mask=row <= ranks)


@triton.jit
def cut_parts(
    applied, state, stops, bounds, counted, parts, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many applied entries lie before each part, and in it.

    A program writes the numbers of its parts.

    Args:
        bounds: one more than there are parts.
    """
    part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(state + KEPT)
    there = part <= parts
    before = _lower_bound(applied, count, tl.load(stops + part, mask=there, other=0), STEPS)
    tl.store(bounds + part, before, mask=there)
    there = part < parts
    until = _lower_bound(applied, count, tl.load(stops + part + 1, mask=there, other=0), STEPS)
    tl.store(counted + part, until - before, mask=there)
