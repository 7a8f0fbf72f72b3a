"""Loops that write and read messages."""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ...layout import low_bytes as _plain_low_bytes
from ...numbers import LARGEST, MIX, OCTAVE_BITS, QUANTUM
from ..vectors import lowest_bit

_low_bytes = extending.register_jitable(_plain_low_bytes)


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
def pack_elias_fano(indices, low, bits, out):  # type: ignore[no-untyped-def]
    count, shift = indices.size, np.uint64(bits)
    at = out.size - _low_bytes(count, bits)
    words = out[:at].view(np.uint64)
    words[:] = 0
    word, place = np.uint64(0), uintp(0)
    for j in range(count):
        bit = (np.uint64(np.int64(indices[j]) - low) >> shift) + np.uint64(j)
        if bit >> np.uint64(6) != place:
            words[place] = word
            word, place = np.uint64(0), uintp(bit >> np.uint64(6))
        word |= np.uint64(1) << (bit & np.uint64(63))
    if count:
        words[place] = word
    done = 0
    while bits - done >= 8:
        lows = out[at : at + count]
        for j in range(count):
            lows[j] = np.uint8((np.int64(indices[j]) - low) >> done)
        at += count
        done += 8
    if bits > done:
        lows = out[at:]
        for j in range(count // 2):
            first = (np.int64(indices[2 * j]) - low) >> done
            second = (np.int64(indices[2 * j + 1]) - low) >> done
            lows[j] = np.uint8((first & 15) | (second & 15) << 4)
        if count % 2:
            lows[count // 2] = np.uint8(((np.int64(indices[count - 1]) - low) >> done) & 15)


@extending.register_jitable
def unpack_elias_fano(coded, bits, low, high, out):  # type: ignore[no-untyped-def]
    """`out` has a place for each entry. Nothing is written behind it."""
    count, shift = out.size, np.uint64(bits)
    at = coded.size - _low_bytes(count, bits)
    if count < 1 or at <= 0 or at % 8 != 0:
        return uintp(0)
    words = coded[:at].view(np.uint64)
    out[:] = 0
    done = 0
    while bits - done >= 8:
        lows = coded[at : at + count]
        for j in range(count):
            out[j] |= np.int64(lows[j]) << done
        at += count
        done += 8
    if bits > done:
        lows = coded[at:]
        for j in range(count // 2):
            out[2 * j] |= np.int64(lows[j] & 15) << done
            out[2 * j + 1] |= np.int64(lows[j] >> 4) << done
        if count % 2:
            out[count - 1] |= np.int64(lows[count // 2] & 15) << done
    found, last, rising = uintp(0), np.int64(-1), True
    for place in range(words.size):
        word, base = words[place], np.uint64(64 * place)
        while word:
            if found == uintp(count):
                return uintp(0)
            part = base + lowest_bit(word) - np.uint64(found)
            offset = np.int64(part << shift) | np.int64(out[found])
            rising &= offset > last
            out[found] = low + offset
            last = offset
            word &= word - np.uint64(1)
            found += uintp(1)
    return found if rising and last < high - low else uintp(0)


@extending.register_jitable
def quantise(bits, width, codes, scales):  # type: ignore[no-untyped-def]
    magnitude, most = np.uint32(0x7FFFFFFF), np.uint32((1 << (width - 1)) - 1)
    row, to_sign = np.empty(QUANTUM, np.uint8), np.uint32(32 - width)
    for block in range(scales.size):
        start = uintp(block * QUANTUM)
        stop = min(uintp(bits.size), start + uintp(QUANTUM))
        low, high = magnitude, np.uint32(0)
        for j in range(start, stop):
            low = min(low, np.uint32(bits[j] & magnitude))
            high = max(high, np.uint32(bits[j] & magnitude))
        low = np.uint32(low & np.uint32(0xFFFFFF00))
        shift = np.uint32(0)
        while (np.uint32(high - low) >> shift) > most:
            shift += np.uint32(1)
        half = np.uint32((np.uint32(1) << min(shift, np.uint32(OCTAVE_BITS))) >> np.uint32(1))
        for j in range(start, stop):
            code = np.uint32(np.uint32((bits[j] & magnitude) - low) + half) >> shift
            code = min(most, np.uint32(code))
            sign = np.uint32((bits[j] >> to_sign) & np.uint32(most + np.uint32(1)))
            row[j - start] = np.uint8(code | sign)
        _write_row(row, width, start, stop, codes)
        scales[block] = np.uint32(low | shift)


@extending.register_jitable
def _write_row(row, width, start, stop, codes):  # type: ignore[no-untyped-def]
    """The codes of a block: one in each byte, or two."""
    size = stop - start
    if width == 8:
        for j in range(size):
            codes[start + j] = row[j]
        return
    if size % uintp(2):
        row[size] = 0
    pairs = codes[start // uintp(2) : (stop + uintp(1)) // uintp(2)]
    for j in range(pairs.size):
        pairs[j] = np.uint8(row[2 * j] | (row[2 * j + 1] << 4))


@extending.register_jitable
def dequantise(codes, scales, width, bits):  # type: ignore[no-untyped-def]
    most, row = np.uint32((1 << (width - 1)) - 1), np.empty(QUANTUM, np.uint8)
    to_sign, widest = np.uint32(32 - width), np.uint32(32 - width)
    for block in range(scales.size):
        start = uintp(block * QUANTUM)
        stop = min(uintp(bits.size), start + uintp(QUANTUM))
        low = np.uint32(scales[block] & np.uint32(0x7FFFFF00))
        shift = min(np.uint32(scales[block] & np.uint32(0xFF)), widest)
        _read_row(codes, width, start, stop, row)
        for j in range(start, stop):
            code = np.uint32(row[j - start])
            value = np.uint32(low + np.uint32((code & most) << shift))
            value = min(value, np.uint32(LARGEST))
            bits[j] = np.uint32(value | ((code & np.uint32(most + np.uint32(1))) << to_sign))


@extending.register_jitable
def _read_row(codes, width, start, stop, row):  # type: ignore[no-untyped-def]
    if width == 8:
        for j in range(stop - start):
            row[j] = codes[start + j]
        return
    pairs = codes[start // uintp(2) : (stop + uintp(1)) // uintp(2)]
    for j in range(pairs.size):
        row[2 * j] = np.uint8(pairs[j] & 15)
        row[2 * j + 1] = np.uint8(pairs[j] >> 4)


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
