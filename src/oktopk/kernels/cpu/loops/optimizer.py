"""Loops of oktopk.AdamW."""

from __future__ import annotations

import numpy as np
from numba import uintp

from ..vectors import LANES, lowest_bit, reaching

_BLOCK = LANES


def step_square(g, bits, v, low, high, mask, grown, least, most, scale):  # type: ignore[no-untyped-def]
    """A sum of integers: it is the same in any order."""
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
