"""Loops that select entries and put them back."""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ...numbers import LEADING_BITS
from ..vectors import LANES, lowest_bit, reaching, stream

_BLOCK = LANES
_CHUNK = 1 << 15
"""Elements that are worked on together: their memory stays in the cache of a core."""
_PIECE = 1 << 11
"""The same for the first-level cache."""


def accumulate(r, g, o, bits, base, limit, mask, aligned, end, indices, values):  # type: ignore[no-untyped-def]
    """o = r + g, for elements from `base` onward. Entries are written from place `end` onward.

    `aligned` is a place in `o` from which whole blocks may be written past the caches, or -1.
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
    """Fill two histograms in turn, so that equal digits in a row do not wait for each other. With
    a prefix there are few values to count, and the loop finds them with vector instructions."""
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


def keep_largest(indices, values, bits, mask, shift, k, wanted, kept_indices, kept_values):  # type: ignore[no-untyped-def]
    """The k-th largest is looked for among the entries with its leading digit only."""
    word, size = bits.dtype.type, uintp(bits.size)
    counts = np.zeros(1 << LEADING_BITS, np.int64)
    for j in range(size):
        counts[uintp((bits[j] & mask) >> shift)] += 1
    digit, above = _from_top(counts, k)
    limit, ties = word(0), 0
    if digit >= 0:
        inside, found = np.empty(counts[digit], bits.dtype), uintp(0)
        for j in range(size):
            if (bits[j] & mask) >> shift == word(digit):
                inside[found] = bits[j] & mask
                found += uintp(1)
        limit, ties = _kth_largest(inside, np.int64(shift), k - above)
    count = uintp(0)
    for j in range(size):
        magnitude = bits[j] & mask
        equal = magnitude == limit
        kept_indices[count] = indices[j]
        kept_values[count] = values[j]
        count += uintp((magnitude > limit) | (equal & (ties > 0)))
        ties -= equal
    digit, above = _from_top(counts, wanted) if wanted else (-1, 0)
    return count, limit, digit, above, counts[digit] if digit >= 0 else 0


@extending.register_jitable
def _kth_largest(bits, unknown, k):  # type: ignore[no-untyped-def]
    """The k-th largest of numbers that only differ in their last bits, digit by digit, and how many
    of its equals are among the k largest. The numbers are overwritten."""
    word, size = bits.dtype.type, uintp(bits.size)
    counts = np.empty(1 << LEADING_BITS, np.int64)
    while unknown > 0:
        width = min(unknown, LEADING_BITS)
        unknown -= width
        shift, last = word(unknown), word((1 << width) - 1)
        counts[:] = 0
        for j in range(size):
            counts[uintp((bits[j] >> shift) & last)] += 1
        digit, above = _from_top(counts, k)
        k -= above
        found = uintp(0)
        for j in range(size):
            number = bits[j]
            bits[found] = number
            found += uintp(word((number >> shift) & last) == word(digit))
        size = found
    return bits[0], (k if bits[0] else 0)


@extending.register_jitable
def _from_top(counts, rank):  # type: ignore[no-untyped-def]
    """The bin that a rank is in, counted from the largest, and how many are above it; -1: none."""
    above = 0
    for digit in range(counts.size - 1, -1, -1):
        if above + counts[digit] >= rank:
            return digit, above
        above += counts[digit]
    return -1, 0


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
    """Write elements from `base` onward, in pieces that are put together in the cache; `aligned` as
    in `accumulate`."""
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
    """The processor cannot predict which entries are applied, so marks replace branches."""
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
    """Sum elements `low` to `high`, counted from `base`. `bits` only gives the type of bits.

    A mask has one bit for each element: it tells which have a value, so the others are passed over.
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
