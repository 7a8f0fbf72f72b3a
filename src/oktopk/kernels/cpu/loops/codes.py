"""Loops that write and read messages."""

from __future__ import annotations

import numpy as np
from numba import uintp

from ...numbers import LARGEST, MIX, MOST_SHIFT, QUANTUM


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
            value = min(value, np.uint32(LARGEST))
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
