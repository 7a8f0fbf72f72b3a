"""Gradients to reduce: every pattern that an allreduce could stumble over."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ranks import Rank

Pattern = Callable[[int, int, int, int], Tensor]
"""(rank, size, numel, step) -> float64 gradient"""


def _noise(rank: int, numel: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(1_000_003 * rank + step)
    tail = torch.randn(numel, generator=random, dtype=torch.float64).exp()
    return torch.randn(numel, generator=random, dtype=torch.float64) * tail


def drifting(rank: int, size: int, numel: int, step: int) -> Tensor:
    """Heavy-tailed; its scale, and where the large values are, change from step to step."""
    place = torch.arange(numel, dtype=torch.float64) / numel
    profile = 1 + 3 * torch.sin(2 * math.pi * (place + step / 40)) ** 8
    return _noise(rank, numel, step) * profile * math.exp(math.sin(step / 6))


def identical(rank: int, size: int, numel: int, step: int) -> Tensor:
    return _noise(0, numel, step)


def disjoint(rank: int, size: int, numel: int, step: int) -> Tensor:
    return _noise(rank, numel, step) * (torch.arange(numel) % size == rank)


def one_rank_zero(rank: int, size: int, numel: int, step: int) -> Tensor:
    return _noise(rank, numel, step) * (rank != 0)


def all_zero(rank: int, size: int, numel: int, step: int) -> Tensor:
    return torch.zeros(numel, dtype=torch.float64)


def all_equal(rank: int, size: int, numel: int, step: int) -> Tensor:
    return torch.full((numel,), 0.5, dtype=torch.float64)


def outlier(rank: int, size: int, numel: int, step: int) -> Tensor:
    gradient = _noise(rank, numel, step)
    gradient[7919 * step % numel] = 1e6
    return gradient


def ascending(rank: int, size: int, numel: int, step: int) -> Tensor:
    return torch.arange(1, numel + 1, dtype=torch.float64) * (1 + rank / 8) / numel


PATTERNS: dict[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        drifting,
        identical,
        disjoint,
        one_rank_zero,
        all_zero,
        all_equal,
        outlier,
        ascending,
    )
}


def drifting_on(rank: Rank, step: int, numel: int) -> Tensor:
    """The drifting gradient of a rank, in float32."""
    return drifting(rank.rank, rank.size, numel, step).float()
