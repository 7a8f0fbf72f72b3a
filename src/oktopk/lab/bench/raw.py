"""The raw workload: a gradient of a given size is averaged, again and again, and nothing else.

Gradients are as training's are, most values small and a few large, and they drift: scale and place
of the large values change from step to step, so that thresholds are never right for long.
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

_COMMUNICATION = ("exchange", "gather")
"""Stages of a sparse step that are mostly waiting for messages; the others compute."""


class Gradients:
    """A rank's gradients; for all contenders the same."""

    def __init__(self, numel: int, seed: int) -> None:
        first = 2 * (seed * 4096 + dist.get_rank())
        self._noise = [_heavy_tailed(numel, first + which) for which in range(2)]
        self.tensor = torch.empty(numel)

    def prepare(self, step: int) -> None:
        """Write a step's gradient to `tensor`: two heavy-tailed ones, the first moved along, with
        a scale that rises and falls."""
        out, (moving, fixed) = self.tensor, self._noise
        scale, shift = math.exp(math.sin(step / 6)), (step * 104_729) % out.numel()
        out[shift:].copy_(moving[: out.numel() - shift])
        out[:shift].copy_(moving[out.numel() - shift :])
        out.add_(fixed, alpha=0.5).mul_(scale)


def _heavy_tailed(numel: int, seed: int) -> Tensor:
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

    def step(self) -> dict[str, Any]:
        """Average the gradient in place; what it took, but for the time in all."""
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
        return {
            "communication": communication,
            "compute": time.perf_counter() - since - communication,
            "bytes": watched.nbytes,
            "messages": watched.messages,
            "applied": self.gradient.numel(),
        }


def _of_own(stats: StepStats) -> dict[str, Any]:
    # A dense step has one stage that communicates, and it is called after what it computes.
    waiting = ("reduce",) if stats.phase == "dense" else _COMMUNICATION
    return {
        "communication": sum(stats.seconds[stage] for stage in waiting),
        "compute": sum(s for stage, s in stats.seconds.items() if stage not in waiting),
        "bytes": stats.bytes_sent,
        "messages": stats.messages,
        "applied": stats.selected_global,
        "stages": stats.seconds,
    }


def ddp_hook(contender: Contender) -> tuple[Any, Callable[[Any, Any], Any]]:
    """State and function of one of DDP's own hooks."""
    if contender.name == "fp16":
        return dist.group.WORLD, default_hooks.fp16_compress_hook
    if contender.name == "bf16":
        # DDP refuses this one on Gloo, which can do it; by its name.
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
    """A gradient as DDP hands it to a hook: the only bucket, of one matrix that is as square as can
    be, which is the shape that PowerSGD makes smallest, and of what is left over."""

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
    """Counts and times what DDP's hooks send: they all call torch.distributed.all_reduce.

    Bytes are counted as `oktopk.core.transport` counts them: 2m(P-1)/P for m bytes.
    """

    def __init__(self) -> None:
        self.seconds, self.nbytes, self.messages = 0.0, 0, 0
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> Watched:
        self._replace(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._replace(self._all_reduce)

    def _watch(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        size, since = dist.get_world_size(), time.perf_counter()
        self.nbytes += dense_bytes(tensor.nbytes, size)
        self.messages += 1

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
    """What each of `size` ranks must send for an allreduce."""
    return math.ceil(2 * nbytes * (size - 1) / size)
