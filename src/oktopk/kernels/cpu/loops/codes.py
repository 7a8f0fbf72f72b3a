"""Loops that write and read messages."""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ...layout import (
    BITMAP,
    CHECKSUM,
    CONSECUTIVE,
    COUNT_SHIFT,
    GAPS8,
    GAPS16,
    HEAD_WORDS,
)
from ...layout import padded as _plain_padded
from ...numbers import LARGEST, MIX, MOST_SHIFT, QUANTUM

_padded = extending.register_jitable(_plain_padded)


@extending.register_jitable
def count_gaps(indices, low):  # type: ignore[no-untyped-def]
    before, short, long = np.int64(low - 1), np.int64(0), np.int64(0)
    for j in range(indices.size):
        gap = np.int64(indices[j]) - before - 1
        if gap >= 255:  # divisions are slow, and most gaps are short
            short += gap // 255
            long += gap // 65535
        before = np.int64(indices[j])
    return short + indices.size, long + indices.size


@extending.register_jitable
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


@extending.register_jitable
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


@extending.register_jitable
def pack_bits(indices, low, out):  # type: ignore[no-untyped-def]
    out[:] = 0
    for j in range(indices.size):
        place = uintp(indices[j] - low)
        out[place >> uintp(3)] |= np.uint8(1 << (place & uintp(7)))


@extending.register_jitable
def unpack_bits(bits, low, high, out):  # type: ignore[no-untyped-def]
    beyond = low + 8 * bits.size - high
    if beyond >= 8 or (beyond > 0 and bits[-1] >> (8 - beyond)):
        return uintp(0)
    count = uintp(0)
    for j in range(bits.size):
        if count + uintp(8) > uintp(out.size):
            return uintp(0)
        for q in range(8):
            out[count] = low + 8 * j + q
            count += uintp((bits[j] >> q) & 1)
    return count


@extending.register_jitable
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


@extending.register_jitable
def dequantise(codes, scales, bits):  # type: ignore[no-untyped-def]
    for block in range(scales.size):
        start = uintp(block * QUANTUM)
        stop = min(uintp(bits.size), start + uintp(QUANTUM))
        low = np.uint32(scales[block] & np.uint32(0x7FFFFF00))
        shift = min(np.uint32(scales[block] & np.uint32(0xFF)), np.uint32(MOST_SHIFT))
        for j in range(start, stop):
            code = np.uint32(codes[j])
            value = np.uint32(low + np.uint32((code & np.uint32(127)) << shift))
            value = min(value, np.uint32(LARGEST))
            bits[j] = np.uint32(value | ((code & np.uint32(0x80)) << np.uint32(24)))


@extending.register_jitable
def checksum(words):  # type: ignore[no-untyped-def]
    total, half, size = np.uint64(0), np.uint64(32), words.size
    for low, high in ((0, min(3, size)), (min(4, size), size)):
        for j in range(uintp(low), uintp(high)):
            word = words[j] ^ (np.uint64(j) * np.uint64(MIX[0]))
            word = (word ^ (word >> half)) * np.uint64(MIX[1])
            word = (word ^ (word >> half)) * np.uint64(MIX[2])
            total += word ^ (word >> half)
    return total


def pack(indices, values, ends, own, sizes, added, what, raw, words, sent):  # type: ignore[no-untyped-def]
    """`raw` and `words` are the same memory."""
    start = place = most = 0
    for part in range(ends.size):
        most = max(most, ends[part] - start)
        start = ends[part]
    rounded = np.empty(most, np.float32)
    bits = rounded.view(np.uint32)
    start = 0
    for part in range(ends.size):
        stop = ends[part]
        count = stop - start
        if part == own:
            sent[start:stop] = values[start:stop]
            start = stop
            continue
        i = indices[start:stop]
        first = np.int64(i[0]) if count else 0
        code, room = _shortest(i, first)
        scales, positions, end = _places(count, added.size, room)
        message = raw[place : place + sizes[part]]
        if end > message.size:
            return part
        head = words[place // 8 : (place + end) // 8]
        head[0], head[1], head[2] = what | code, count << COUNT_SHIFT | added.size, room
        head[4] = first
        head[HEAD_WORDS : HEAD_WORDS + added.size] = added
        codes = 8 * (HEAD_WORDS + added.size)
        message[codes + count : scales] = 0
        blocks = scales + 4 * -(-count // QUANTUM)
        message[blocks:positions] = 0
        message[positions + room :] = 0
        rounded[:count] = values[start:stop]
        scale = message[scales:blocks].view(np.uint32)
        quantise(bits[:count], message[codes : codes + count], scale)
        dequantise(message[codes : codes + count], scale, bits[:count])
        sent[start:stop] = rounded[:count]
        coded = message[positions : positions + room]
        if code == GAPS8:
            pack_gaps(i, first, coded)
        elif code == GAPS16:
            pack_gaps(i, first, coded.view(np.uint16))
        elif code == BITMAP:
            pack_bits(i, first, coded)
        head[CHECKSUM] = checksum(head)
        start = stop
        place += sizes[part]
    return -1


@extending.register_jitable
def _shortest(indices, first):  # type: ignore[no-untyped-def]
    """The code of positions that takes the fewest bytes, and how many."""
    count = indices.size
    span = np.int64(indices[-1]) - first + 1 if count else 0
    if span == count:
        return CONSECUTIVE, 0
    short, long = count_gaps(indices, first)
    code, room = GAPS8, short
    if 2 * long < room:
        code, room = GAPS16, 2 * long
    if -(-span // 8) < room:
        code, room = BITMAP, -(-span // 8)
    return code, room


@extending.register_jitable
def _places(count, added, room):  # type: ignore[no-untyped-def]
    """Where in a message the scales and the positions begin, and where it ends."""
    scales = 8 * (HEAD_WORDS + added) + _padded(count)
    positions = scales + _padded(4 * -(-count // QUANTUM))
    return scales, positions, positions + _padded(room)


def unpack(raw, words, sizes, lows, highs, rank, added, what, indices, values, ends, notes):  # type: ignore[no-untyped-def]
    """`ends` holds the number of this rank's own entries first; the caller fills them in."""
    most = uintp(0)
    for source in range(sizes.size):
        most = max(most, uintp(sizes[source]))
    rounded = np.empty(most, np.float32)
    bits = rounded.view(np.uint32)
    place, start, ours = 0, 0, ends[rank]
    for source in range(sizes.size):
        if source == rank:
            start += ours
            ends[source] = start
            continue
        size, low, high = sizes[source], lows[source], highs[source]
        message = raw[place : place + size]
        if size < 8 * (HEAD_WORDS + added):
            return source
        head = words[place // 8 : (place + size) // 8]
        code = np.int64(head[0] & np.uint64(0xFF))
        counts, room, first = np.int64(head[1]), np.int64(head[2]), np.int64(head[4])
        count = counts >> COUNT_SHIFT
        if np.int64(head[0]) - code != what or counts & ((1 << COUNT_SHIFT) - 1) != added:
            return source
        if not (0 <= count <= min(size, high - low) and 0 <= room <= size):
            return source
        scales, positions, end = _places(count, added, room)
        if end > size or checksum(head[: end // 8]) != head[CHECKSUM]:
            return source
        coded, found = message[positions : positions + room], uintp(0)
        i = indices[start:]
        if count == 0:
            if code != CONSECUTIVE or room:
                return source
        elif not low <= first < high:
            return source
        elif code == CONSECUTIVE and room == 0 and first + count <= high:
            for j in range(count):
                i[j] = first + j
            found = uintp(count)
        elif code == GAPS8:
            found = unpack_gaps(coded, first, high, i)
        elif code == GAPS16 and room % 2 == 0:
            found = unpack_gaps(coded.view(np.uint16), first, high, i)
        elif code == BITMAP:
            found = unpack_bits(coded, first, high, i[: count + 8])
        if found != uintp(count):
            return source
        codes = 8 * (HEAD_WORDS + added)
        scale = message[scales : scales + 4 * -(-count // QUANTUM)].view(np.uint32)
        dequantise(message[codes : codes + count], scale, bits[:count])
        values[start : start + count] = rounded[:count]
        for j in range(added):
            notes[source, j] = np.int64(head[HEAD_WORDS + j])
        start += count
        ends[source] = start
        place += size
    return -1
