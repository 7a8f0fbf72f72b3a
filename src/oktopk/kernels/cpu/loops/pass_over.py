"""The pass of a fixed-size step over the whole vector."""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ..form import AS_BFLOAT16, AS_RESIDUAL, PARTS, RESIDUAL, VALUES, VELOCITY, VELOCITY_AFTER
from ..vectors import LANES, lowest_bit, of_bfloat16, of_float16, reaching, stream, vector_at

_BLOCK = LANES
_LARGE = 1 << 22
"""Bytes of a vector that is more than the cache of a core holds."""


@extending.register_jitable
def head_of(address, size, start, itemsize):  # type: ignore[no-untyped-def]
    """How far behind `start` whole vectors can be written past the caches; see `alignment`."""
    if size * itemsize < _LARGE:
        return -1
    return (-(address // itemsize) - start) % (64 // itemsize)


@extending.register_jitable
def add_and_find(  # type: ignore[no-untyped-def]
    form, at, stops, kind, factor, momentum, low, high, limit, indices, values, bits
):
    """Fill elements `low` to `high` of `values`, and write candidates from place `low` onward.

    A block of values is converted and multiplied in the nearest cache, and memory is read and
    written once.

    Returns where the candidates end, and the largest magnitude.
    """
    word, mask = bits.dtype.type, bits.dtype.type(form.mask)
    o = vector_at(at[VALUES], form.numel, values)
    r = vector_at(at[RESIDUAL], form.numel, values)
    v = vector_at(at[VELOCITY], form.numel, values)
    w = vector_at(at[VELOCITY_AFTER], form.numel, values)
    moves = at[VELOCITY_AFTER] != 0
    simple = kind == AS_RESIDUAL and factor == 1.0 and not moves
    times, keep = values.dtype.type(factor), values.dtype.type(momentum)
    aligned = head_of(at[VALUES], form.numel, 0, form.itemsize)
    # Two vectors that do not begin at the same place of a cache line: one cannot be streamed.
    along = moves and (at[VALUES] - at[VELOCITY_AFTER]) % 64 == 0
    block = np.zeros(_BLOCK, values.dtype)
    block_bits = block.view(bits.dtype)
    added, halves = np.zeros(_BLOCK, values.dtype), np.zeros(0, np.uint16)
    end, peak, start = uintp(low), word(0), 0
    for part in range(stops.size):
        stop = stops[part]
        first, last = max(low, start), min(high, stop)
        j, beyond, base = uintp(first), uintp(max(first, last)), uintp(start)
        g = vector_at(at[PARTS + part], stop - start, values)
        h = vector_at(at[PARTS + part], stop - start, halves)
        head = uintp(0) if aligned < 0 else uintp((aligned - first) % (64 // form.itemsize))
        start = stop
        while j < beyond:
            width = min(uintp(_BLOCK), beyond - j)
            if head:
                width, head = min(width, head), uintp(0)
            whole = width == uintp(_BLOCK)
            place = j - base
            if whole and simple:
                for q in range(uintp(_BLOCK)):
                    block[q] = r[j + q] + g[place + q]
            elif whole and moves:
                _move(g, h, v, place, j, kind, times, keep, added)
                for q in range(uintp(_BLOCK)):
                    block[q] = r[j + q] + added[q]
                if along and aligned >= 0:
                    stream(w, j, added, 0)
                else:
                    for q in range(uintp(_BLOCK)):
                        w[j + q] = added[q]
            elif whole:
                _add(g, h, r, place, j, kind, times, block)
            else:
                for q in range(width):
                    number = _number(g, h, place + q, kind) * times
                    if moves:
                        number += v[j + q] * keep
                        w[j + q] = number
                    block[q] = r[j + q] + number
                for q in range(width, uintp(_BLOCK)):
                    block[q] = 0
            largest = word(0)
            for q in range(uintp(_BLOCK)):
                largest = max(largest, word(block_bits[q] & mask))
            if not whole:
                for q in range(width):
                    o[j + q] = block[q]
            elif aligned < 0:
                for q in range(uintp(_BLOCK)):
                    o[j + q] = block[q]
            else:
                stream(o, j, block, 0)
            peak = max(peak, largest)
            if largest >= limit:
                left = reaching(block_bits, 0, mask, limit)
                while left != 0:
                    q = lowest_bit(left)
                    left &= left - np.uint64(1)
                    indices[end] = j + q
                    values[end] = block[q]
                    end += uintp(1)
            j += width
    return end, np.uint64(peak)


# Each loop over a block does much with one element. The compiler would unroll a short one, and then
# it finds no vector instructions for it.


@extending.register_jitable(inline="always")
def _add(g, h, r, place, j, kind, times, block):  # type: ignore[no-untyped-def]
    """block = r + times * gradient"""
    number = block.dtype.type
    if kind == AS_RESIDUAL:
        for q in range(uintp(_BLOCK)):
            block[q] = r[j + q] + g[place + q] * times
    elif kind == AS_BFLOAT16:
        for q in range(uintp(_BLOCK)):
            block[q] = r[j + q] + number(of_bfloat16(h[place + q])) * times
    else:
        for q in range(uintp(_BLOCK)):
            block[q] = r[j + q] + number(of_float16(h[place + q])) * times


@extending.register_jitable(inline="always")
def _move(g, h, v, place, j, kind, times, keep, added):  # type: ignore[no-untyped-def]
    """added = times * gradient + keep * v"""
    number = added.dtype.type
    if kind == AS_RESIDUAL:
        for q in range(uintp(_BLOCK)):
            added[q] = g[place + q] * times + v[j + q] * keep
    elif kind == AS_BFLOAT16:
        for q in range(uintp(_BLOCK)):
            added[q] = number(of_bfloat16(h[place + q])) * times + v[j + q] * keep
    else:
        for q in range(uintp(_BLOCK)):
            added[q] = number(of_float16(h[place + q])) * times + v[j + q] * keep


@extending.register_jitable
def _number(g, h, place, kind):  # type: ignore[no-untyped-def]
    """An element of the gradient."""
    if kind == AS_RESIDUAL:
        return g[place]
    half = of_bfloat16(h[place]) if kind == AS_BFLOAT16 else of_float16(h[place])
    return g.dtype.type(half)
