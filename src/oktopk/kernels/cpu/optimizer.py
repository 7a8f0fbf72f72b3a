"""Steps of oktopk.AdamW."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..numbers import fixed_point
from ..reference import optimizer as reference
from .arrays import as_bits, as_flat, limits
from .compiling import I32, compiled
from .threads import parallel


def step_square(gradient: Tensor, moment: Tensor, *, grown: float, least: float) -> Tensor:
    vectors = as_flat((gradient, moment))
    if vectors is None:
        return reference.step_square(gradient, moment, grown=grown, least=least)
    g, v = vectors
    square = _step_square(g, v, gradient.dtype, grown, least)
    return torch.tensor(square, dtype=torch.float64, device="cpu")


def _step_square(g: Any, v: Any, dtype: torch.dtype, grown: float, least: float) -> float:
    bits, (_, mask, _), kind = as_bits(g), limits(0.0, dtype), g.dtype.type
    most, scale = fixed_point(least, g.size)
    scalars = mask, kind(grown), kind(least), most, scale
    loop = compiled[dtype, I32]["step_square"]
    sums = parallel(lambda low, high: int(loop(g, bits, v, low, high, *scalars)), g.size)
    return float(sum(sums) / (scale * g.size))


def adam(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    moment: Tensor,
    *,
    most: float = math.inf,
    **factors: float,
) -> None:
    vectors = as_flat((parameter, gradient, average, moment))
    if vectors is None:
        reference.adam(parameter, gradient, average, moment, most=most, **factors)
        return
    _, g, _, v = vectors
    dtype, kind = parameter.dtype, g.dtype.type
    square = _step_square(g, v, dtype, factors["grown"], factors["least"])
    size = math.sqrt(square) / factors["unbias"]
    if size > most:
        factors["sign"] /= size
    names = ("sign", "grown", "least", "weight", "decay", "shrink", "unbias", "eps", "lr")
    scalars = [kind(factors[name]) for name in names]
    loop = compiled[dtype, I32]["adam"]
    parallel(lambda low, high: loop(*vectors, low, high, *scalars), g.size)
