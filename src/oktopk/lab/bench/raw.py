"""The raw workload: a gradient of a given size is averaged, again and again.

Gradients resemble those of training: most values are small and a few are large. They drift: scale
and position of the large values change from step to step, so no threshold is right for long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ...core.allreduce import SparseAllreduce
from ...core.stats import StepStats
from .contenders import Contender
from .messages import Cost

_COMMUNICATION = ("exchange", "gather")
"""Stages of a sparse step that are mostly waiting for messages; the others compute."""


class Gradients:
    """A rank's gradients, the same for all contenders."""

    def __init__(self, numel: int, seed: int) -> None:
        self.numel, self.seed = numel, seed
        first = 2 * (seed * 4096 + dist.get_rank())
        self._noise = [heavy_tailed(numel, first + which) for which in range(2)]
        self.tensor = torch.empty(numel)

    def prepare(self, step: int) -> None:
        """Write a step's gradient to `tensor`."""
        drift(self._noise, step, out=self.tensor)


def drift(noise: Sequence[Tensor], step: int, out: Tensor) -> None:
    """The sum of two tensors. The first is rolled by the step, and the scale rises and falls."""
    moving, fixed = noise
    scale, shift = math.exp(math.sin(step / 6)), (step * 104_729) % out.numel()
    out[shift:].copy_(moving[: out.numel() - shift])
    out[:shift].copy_(moving[out.numel() - shift :])
    out.add_(fixed, alpha=0.5).mul_(scale)


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Values with far heavier tails than a normal distribution's, like a gradient's."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=random) * torch.randn(numel, generator=random).exp_()


class Raw:
    """Steps of one contender."""

    def __init__(self, contender: Contender, gradient: Tensor, density: float | None) -> None:
        self.gradient = gradient
        self._reduce: SparseAllreduce | None = None
        self._hook: Callable[[], Any] | None = None
        if contender.own:
            options = {"density": density} if contender.sparse and density else {}
            self._reduce = SparseAllreduce(contender.algorithm(**options), gradient.numel())
        elif contender.name != "dense":
            state, hook = ddp_hook(contender)
            bucket: Any = _Bucket(gradient)
            self._hook = lambda: hook(state, bucket).wait()

    def step(self) -> Cost:
        """Average the gradient in place."""
        if self._reduce is not None:
            self._reduce(self.gradient, out=self.gradient)
            assert self._reduce.last is not None
            return _of_own(self._reduce.last)
        since = time.perf_counter()
        with Watched() as watched:
            if self._hook is None:
                dist.all_reduce(self.gradient)
            else:
                self._hook()
        communication = min(watched.seconds, time.perf_counter() - since)
        return Cost(
            compute=time.perf_counter() - since - communication,
            communication=communication,
            nbytes=watched.nbytes,
            applied=self.gradient.numel(),
        )


def _of_own(stats: StepStats) -> Cost:
    # A dense step communicates in one stage, whose name tells what it computes.
    waiting = ("reduce",) if stats.phase == "dense" else _COMMUNICATION
    return Cost(
        compute=sum(s for stage, s in stats.seconds.items() if stage not in waiting),
        communication=sum(stats.seconds[stage] for stage in waiting),
        nbytes=stats.bytes_sent,
        stages=dict(stats.seconds),
        applied=stats.selected_global,
    )


def ddp_hook(contender: Contender) -> tuple[Any, Callable[[Any, Any], Any]]:
    """State and function of one of DDP's own hooks."""
    if contender.name == "fp16":
        return dist.group.WORLD, default_hooks.fp16_compress_hook
    if contender.name == "bf16":
        # DDP refuses this hook on Gloo by its name, though Gloo can do it; a lambda has another.
        return dist.group.WORLD, lambda state, bucket: default_hooks.bf16_compress_hook(
            state, bucket
        )
    options = contender.power_sgd()
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=options.rank,
        start_powerSGD_iter=options.start,
        min_compression_rate=options.min_compression_rate,
    )
    return state, powerSGD_hook.powerSGD_hook


class _Bucket:
    """A gradient as DDP hands it to a hook: one bucket, with one matrix and a remainder.

    The matrix is as square as possible, because PowerSGD compresses that shape best.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        rows = math.isqrt(flat.numel())
        square = flat.numel() // rows * rows
        self._gradients = [flat[:square].view(rows, -1)]
        if square < flat.numel():
            self._gradients.append(flat[square:])

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> Sequence[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Watched:
    """Counts and times the traffic of DDP's hooks, which all call torch.distributed.all_reduce.

    An allreduce of m bytes counts as 2m(P-1)/P, as in `oktopk.core.transport`.
    """

    def __init__(self) -> None:
        self.seconds, self.nbytes = 0.0, 0
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> Watched:
        self._replace(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._replace(self._all_reduce)

    def _watch(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        size, since = dist.get_world_size(), time.perf_counter()
        self.nbytes += dense_bytes(tensor.nbytes, size)

        def end(_: object) -> None:
            self.seconds += time.perf_counter() - since

        work = self._all_reduce(tensor, *args, **options)
        if work is None:
            end(work)
        else:
            work.get_future().add_done_callback(end)
        return work

    def _replace(self, function: Callable[..., Any]) -> None:
        setattr(dist, "all_reduce", function)  # noqa: B010


def dense_bytes(nbytes: int, size: int) -> int:
    """Bytes that each of `size` ranks must send for an allreduce."""
    return math.ceil(2 * nbytes * (size - 1) / size)
