"""Numbers that kernels know by name. Triton takes only such constants from a module."""

from __future__ import annotations

import torch
from triton import language as tl

from ... import control, layout, numbers, plan

# The state of a selection, for each row.
START, LENGTH, BASE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Where the row's values begin, how many there are, and the index of the first."""
THRESHOLD = tl.constexpr(3)
"""Candidates reach this magnitude. It is positive."""
RANK = tl.constexpr(4)
"""First how many to keep; then how many of those whose first digits are PREFIX; at last how many
of those that equal PREFIX. 0 if all candidates are kept."""
PREFIX = tl.constexpr(5)
"""The digits found so far of the magnitude that has this rank. 0 if all candidates are kept."""
FOUND, KEPT = tl.constexpr(6), tl.constexpr(7)
"""Candidates, and how many are kept."""
DIGIT, ABOVE, INSIDE = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
"""Of the rank that a threshold aims at: its leading digit, candidates with a larger one, and
candidates with this one."""
FIELDS = tl.constexpr(11)

# Numbers of a phase, for all rows.
BAD, REACHED, SMALLEST, OFF = (tl.constexpr(place) for place in range(4))
"""Whether a value is not finite; values that reach the carried threshold; the smallest magnitude
but zero; and whether the global threshold was wrong."""
NUMBERS = tl.constexpr(4)

# Messages and records.
WHAT, COUNT, FLAGS = tl.constexpr(plan.WHAT), tl.constexpr(plan.COUNT), tl.constexpr(plan.FLAGS)
CHECKSUM, POINT = tl.constexpr(layout.CHECKSUM), tl.constexpr(plan.POINT)
FINITE, WRONG = tl.constexpr(plan.FINITE), tl.constexpr(plan.WRONG)
DAMAGED_SHIFT = tl.constexpr(plan.DAMAGED_SHIFT)
ALL_FINITE, DAMAGED = tl.constexpr(plan.ALL_FINITE), tl.constexpr(plan.DAMAGED)
OFFERED, OVERFLOW = tl.constexpr(plan.OFFERED), tl.constexpr(plan.OVERFLOW)
APPLIED = tl.constexpr(plan.APPLIED)
LOCAL_LIMIT, TOTAL_LIMIT = tl.constexpr(plan.LOCAL_LIMIT), tl.constexpr(plan.TOTAL_LIMIT)
LOCAL, LOCAL_TREND = tl.constexpr(plan.LOCAL), tl.constexpr(plan.LOCAL_TREND)
TOTAL, TOTAL_TREND = tl.constexpr(plan.TOTAL), tl.constexpr(plan.TOTAL_TREND)
REGIONS = tl.constexpr(plan.REGIONS)

# Numbers and their bits: float32.
INFINITY = tl.constexpr(numbers.infinity(torch.float32))
LEADING = tl.constexpr(numbers.leading_shift(torch.float32))
LARGEST, QUANTUM = tl.constexpr(numbers.LARGEST), tl.constexpr(numbers.QUANTUM)
OCTAVE_BITS = tl.constexpr(numbers.OCTAVE_BITS)
MOST_TREND = tl.constexpr(numbers.OCTAVE[torch.float32] * control.TREND_LIMIT >> 8)
TREND, SHORT = tl.constexpr(control.TREND), tl.constexpr(control.SHORT)
MIX_PLACE, MIX_FIRST, MIX_SECOND = (
    tl.constexpr(number - (number >> 63 << 64)) for number in numbers.MIX
)
