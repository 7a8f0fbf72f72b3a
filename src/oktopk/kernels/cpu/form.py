"""The plan of a step as loops see it: whole numbers only."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import numbers
from ..plan import Plan

PLAIN_VALUES, FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(6)
"""Numbers of the codecs that loops know; see wire/codecs.py."""
WIRES = range(6)
AS_RESIDUAL, AS_BFLOAT16, AS_FLOAT16 = range(3)
"""Types of gradients and averages: that of the residual, or 16 bits."""
RESIDUAL, VALUES, VELOCITY, VELOCITY_AFTER, PARTS = range(5)
"""Addresses of vectors, and from PARTS on those of the parts of the gradient."""


class Form(NamedTuple):
    """The fields of `Plan` that loops need, and constants of the type of the residual."""

    numel: int
    size: int
    rank: int
    k: int
    aim: int
    wanted: int
    most: int
    fewest: int
    share: int
    span: int
    code: int
    low_bits: int
    bitmap: int
    values_at: int
    positions_at: int
    room: int
    what: int
    wire: int
    everything: int
    itemsize: int
    mask: int
    """Of all bits of a number but its sign."""
    infinity: int
    octave: int
    shift: int
    """How far to shift a magnitude for its leading digit."""
    aim_bits: int
    """The bits of `aim` as a float; `wanted_bits`: those of `wanted`."""
    wanted_bits: int

    @property
    def scratch(self) -> int:
        """Entries that the phases have room for: each cuts the same room in its own way."""
        read = self.size * self.most
        prepare = self.k + self.most + 2 + self.numel
        return max(prepare, 2 * read + self.most + 2, read + self.k + 2)


def form_of(plan: Plan, dtype: torch.dtype) -> Form:
    return Form(
        numel=plan.numel,
        size=plan.size,
        rank=plan.rank,
        k=plan.k,
        aim=plan.aim,
        wanted=plan.wanted,
        most=plan.most,
        fewest=plan.fewest,
        share=plan.share,
        span=plan.span,
        code=plan.code,
        low_bits=plan.low_bits,
        bitmap=plan.bitmap,
        values_at=plan.values_at,
        positions_at=plan.positions_at,
        room=plan.room,
        what=plan.what,
        wire=plan.codec.number,
        everything=int(plan.everything),
        itemsize=dtype.itemsize,
        mask=(1 << (8 * dtype.itemsize - 1)) - 1,
        infinity=numbers.infinity(dtype),
        octave=numbers.OCTAVE[dtype],
        shift=numbers.leading_shift(dtype),
        aim_bits=numbers.logarithm(plan.aim, dtype),
        wanted_bits=numbers.logarithm(plan.wanted, dtype),
    )


NOTHING = Form(*[0] * len(Form._fields))._replace(
    k=1, aim=1, wanted=1, values_at=40, positions_at=40, room=40
)
"""No ranks and no entries: loops are compiled with it."""
