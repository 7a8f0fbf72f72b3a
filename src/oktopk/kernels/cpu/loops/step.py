"""The three phases of a fixed-size step, each in one loop; `reference/step.py` explains them.

`at` are addresses of vectors; see `form.py`. `indices`, `values` and `bits` are scratch memory:
room for entries, which each phase cuts in its own way. `bits` is the memory of `values`.
"""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ...control import forecast as _plain_forecast
from ...control import lowered as _plain_lowered
from ...control import spread_evenly as _plain_spread_evenly
from ...numbers import LEADING_BITS
from ...plan import (
    ALL_FINITE,
    APPLIED,
    CHECKSUM,
    DAMAGED,
    DAMAGED_SHIFT,
    FINITE,
    LOCAL,
    LOCAL_LIMIT,
    LOCAL_TREND,
    OFFERED,
    OVERFLOW,
    POINT,
    REGIONS,
    TOTAL,
    TOTAL_LIMIT,
    TOTAL_TREND,
    WRONG,
)
from ..form import AS_BFLOAT16, AS_RESIDUAL, PARTS, VALUES, VELOCITY_AFTER
from ..vectors import of_bfloat16, of_float16, to_bfloat16, to_float16, vector_at
from .codes import checksum
from .messages import LARGEST_BFLOAT16, clamped, read_message, write_message
from .pass_over import add_and_find, head_of
from .selection import _from_top
from .selection import histogram as _plain_histogram
from .selection import keep_largest as _plain_keep_largest
from .selection import scatter as _plain_scatter
from .selection import select as _plain_select
from .selection import sum_select as _plain_sum_select
from .selection import take_common as _plain_take_common

_forecast = extending.register_jitable(_plain_forecast)
_lowered = extending.register_jitable(_plain_lowered)
_spread_evenly = extending.register_jitable(_plain_spread_evenly)
_histogram = extending.register_jitable(_plain_histogram)
_keep_largest = extending.register_jitable(_plain_keep_largest)
_scatter = extending.register_jitable(_plain_scatter)
_select = extending.register_jitable(_plain_select)
_sum_select = extending.register_jitable(_plain_sum_select)
_take_common = extending.register_jitable(_plain_take_common)
_LARGEST_FLOAT16 = 65504.0


def prepare(  # type: ignore[no-untyped-def]
    form, before, after, at, stops, kind, factor, momentum, least, point, pieces,
    rows, sent, counts, send, indices, values, bits,
):  # fmt: skip
    """`pieces`: what `find` has returned for ranges of the vector; none: nobody has called it.

    Returns how many candidates were in the scratch memory.
    """
    _check(form, before)
    word, mask = bits.dtype.type, bits.dtype.type(form.mask)
    carried = 1 if form.everything else max(before[LOCAL], 1)
    front = form.k + form.most + 2
    i, v, b = indices[front:], values[front:], bits[front:]
    if pieces.shape[0]:
        end, peak = _join(pieces, i, v)
    else:
        limit = word(min(carried, form.mask))
        end, peak = add_and_find(
            form, at, stops, kind, factor, momentum, 0, form.numel, limit, i, v, b
        )
    found = np.int64(end)
    threshold, room, all_found = carried, found, found
    digit, above, inside = -1, 0, 0
    if found < least and carried > 1:
        threshold = 1
        room, all_found, digit, above, inside = _find_again(form, at[VALUES], i, v, b)
    wanted = 0 if digit >= 0 else form.aim
    kept, limit, its_digit, its_above, its_inside = _keep_largest(
        i[:room], v[:room], b[:room], mask, word(form.shift), form.k, wanted,
        indices[: form.k + 1], values[: form.k + 1],
    )  # fmt: skip
    if digit < 0:
        digit, above, inside = its_digit, np.int64(its_above), its_inside
    if all_found >= form.aim:
        right = _spread_evenly(digit, above, inside, form.aim, form.shift)
    else:
        right = _lowered(threshold, _bits_of_count(all_found, bits, values), form.aim_bits)
    after[LOCAL], after[LOCAL_TREND] = _forecast(
        right, before[LOCAL], before[LOCAL_TREND], form.octave, form.infinity
    )
    after[LOCAL_LIMIT] = np.int64(limit) if limit else threshold
    finite = np.int64(np.int64(peak) < form.infinity)
    after[OFFERED], after[ALL_FINITE], after[DAMAGED] = kept, finite, 0
    after[REGIONS + form.size + 1 + form.rank] = point
    sent_entries = _split(
        form, before, np.int64(kept), finite * FINITE, point,
        rows, sent, counts, send, indices, values, bits,
    )  # fmt: skip
    after[OVERFLOW] = np.int64(kept) - sent_entries
    return max(found, room)


def find(form, before, at, stops, kind, factor, momentum, low, high, indices, values, bits):  # type: ignore[no-untyped-def]
    """The pass of `prepare` over a range of the vector: one of several threads."""
    carried = 1 if form.everything else max(before[LOCAL], 1)
    front = form.k + form.most + 2
    i, v, b = indices[front:], values[front:], bits[front:]
    limit = bits.dtype.type(min(carried, form.mask))
    end, peak = add_and_find(form, at, stops, kind, factor, momentum, low, high, limit, i, v, b)
    return low, np.int64(end), np.int64(peak)


@extending.register_jitable
def _check(form, before):  # type: ignore[no-untyped-def]
    """Wrong boundaries would let loops write anywhere."""
    for owner in range(form.size):
        low, high = before[REGIONS + owner], before[REGIONS + owner + 1]
        if not 0 <= low <= high <= form.numel or high - low > form.span:
            raise ValueError("the boundaries of the regions do not fit the plan")
    if form.size and (before[REGIONS] != 0 or before[REGIONS + form.size] != form.numel):
        raise ValueError("the regions are not the whole vector")


@extending.register_jitable
def _join(pieces, indices, values):  # type: ignore[no-untyped-def]
    """Put the entries of several ranges one behind the other."""
    end, peak = 0, 0
    for piece in range(pieces.shape[0]):
        low, stop = pieces[piece, 0], pieces[piece, 1]
        for j in range(low, stop):
            indices[end], values[end] = indices[j], values[j]
            end += 1
        peak = max(peak, pieces[piece, 2])
    return uintp(end), np.uint64(peak)


@extending.register_jitable
def _find_again(form, address, indices, values, bits):  # type: ignore[no-untyped-def]
    """Find the `k` and the `aim` largest of all values, by their leading digits.

    Returns how many entries are in the scratch memory; how many values are not zero; and the
    leading digit of number `aim`, how many are above it, and how many have it.
    """
    word = bits.dtype.type
    mask, shift = word(form.mask), word(form.shift)
    vector, its_bits = vector_at(address, form.numel, values), vector_at(address, form.numel, bits)
    both = np.zeros((2, 1 << LEADING_BITS), np.int64)
    _histogram(its_bits, 0, form.numel, mask, word(0), shift, word(LEADING_BITS), both)
    counts, zeros = both[0] + both[1], np.int64(0)
    for j in range(uintp(form.numel)):
        zeros += (its_bits[j] & mask) == word(0)
    counts[0] -= zeros
    start, _ = _from_top(counts, max(form.k, form.aim))
    limit = word(1) if start <= 0 else word(word(start) << shift)
    room = _select(vector, its_bits, 0, form.numel, limit, mask, indices, values)
    digit, above = _from_top(counts, form.aim)
    return np.int64(room), form.numel - zeros, max(digit, 0), above, counts[max(digit, 0)]


@extending.register_jitable
def _bits_of_count(count, bits, values):  # type: ignore[no-untyped-def]
    """The bits of a count as a float of the residual's type."""
    number = np.empty(1, values.dtype)
    number[0] = max(np.int64(count), 1)
    return np.int64(number.view(bits.dtype)[0])


@extending.register_jitable
def _split(  # type: ignore[no-untyped-def]
    form, before, kept, flags, point, rows, sent, counts, send, indices, values, bits
):
    """Write the message of each region; returns how many entries they have together."""
    word, most, total = bits.dtype.type, form.most, 0
    room = form.k + 1
    exact, rounded = values[room : room + most], np.empty(most, np.float32)
    stop = 0
    for owner in range(form.size):
        start, low, row = stop, before[REGIONS + owner], rows[owner]
        stop = kept
        if owner < form.size - 1:
            stop = start + np.searchsorted(indices[start:kept], before[REGIONS + owner + 1])
        count = stop - start
        if count > most:
            _keep_largest(
                indices[start:stop], values[start:stop], bits[start:stop], word(form.mask),
                word(form.shift), most, 0, indices[room : room + most + 1],
                values[room : room + most + 1],
            )  # fmt: skip
            count = most
            _copy(indices[room : room + most], row)
        else:
            _copy(indices[start:stop], row)
            _copy(values[start:stop], exact)
            row[count:] = 0
        _repeat_last(exact, count)
        counts[owner] = count
        total += count
        if owner == form.rank:
            _copy(exact, sent[owner])
        else:
            message = send[owner][: form.room]
            write_message(form, message, row, exact, count, low, flags, point, rounded, sent[owner])
    return total


@extending.register_jitable
def _copy(source, target):  # type: ignore[no-untyped-def]
    """To the start of `target`. An assignment to a slice would take numba seconds to compile."""
    for j in range(uintp(source.size)):
        target[j] = source[j]


@extending.register_jitable
def _repeat_last(values, count):  # type: ignore[no-untyped-def]
    last = values[count - 1] if count else values.dtype.type(0)
    for j in range(uintp(count), uintp(values.size)):
        values[j] = last


def combine(  # type: ignore[no-untyped-def]
    form, before, after, rows, sent, counts, received, reply, mine, errors, indices, values, bits
):
    _check(form, before)
    low, high = before[REGIONS + form.rank], before[REGIONS + form.rank + 1]
    points, most = REGIONS + form.size + 1, form.most
    rounded, ends = np.empty(most, np.float32), np.empty(form.size, np.int64)
    damaged, finite, end = 0, after[ALL_FINITE], 0
    for source in range(form.size):
        i, v = indices[end : end + most], values[end : end + most]
        if source == form.rank:
            count = counts[source]
            _copy(rows[source][:count], i)
            _copy(sent[source][:count], v)
        else:
            message = received[source][: form.room]
            count, flags, right = read_message(form, message, low, high, rounded, i, v)
            if right:
                finite &= flags & FINITE
            elif damaged == 0:
                damaged = 1 + source
            head, words = message.view(np.int64), message.view(np.uint64)
            sealed = right or checksum(words) == words[CHECKSUM]
            after[points + source] = head[POINT] if sealed else after[points + form.rank]
        end += count
        ends[source] = end
    front = form.size * most
    i, v, b = indices[front:], values[front:], bits[front:]
    threshold = 1 if form.everything else max(before[TOTAL], 1)
    found, all_finite = _sum(form, indices, values, ends, low, high, threshold, i, v, b)
    after[ALL_FINITE] = finite & all_finite
    after[DAMAGED] = damaged + form.size * form.rank if damaged else 0
    wrong, limit = found < form.fewest and threshold > 1, most
    if wrong:
        limit = min(form.share, most)
        found, _ = _sum(form, indices, values, ends, low, high, 1, i, v, b)
    if found > limit:
        word, trimmed = bits.dtype.type, 2 * front + 1
        kept_i = indices[trimmed : trimmed + limit + 1]
        kept_v = values[trimmed : trimmed + most + 1]
        _keep_largest(
            i[:found], v[:found], b[:found], word(form.mask), word(form.shift), limit, 0,
            kept_i, kept_v[: limit + 1],
        )  # fmt: skip
        i, v, found = kept_i, kept_v, limit
    counts[form.size] = found
    _copy(i[:found], mine)
    mine[found:] = low
    exact = v[:most]
    _repeat_last(exact, found)
    flags = after[ALL_FINITE] * FINITE | wrong * WRONG | damaged << DAMAGED_SHIFT
    point = after[points + form.rank]
    message = reply[: form.room]
    write_message(form, message, mine, exact, found, low, flags, point, rounded, errors)
    for j in range(uintp(most)):
        errors[j] -= exact[j]


@extending.register_jitable
def _sum(form, indices, values, ends, low, high, threshold, out_indices, out_values, out_bits):  # type: ignore[no-untyped-def]
    """The sums that reach a threshold: how many there are, and whether all sums are finite."""
    word, mask = out_bits.dtype.type, out_bits.dtype.type(form.mask)
    limit = word(min(threshold, form.infinity))
    found = _sum_select(
        indices, values, ends, low, 0, high - low, limit, mask, out_bits, out_indices, out_values
    )
    peak, count = word(0), uintp(0)
    for j in range(found):
        magnitude = word(out_bits[j] & mask)
        peak = max(peak, magnitude)
        if threshold > form.infinity:
            out_indices[count], out_values[count] = out_indices[j], out_values[j]
            count += uintp(np.int64(magnitude) >= threshold)
    if threshold > form.infinity:
        found = count
    return np.int64(found), np.int64(np.int64(peak) < form.infinity)


def apply(  # type: ignore[no-untyped-def]
    form, before, after, at, stops, kind, scale, write, rows, sent, counts, gathered, mine, errors,
    indices, values, bits,
):  # fmt: skip
    """Returns how many averages there are in the scratch memory, for `write_parts`; -1: none."""
    _check(form, before)
    word, front = bits.dtype.type, form.size * form.most + 1
    total, wrong = _read_replies(form, before, after, gathered, indices, values)
    zeros, smallest = 0, form.infinity
    for j in range(uintp(total)):
        magnitude = np.int64(bits[j] & word(form.mask))
        zeros += magnitude == 0
        smallest = min(smallest, magnitude) if magnitude else smallest
    found, carried = total - zeros, before[TOTAL]
    threshold = 1 if form.everything else max(carried, 1)
    if wrong:
        threshold, carried = smallest if smallest < form.infinity else 1, form.infinity
    i, v = indices[front : front + form.k + 1], values[front : front + form.k + 1]
    kept, limit, digit, above, inside = _keep_largest(
        indices[:total], values[:total], bits[:total], word(form.mask), word(form.shift),
        form.k, form.wanted, i, v,
    )  # fmt: skip
    if found >= form.wanted:
        # Zeros have the digit of the smallest numbers, and do not count.
        inside -= zeros if digit == 0 else 0
        right = _spread_evenly(digit, np.int64(above), inside, form.wanted, form.shift)
    else:
        right = _lowered(threshold, _bits_of_count(found, bits, values), form.wanted_bits)
    after[TOTAL], after[TOTAL_TREND] = _forecast(
        right, carried, before[TOTAL_TREND], form.octave, form.infinity
    )
    after[TOTAL_LIMIT] = np.int64(limit) if found > form.k else threshold
    count = np.int64(kept)
    after[APPLIED] = count
    _next_regions(form, before, after, stops, i[:count])
    _clear(form, before, at, rows, sent, counts, mine, errors, i[:count], indices, values)
    _average(form, at, kind, scale, i[:count], v[:count], _halves(form, bits)[:count])
    if after[DAMAGED] or not after[ALL_FINITE]:
        return -1
    if write:
        write_parts(form, at, stops, kind, 0, form.numel, count, indices, values, bits)
    return count


@extending.register_jitable
def _read_replies(form, before, after, gathered, indices, values):  # type: ignore[no-untyped-def]
    """Read the entries of all owners, one row behind the other.

    Returns how many there are, and whether the threshold was wrong for any owner.
    """
    rounded, most, size = np.empty(form.most, np.float32), form.most, form.size
    damaged, finite, wrong, end = after[DAMAGED], after[ALL_FINITE], False, 0
    for owner in range(size):
        low, high = before[REGIONS + owner], before[REGIONS + owner + 1]
        message = gathered[owner][: form.room]
        i, v = indices[end : end + most], values[end : end + most]
        count, flags, right = read_message(form, message, low, high, rounded, i, v)
        told = 1 + owner + size * form.rank
        if right:
            told = flags >> DAMAGED_SHIFT
            told = told + size * owner if 0 < told <= size else 0
            finite &= flags & FINITE
            wrong |= (flags & WRONG) != 0
        damaged = damaged if damaged > 0 else told
        end += count
    after[DAMAGED], after[ALL_FINITE] = damaged, finite
    return end, wrong


@extending.register_jitable
def _next_regions(form, before, after, stops, applied):  # type: ignore[no-untyped-def]
    """The boundaries for the next step, and the number of applied entries in each part."""
    for owner in range(form.size + 1):
        boundary = before[REGIONS + owner]
        if 0 < owner < form.size and applied.size and not form.everything:
            boundary = np.int64(applied[owner * applied.size // form.size])
        after[REGIONS + owner] = boundary
    start = 0
    for part in range(stops.size):
        stop = np.searchsorted(applied, stops[part])
        after[REGIONS + 1 + 2 * form.size + part] = stop - start
        start = stop


@extending.register_jitable
def _clear(form, before, at, rows, sent, counts, mine, errors, applied, indices, values):  # type: ignore[no-untyped-def]
    """Take the applied entries out of the residual. The scratch memory of replies is free."""
    vector = vector_at(at[VALUES], form.numel, values)
    velocity = vector_at(at[VELOCITY_AFTER], form.numel, values)
    start = 0
    for owner in range(form.size):
        stop = start + np.searchsorted(applied[start:], before[REGIONS + owner + 1])
        count, here = counts[owner], applied[start:stop]
        row = rows[owner][:count]
        _take_common(vector, row, sent[owner][:count], here)
        if at[VELOCITY_AFTER]:
            speeds = values[:count]
            for j in range(uintp(count)):
                speeds[j] = velocity[uintp(row[j])]
            _take_common(velocity, row, speeds, here)
        start = stop
    count = counts[form.size]
    _take_common(vector, mine[:count], errors[:count], applied)


@extending.register_jitable
def _halves(form, bits):  # type: ignore[no-untyped-def]
    """The scratch memory of averages of 16 bits, where replies were."""
    return bits[: form.size * form.most].view(np.uint16)


@extending.register_jitable
def _average(form, at, kind, scale, indices, sums, halves):  # type: ignore[no-untyped-def]
    """Averages instead of sums; those of 16 bits to `halves`. This rank keeps its share of the
    errors."""
    number = sums.dtype.type
    count, size, scaled = indices.size, number(form.size), number(scale)
    if kind == AS_RESIDUAL:
        for j in range(uintp(count)):
            average = sums[j] / size
            sums[j] = average * scaled if scale != 1.0 else average
        return
    vector = vector_at(at[VALUES], form.numel, sums)
    back, largest = number(form.size / scale), number(_LARGEST_FLOAT16)
    if kind == AS_BFLOAT16:
        largest = number(LARGEST_BFLOAT16)
    first, last = count * form.rank // form.size, count * (form.rank + 1) // form.size
    for j in range(count):
        average = number(sums[j] / size)
        average = number(average * scaled) if scale != 1.0 else average
        short = np.float32(clamped(average, largest))
        if kind == AS_BFLOAT16:
            halves[j] = to_bfloat16(short)
            read = of_bfloat16(halves[j])
        else:
            halves[j] = to_float16(short)
            read = of_float16(halves[j])
        if first <= j < last:
            vector[uintp(indices[j])] += sums[j] - number(number(read) * back)


@extending.register_jitable
def write_parts(form, at, stops, kind, low, high, count, indices, values, bits):  # type: ignore[no-untyped-def]
    """Write averages and zeros to elements `low` to `high` of the parts."""
    front = form.size * form.most + 1
    i, v, halves = indices[front : front + count], values[front:], _halves(form, bits)
    start = 0
    for part in range(stops.size):
        stop, address = stops[part], at[PARTS + part]
        first, last = max(low, start), min(high, stop)
        if first < last:
            size, inside = stop - start, slice(first - start, last - start)
            itemsize = form.itemsize if kind == AS_RESIDUAL else 2
            aligned = head_of(address, size, first - start, itemsize)
            if kind == AS_RESIDUAL:
                _scatter(vector_at(address, size, v)[inside], first, i, v, aligned)
            else:
                _scatter(vector_at(address, size, halves)[inside], first, i, halves, aligned)
        start = stop
