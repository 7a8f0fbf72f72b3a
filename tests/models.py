"""A small model, data for it, and the loop that trains it, for tests on real ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from ranks import Rank

SMALL: dict[str, Any] = {"dense_below": 512, "bucket_mb": 0.018}
"""Options that give the small model two buckets to compress and one of small parameters."""


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batch(step: int, rank: int, count: int = 8) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(count, 32, generator=random)
    return x, x[:, :10].argmax(1)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def attached(
    rank: Rank, algorithm: oktopk.Algorithm, model: nn.Module | None = None, **options: Any
) -> tuple[DDP, oktopk.Compression]:
    """The small model in DDP with compression; DDP's buckets are smaller than ours."""
    ddp = DDP(net() if model is None else model, process_group=rank.group, bucket_cap_mb=0.01)
    return ddp, oktopk.attach(ddp, algorithm, group=rank.own_group, **(SMALL | options))


def run(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        optimizer.step()
        each(step)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def parameters(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def local_gradient(model: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """What a rank's gradient is before anyone averages it, by parameter name."""
    inner = model.module if isinstance(model, DDP) else model
    loss = loss_of(inner, step, rank)
    names, values = zip(*inner.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The averaged gradients by parameter name."""
    inner = model.module if isinstance(model, DDP) else model
    return {name: p.grad.clone() for name, p in inner.named_parameters() if p.grad is not None}


def assert_conserved(outcomes: list[Any]) -> None:
    """sum(residual after) + P * average = sum(residual before + gradient), by parameter."""
    size = len(outcomes)
    for step in zip(*outcomes, strict=True):
        average = step[0][2]
        for other in step[1:]:
            assert all(torch.equal(average[name], other[2][name]) for name in average)
        for name in average:
            entered = sum(before[name] + own[name] for before, own, _, _ in step)
            left = sum(after[name] for *_, after in step) + size * average[name]
            torch.testing.assert_close(left, entered, atol=1e-5, rtol=1e-5)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("oktopk")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
