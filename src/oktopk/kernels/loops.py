"""The loops of the CPU kernels, as plain Python that numba compiles; `cpu.py` calls them.

Unsigned loop variables spare numba its check for negative indexes, which would keep the compiler
from using vector instructions.
"""

from __future__ import annotations

import numpy as np
from numba import uintp

from .reference import MIX, MOST_SHIFT, QUANTUM
from .vectors import LANES, lowest_bit, reaching, stream

_BLOCK = LANES
_CHUNK = 1 << 15
"""Elements that are worked on together: their memory stays in the cache of a core."""
_PIECE = 1 << 11
"""The same, for memory that is nearest to it."""


def accumulate(r, g, o, bits, base, limit, mask, aligned, end, indices, values):  # type: ignore[no-untyped-def]
    """Of elements from `base` onward. Entries are written to places from `end` onward.

    `aligned` is a place in `o` from which whole blocks may be written past the cache, or -1.
    """
    word = bits.dtype.type
    end, peak, j, high, base = uintp(end), word(0), uintp(0), uintp(o.size), uintp(base)
    block = np.empty(_BLOCK, o.dtype)
    block_bits = block.view(bits.dtype)
    head = uintp(0) if aligned < 0 else uintp(aligned)
    while j < high:
        width = min(uintp(_BLOCK), high - j)
        if head:
            width, head = min(width, head), uintp(0)
        largest = word(0)
        if width < uintp(_BLOCK):
            for q in range(width):
                o[j + q] = r[j + q] + g[j + q]
                indices[end] = base + j + q
                values[end] = o[j + q]
                end += uintp((bits[j + q] & mask) >= limit)
                largest = max(largest, word(bits[j + q] & mask))
            peak = max(peak, largest)
            j += width
            continue
        for q in range(uintp(_BLOCK)):
            block[q] = r[j + q] + g[j + q]
        for q in range(uintp(_BLOCK)):
            largest = max(largest, word(block_bits[q] & mask))
        if aligned < 0:
            for q in range(uintp(_BLOCK)):
                o[j + q] = block[q]
        else:
            stream(o, j, block, 0)
        if largest >= limit:
            peak = max(peak, largest)
            left = reaching(block_bits, 0, mask, limit)
            while left != 0:
                q = lowest_bit(left)
                left &= left - np.uint64(1)
                indices[end] = base + j + q
                values[end] = block[q]
                end += uintp(1)
        j += width
    return end, peak


def select(dense, bits, low, high, limit, mask, indices, values):  # type: ignore[no-untyped-def]
    end, j, high = uintp(low), uintp(low), uintp(high)
    while j + uintp(_BLOCK) <= high:
        left = reaching(bits, j, mask, limit)
        while left != 0:
            q = lowest_bit(left)
            left &= left - np.uint64(1)
            indices[end] = j + q
            values[end] = dense[j + q]
            end += uintp(1)
        j += uintp(_BLOCK)
    for q in range(j, high):
        indices[end] = q
        values[end] = dense[q]
        end += uintp((bits[q] & mask) >= limit)
    return end


def histogram(bits, low, high, mask, prefix, shift, width, counts):  # type: ignore[no-untyped-def]
    """Two histograms in turn, so that equal digits in a row do not wait for each other. Where a
    prefix leaves few to count, only they are looked at."""
    word = bits.dtype.type
    j, high, digit_mask = uintp(low), uintp(high), uintp(counts.shape[1] - 1)
    if prefix > 0:
        first = word(prefix << (shift + width))
        beyond = word(first + (word(1) << (shift + width)))
        while j + uintp(_BLOCK) <= high:
            left = reaching(bits, j, mask, first)
            if beyond <= mask:
                left ^= reaching(bits, j, mask, beyond)
            while left != 0:
                q = lowest_bit(left)
                left &= left - np.uint64(1)
                counts[0, uintp((bits[j + q] & mask) >> shift) & digit_mask] += 1
            j += uintp(_BLOCK)
    else:
        while j + uintp(2) <= high:
            for way in range(uintp(2)):
                digit = (bits[j + way] & mask) >> shift
                counts[way, uintp(digit) & digit_mask] += digit >> width == prefix
            j += uintp(2)
    while j < high:
        digit = (bits[j] & mask) >> shift
        counts[0, uintp(digit) & digit_mask] += digit >> width == prefix
        j += uintp(1)


def keep(indices, values, bits, limit, mask, ties, kept_indices, kept_values):  # type: ignore[no-untyped-def]
    count = uintp(0)
    for j in range(uintp(indices.size)):
        magnitude = bits[j] & mask
        equal = magnitude == limit
        kept_indices[count] = indices[j]
        kept_values[count] = values[j]
        count += uintp((magnitude > limit) | (equal & (ties > 0)))
        ties -= equal
    return count


def merge(a_indices, a_values, b_indices, b_values, indices, values):  # type: ignore[no-untyped-def]
    a = b = count = 0
    while a < a_indices.size or b < b_indices.size:
        take_a = b == b_indices.size or (a < a_indices.size and a_indices[a] <= b_indices[b])
        take_b = a == a_indices.size or (b < b_indices.size and b_indices[b] <= a_indices[a])
        if take_a and take_b:
            indices[count], values[count] = a_indices[a], a_values[a] + b_values[b]
        elif take_a:
            indices[count], values[count] = a_indices[a], a_values[a]
        else:
            indices[count], values[count] = b_indices[b], b_values[b]
        a += take_a
        b += take_b
        count += 1
    return count


def add_at(dense, indices, values):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        dense[indices[j]] += values[j]


def scatter(dense, base, indices, values, aligned):  # type: ignore[no-untyped-def]
    """Elements from `base` onward, in pieces put together in the cache. `aligned` as above."""
    piece = np.zeros(_PIECE, dense.dtype)
    j, high, base = uintp(0), uintp(dense.size), uintp(base)
    at, entries = uintp(np.searchsorted(indices, base)), uintp(indices.size)
    head = uintp(0) if aligned < 0 else uintp(aligned)
    while j < high:
        width = min(uintp(_PIECE), high - j)
        if head:
            width, head = min(width, head), uintp(0)
        before, first = at, base + j
        while at < entries and uintp(indices[at]) < first + width:
            piece[uintp(indices[at]) - first] = values[at]
            at += uintp(1)
        if aligned < 0 or width < uintp(_PIECE):
            for q in range(width):
                dense[j + q] = piece[q]
        else:
            for q in range(uintp(0), uintp(_PIECE), uintp(_BLOCK)):
                stream(dense, j + q, piece, q)
        for e in range(before, at):
            piece[uintp(indices[e]) - first] = 0
        j += width


def take_common(dense, indices, values, applied):  # type: ignore[no-untyped-def]
    """Which entries are applied cannot be foreseen, so it is looked up instead of branched on."""
    marks = np.zeros(_CHUNK, np.bool_)
    common = np.empty(_CHUNK, np.int64)
    j, a, entries, most = uintp(0), uintp(0), uintp(indices.size), uintp(applied.size)
    while j < entries and a < most:
        first = max(indices[j], applied[a])
        while j < entries and indices[j] < first:
            j += uintp(1)
        while a < most and applied[a] < first:
            a += uintp(1)
        begin, found = a, uintp(0)
        while a < most and applied[a] - first < _CHUNK:
            marks[uintp(applied[a] - first)] = True
            a += uintp(1)
        while j < entries and indices[j] - first < _CHUNK:
            common[found] = j
            found += uintp(marks[uintp(indices[j] - first)])
            j += uintp(1)
        for c in range(found):
            dense[uintp(indices[uintp(common[c])])] -= values[uintp(common[c])]
        for b in range(begin, a):
            marks[uintp(applied[b] - first)] = False


def sum_select(indices, values, ends, base, low, high, limit, mask, bits, out_indices, out_values):  # type: ignore[no-untyped-def]
    """Of elements `low` to `high`, counted from `base`. `bits` only tells the type of bits.

    A mask with one bit for each element tells which have been touched, so that no others are
    looked at.
    """
    lists = ends.size
    at = np.empty(lists, np.int64)
    for part in range(lists):
        start = ends[part - 1] if part else 0
        at[part] = start + np.searchsorted(indices[start : ends[part]], base + low)
    sums = np.zeros(_CHUNK, values.dtype)
    sum_bits = sums.view(bits.dtype)
    touched = np.zeros(_CHUNK // 64, np.uint64)
    one, six, last_six = np.uint64(1), uintp(6), uintp(63)
    end = uintp(low)
    for chunk in range(low, high, _CHUNK):
        first = base + chunk
        stop = base + min(chunk + _CHUNK, high)
        for part in range(lists):
            j = at[part]
            while j < ends[part] and indices[j] < stop:
                place = uintp(indices[j] - first)
                sums[place] += values[j]
                touched[place >> six] |= one << np.uint64(place & last_six)
                j += 1
            at[part] = j
        for word in range(uintp(touched.size)):
            left = touched[word]
            touched[word] = 0
            while left != 0:
                place = (word << six) + lowest_bit(left)
                left &= left - one
                out_indices[end] = first + place
                out_values[end] = sums[place]
                end += uintp((sum_bits[place] & mask) >= limit)
                sums[place] = 0
    return end


def step_square(g, bits, v, low, high, mask, grown, least, most, scale):  # type: ignore[no-untyped-def]
    """A sum of integers, so that it is the same in any order."""
    total, j, high, one = np.int64(0), uintp(low), uintp(high), bits.dtype.type(1)
    while j < high:
        width = min(uintp(_BLOCK), high - j)
        if width == uintp(_BLOCK):
            left = reaching(bits, j, mask, one)
        else:
            left = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        while left != 0:
            here = j + lowest_bit(left)
            left &= left - np.uint64(1)
            if g[here] != 0:
                floor = g[here] * least
                floor *= floor
                moment = v[here] * grown
                moment = moment if moment > floor else floor
                square = np.float64(g[here]) * np.float64(g[here]) / np.float64(moment)
                total += np.int64((square if square < most else most) * scale)
        j += width
    return total


def adam(p, g, m, v, low, high, sign, grown, least, weight, decay, shrink, unbias, eps, lr):  # type: ignore[no-untyped-def]
    for j in range(uintp(low), uintp(high)):
        floor = g[j] * least
        floor *= floor
        moment = v[j] * grown
        moment = moment if moment > floor else floor
        v[j] = moment
        average = m[j] + weight * (sign * g[j] + decay * p[j] - m[j])
        m[j] = average
        p[j] = p[j] * shrink - lr * average / (np.sqrt(moment) * unbias + eps)


def count_gaps(indices, low):  # type: ignore[no-untyped-def]
    before, short, long = np.int64(low - 1), np.int64(0), np.int64(0)
    for j in range(indices.size):
        gap = np.int64(indices[j]) - before - 1
        if gap >= 255:  # divisions are slow, and most gaps are short
            short += gap // 255
            long += gap // 65535
        before = np.int64(indices[j])
    return short + indices.size, long + indices.size


def pack_gaps(indices, low, out):  # type: ignore[no-untyped-def]
    most = np.int64(2 ** (8 * out.itemsize) - 1)
    before, at = np.int64(low - 1), 0
    for j in range(indices.size):
        gap = np.int64(indices[j]) - before - 1
        while gap >= most:
            out[at] = most
            at += 1
            gap -= most
        out[at] = gap
        at += 1
        before = np.int64(indices[j])


def unpack_gaps(stream, low, high, out):  # type: ignore[no-untyped-def]
    most = np.int64(2 ** (8 * stream.itemsize) - 1)
    at, count = np.int64(low - 1), uintp(0)
    for j in range(stream.size):
        word = np.int64(stream[j])
        entry = word != most
        at += word + entry
        out[count] = at
        count += uintp(entry)
    return count if at < high else uintp(0)


def pack_bits(indices, low, out):  # type: ignore[no-untyped-def]
    out[:] = 0
    for j in range(indices.size):
        place = uintp(indices[j] - low)
        out[place >> uintp(3)] |= np.uint8(1 << (place & uintp(7)))


def unpack_bits(bits, low, high, out):  # type: ignore[no-untyped-def]
    beyond = low + 8 * bits.size - high
    if beyond >= 8 or (beyond > 0 and bits[-1] >> (8 - beyond)):
        return uintp(0)
    count = uintp(0)
    for j in range(bits.size):
        for q in range(8):
            out[count] = low + 8 * j + q
            count += uintp((bits[j] >> q) & 1)
    return count


def quantise(bits, codes, scales):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(0x7FFFFFFF)
    for block in range(scales.size):
        start = uintp(block * QUANTUM)
        stop = min(uintp(bits.size), start + uintp(QUANTUM))
        low, high = magnitude, np.uint32(0)
        for j in range(start, stop):
            low = min(low, np.uint32(bits[j] & magnitude))
            high = max(high, np.uint32(bits[j] & magnitude))
        low = np.uint32(low & np.uint32(0xFFFFFF00))
        shift = np.uint32(0)
        while (np.uint32(high - low) >> shift) > np.uint32(127):
            shift += np.uint32(1)
        half = np.uint32((np.uint32(1) << shift) >> np.uint32(1))
        for j in range(start, stop):
            code = np.uint32(np.uint32((bits[j] & magnitude) - low) + half) >> shift
            code = min(np.uint32(127), np.uint32(code))
            codes[j] = np.uint8(code | np.uint32((bits[j] >> np.uint32(24)) & np.uint32(0x80)))
        scales[block] = np.uint32(low | shift)


def dequantise(codes, scales, bits):  # type: ignore[no-untyped-def]
    for block in range(scales.size):
        start = uintp(block * QUANTUM)
        stop = min(uintp(bits.size), start + uintp(QUANTUM))
        low = np.uint32(scales[block] & np.uint32(0x7FFFFF00))
        shift = min(np.uint32(scales[block] & np.uint32(0xFF)), np.uint32(MOST_SHIFT))
        for j in range(start, stop):
            code = np.uint32(codes[j])
            value = np.uint32(low + np.uint32((code & np.uint32(127)) << shift))
            value = min(value, np.uint32(0x7F7FFFFF))
            bits[j] = np.uint32(value | ((code & np.uint32(0x80)) << np.uint32(24)))


def checksum(words):  # type: ignore[no-untyped-def]
    total, half, size = np.uint64(0), np.uint64(32), words.size
    for low, high in ((0, min(3, size)), (min(4, size), size)):
        for j in range(uintp(low), uintp(high)):
            word = words[j] ^ (np.uint64(j) * np.uint64(MIX[0]))
            word = (word ^ (word >> half)) * np.uint64(MIX[1])
            word = (word ^ (word >> half)) * np.uint64(MIX[2])
            total += word ^ (word >> half)
    return total
