"""Loops that write and read the messages of a fixed-size step; `plan.py` says how they lie."""

from __future__ import annotations

import numpy as np
from numba import extending, uintp

from ...layout import BITMAP, PLAIN
from ...layout import padded as _plain_padded
from ...numbers import QUANTUM
from ...plan import CHECKSUM, COUNT, FINITE, FLAGS, POINT, WHAT
from ..form import BFLOAT16, FLOAT16, FLOAT32, INT8, PLAIN_VALUES
from ..vectors import float_of, lowest_bit, of_bfloat16, of_float16, to_bfloat16, to_float16
from .codes import checksum, dequantise, pack_bits, quantise

_padded = extending.register_jitable(_plain_padded)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_BFLOAT16 = float.fromhex("0x1.fep127")
_LARGEST_SCALED = np.float32(32752.0)
"""Of a float16 with a scale; see `Float16` in wire/codecs.py."""


@extending.register_jitable
def clamped(value, most):  # type: ignore[no-untyped-def]
    """NaN stays NaN."""
    value = most if value > most else value
    return -most if value < -most else value


@extending.register_jitable
def write_message(form, message, indices, values, count, low, flags, point, rounded, sent):  # type: ignore[no-untyped-def]
    """`sent` gets the values that readers will get.

    `values` has `most` values: behind the last entry its value again. `rounded` is room for as
    many float32.
    """
    message[:] = 0
    _write_values(form, message[form.values_at : form.positions_at], values, rounded, sent)
    _write_positions(form, message[form.positions_at :], indices, count, low)
    head, words = message.view(np.int64), message.view(np.uint64)
    head[WHAT], head[COUNT], head[FLAGS], head[POINT] = form.what, count, flags, point
    words[CHECKSUM] = checksum(words)


@extending.register_jitable
def read_message(form, message, low, high, rounded, indices, values):  # type: ignore[no-untyped-def]
    """Returns the number of entries, the flags, and whether the message is right.

    `indices` and `values` have room for `most` entries. Nothing is written behind it.
    """
    head, words = message.view(np.int64), message.view(np.uint64)
    count, flags = head[COUNT], head[FLAGS]
    if head[WHAT] != form.what or not 0 <= count <= form.most:
        return 0, flags, False
    if checksum(words) != words[CHECKSUM]:
        return 0, flags, False
    room = message[form.values_at : form.positions_at]
    _read_values(form, room, rounded[:count], values[:count])
    if form.wire < INT8 and flags & FINITE:
        fine = True
        for j in range(uintp(count)):
            fine &= np.isfinite(values[j])
        if not fine:
            return 0, flags, False
    room = message[form.positions_at :]
    if not _read_positions(form, room, low, high, indices[:count]):
        return 0, flags, False
    return count, flags, True


@extending.register_jitable
def _write_values(form, room, values, rounded, sent):  # type: ignore[no-untyped-def]
    number, wire = values.dtype.type, form.wire
    most = uintp(form.most)
    if wire == PLAIN_VALUES or (wire == FLOAT32 and form.itemsize == 4):
        written = room[: form.most * form.itemsize].view(values.dtype)
        for j in range(most):
            written[j] = sent[j] = values[j]
    elif wire == FLOAT32:
        short = room[: 4 * form.most].view(np.float32)
        for j in range(most):
            short[j] = np.float32(clamped(values[j], number(LARGEST_FLOAT32)))
            sent[j] = short[j]
    elif wire == BFLOAT16:
        halves = room[: 2 * form.most].view(np.uint16)
        for j in range(most):
            half = to_bfloat16(np.float32(clamped(values[j], number(LARGEST_BFLOAT16))))
            halves[j] = half
            sent[j] = of_bfloat16(half)
    else:
        for j in range(most):
            rounded[j] = np.float32(values[j])
        if wire == FLOAT16:
            _write_float16(form, room, rounded)
        else:
            codes, scales = _codes_and_scales(form, room, form.most)
            bits = rounded[: form.most].view(np.uint32)
            quantise(bits, _width(form), codes, scales)
            dequantise(codes, scales, _width(form), bits)
        for j in range(most):
            sent[j] = rounded[j]


@extending.register_jitable
def _write_float16(form, room, rounded):  # type: ignore[no-untyped-def]
    """With the power taken out, the largest value of a block is between 2**14 and 2**15."""
    halves, scales = room[: 2 * form.most].view(np.uint16), room[_padded(2 * form.most) :]
    bits = rounded.view(np.uint32)
    for start in range(0, form.most, QUANTUM):
        stop = uintp(min(start + QUANTUM, form.most))
        largest = np.uint32(0)
        for j in range(uintp(start), stop):
            largest = max(largest, np.uint32(bits[j] & np.uint32(0x7FFFFFFF)))
        exponent = min(max(np.int64(largest >> np.uint32(23)) - 14, 1), 240)
        up = float_of(np.uint32((254 - exponent) << 23))
        down = float_of(np.uint32(exponent << 23))
        for j in range(uintp(start), stop):
            half = to_float16(clamped(np.float32(rounded[j] * up), _LARGEST_SCALED))
            halves[j] = half
            rounded[j] = of_float16(half) * down
        scales[start // QUANTUM] = np.uint8(exponent)


@extending.register_jitable
def _read_values(form, room, rounded, values):  # type: ignore[no-untyped-def]
    """As many as `values` has room for."""
    wire, count = form.wire, uintp(values.size)
    if wire == PLAIN_VALUES or (wire == FLOAT32 and form.itemsize == 4):
        written = room[: values.size * form.itemsize].view(values.dtype)
        for j in range(count):
            values[j] = written[j]
    elif wire == FLOAT32:
        short = room[: 4 * values.size].view(np.float32)
        for j in range(count):
            values[j] = short[j]
    elif wire == BFLOAT16:
        halves = room[: 2 * values.size].view(np.uint16)
        for j in range(count):
            values[j] = of_bfloat16(halves[j])
    elif wire == FLOAT16:
        halves, powers = room[: 2 * values.size].view(np.uint16), room[_padded(2 * form.most) :]
        for start in range(0, values.size, QUANTUM):
            power = float_of(np.uint32(np.uint32(powers[start // QUANTUM]) << np.uint32(23)))
            for j in range(uintp(start), uintp(min(start + QUANTUM, values.size))):
                values[j] = np.float32(of_float16(halves[j]) * power)
    else:
        codes, scales = _codes_and_scales(form, room, values.size)
        dequantise(codes, scales, _width(form), rounded.view(np.uint32))
        for j in range(count):
            values[j] = rounded[j]


@extending.register_jitable
def _width(form):  # type: ignore[no-untyped-def]
    """Bits of a code."""
    return 8 if form.wire == INT8 else 4


@extending.register_jitable
def _codes_and_scales(form, room, count):  # type: ignore[no-untyped-def]
    """Those of the first `count` values."""
    width = _width(form)
    scales = _padded(-(-form.most * width // 8))
    blocks = -(-count // QUANTUM)
    return room[: -(-count * width // 8)], room[scales : scales + 4 * blocks].view(np.uint32)


@extending.register_jitable
def _write_positions(form, room, indices, count, low):  # type: ignore[no-untyped-def]
    """`room` has zeros."""
    if form.code == PLAIN:
        places = room[: form.most * indices.itemsize].view(indices.dtype)
        for j in range(uintp(count)):
            places[j] = indices[j] - low
    elif form.code == BITMAP:
        pack_bits(indices[:count], low, room)
    else:
        _write_elias_fano(form, room, indices[:count], low)


@extending.register_jitable
def _write_elias_fano(form, room, indices, low):  # type: ignore[no-untyped-def]
    words, shift = room[: form.bitmap].view(np.uint64), np.uint64(form.low_bits)
    count, at = uintp(indices.size), form.bitmap
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
    while form.low_bits - done >= 8:
        lows = room[at : at + form.most]
        for j in range(count):
            lows[j] = np.uint8((np.int64(indices[j]) - low) >> done)
        at += form.most
        done += 8
    if form.low_bits > done:
        lows = room[at:]
        for j in range(count):
            nibble = ((np.int64(indices[j]) - low) >> done) & 15
            lows[j >> uintp(1)] |= np.uint8(nibble << ((np.int64(j) & 1) * 4))


@extending.register_jitable
def _read_positions(form, room, low, high, indices):  # type: ignore[no-untyped-def]
    """Whether `room` has as many positions as `indices`, in order and below `high`."""
    count = uintp(indices.size)
    if form.code == PLAIN:
        places = room[: indices.size * indices.itemsize].view(indices.dtype)
        last, right = np.int64(-1), True
        for j in range(count):
            offset = np.int64(places[j])
            right &= offset > last
            indices[j] = low + offset
            last = offset
        return right and last < high - low
    words, found = room[: form.bitmap].view(np.uint64), uintp(0)
    if form.code == BITMAP:
        last = np.int64(-1)
        for place in range(uintp(words.size)):
            word, base = words[place], np.int64(64 * place)
            while word:
                if found == count:
                    return False
                last = base + np.int64(lowest_bit(word))
                indices[found] = low + last
                word &= word - np.uint64(1)
                found += uintp(1)
        return found == count and last < high - low
    _read_low_bits(form, room, indices)
    shift = np.uint64(form.low_bits)
    last, right = np.int64(-1), True
    for place in range(uintp(words.size)):
        word, base = words[place], np.uint64(64 * place)
        while word:
            if found == count:
                return False
            part = base + lowest_bit(word) - np.uint64(found)
            offset = np.int64(part << shift) | np.int64(indices[found])
            right &= offset > last
            indices[found] = low + offset
            last = offset
            word &= word - np.uint64(1)
            found += uintp(1)
    return found == count and right and last < high - low


@extending.register_jitable
def _read_low_bits(form, room, indices):  # type: ignore[no-untyped-def]
    count, at, done = uintp(indices.size), form.bitmap, 0
    for j in range(count):
        indices[j] = 0
    while form.low_bits - done >= 8:
        lows = room[at : at + form.most]
        for j in range(count):
            indices[j] |= np.int64(lows[j]) << done
        at += form.most
        done += 8
    if form.low_bits > done:
        lows = room[at:]
        for j in range(count):
            nibble = (np.int64(lows[j >> uintp(1)]) >> ((np.int64(j) & 1) * 4)) & 15
            indices[j] |= nibble << done
