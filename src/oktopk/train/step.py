"""One training step, the same for `oktopk train` and `oktopk bench train`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.transport import NonFiniteGradientError
from ..workloads.base import Workload
from .config.config import Config

PARTS = ("data", "forward", "backward", "synchronise", "update", "total")
"""Of a step: waiting for a batch, computing the loss, computing gradients, waiting for
communication after that, clipping and the optimizer."""


class Diverged(Exception):
    """The gradient is not finite any more, on all workers."""


@dataclass(frozen=True)
class Stepped:
    """The result of a step, and the time that it took."""

    loss: float
    """Mean of this worker's batches."""
    grad_norm: float
    """Norm of the averaged gradient, before it is clipped."""
    watch: Watch
    backward: tuple[float, float]
    """When the last backward began and ended, as `time.perf_counter` has it."""


def train_step(
    config: Config,
    workload: Workload[Any],
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    lr: float,
) -> Stepped:
    """Forward, backward, synchronise, clip, update. All workers call it together.

    Gradients of several batches are accumulated, and averaged over workers in the last backward.
    """
    watch, loss, count = Watch(), 0.0, config.run.nsteps_update
    device = next(model.parameters()).device.type
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    for index in range(count):
        batch = next(batches)
        watch.lap("data")
        with contextlib.nullcontext() if index == count - 1 else model.no_sync():
            with torch.autocast(device, torch.bfloat16, config.run.autocast == "bf16"):
                part = workload.loss(model, batch) / count
            loss += part.item()
            began = watch.lap("forward")
            try:
                part.backward()
            except NonFiniteGradientError as error:
                raise Diverged(str(error)) from None
            ended = watch.lap("backward")
    limit = config.optimizer.clip or math.inf
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    if not math.isfinite(norm):  # all workers have the same
        raise Diverged(f"the norm of the gradient is {norm}")
    optimizer.step()
    watch.lap("update")
    return Stepped(loss, norm, watch, (began, ended))


class Watch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def lap(self, part: str) -> float:
        """The time since the last lap belongs to this part; returns the time now."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self.seconds["total"] += now - self._since
        self._since = now
        return now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Some of the time that was counted as one part belongs to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
