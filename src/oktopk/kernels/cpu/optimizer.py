"""Steps of oktopk.AdamW."""

from __future__ import annotations

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
    bits, (_, mask, _) = as_bits(g), limits(0.0, gradient.dtype)
    most, scale = fixed_point(least, g.size)
    scalars = [mask, *(g.dtype.type(x) for x in (grown, least)), most, scale]
    loop = compiled[gradient.dtype, I32]["step_square"]
    sums = parallel(lambda low, high: int(loop(g, bits, v, low, high, *scalars)), g.size)
    return torch.tensor(sum(sums) / (scale * g.size), dtype=torch.float64, device="cpu")


def adam(
    parameter: Tensor, gradient: Tensor, average: Tensor, moment: Tensor, **factors: float
) -> None:
    vectors = as_flat((parameter, gradient, average, moment))
    if vectors is None:
        reference.adam(parameter, gradient, average, moment, **factors)
        return
    names = ("sign", "grown", "least", "weight", "decay", "shrink", "unbias", "eps", "lr")
    scalars = [vectors[0].dtype.type(factors[name]) for name in names]
    loop = compiled[parameter.dtype, I32]["adam"]
    parallel(lambda low, high: loop(*vectors, low, high, *scalars), parameter.numel())
