"""Kernels of oktopk.AdamW."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..numbers import fixed_point


def step_square(gradient: Tensor, moment: Tensor, *, grown: float, least: float) -> Tensor:
    """The mean of gradient**2 / second moment as `adam` would use it, the same bits on all ranks.

    Args:
        grown, least: as in `adam`.
    """
    most, scale = fixed_point(least, gradient.numel())
    floor = (gradient * least).square()
    squares = gradient.double().square() / torch.maximum(moment * grown, floor).double()
    squares = torch.where(squares < most, squares, most) * (gradient != 0)
    return (squares * scale).to(torch.int64).sum().double() / (scale * gradient.numel())


def adam(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    moment: Tensor,
    *,
    sign: float,
    grown: float,
    least: float,
    weight: float,
    decay: float,
    shrink: float,
    unbias: float,
    eps: float,
    lr: float,
    most: float = math.inf,
) -> None:
    """One step of oktopk.AdamW with a sparse average, in place; adam.py explains it.

    Args:
        sign: -1 to maximize.
        grown: multiplies the second moment.
        least: the second moment is at least (least * gradient)**2.
        weight: of the gradient in the first moment.
        decay: share of the parameter that is added to the gradient.
        shrink: multiplies the parameter.
        unbias: multiplies the root of the second moment, to correct its bias.
        most: if the gradient would move elements by more than so many learning rates (the root of
            the mean square), it is scaled so that it moves them by one.
    """
    size = step_square(gradient, moment, grown=grown, least=least).sqrt() / unbias
    scale = sign * torch.where(size > most, 1 / size, 1.0)
    moment.mul_(grown)
    torch.maximum(moment, (gradient * least).square(), out=moment)
    average.add_(scale * gradient + decay * parameter - average, alpha=weight)
    parameter.mul_(shrink).addcdiv_(average, moment.sqrt().mul_(unbias).add_(eps), value=-lr)
