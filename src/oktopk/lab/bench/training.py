"""The training workload: the project's speech model, trained in DDP.

Model, data, loss, optimizer and learning rate are those of `oktopk train`; only how gradients are
averaged is the contender's. All contenders begin with the same weights and see the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.stats import StepStats
from ...ddp import Compression, attach
from ...train.config.config import Config
from ...train.config.recipes import recipe
from ...train.meters import Watch
from ...train.optimizers import learning_rate, make_optimizer
from ...train.trainer import no_broadcast
from ...workloads.speech.batches import Batch
from ...workloads.speech.workload import Speech
from .contenders import Contender
from .raw import Watched, ddp_hook, dense_bytes

PARTS = ("data", "forward", "backward", "synchronise", "update")
_ONE_BUCKET_MB = 1 << 20
"""PowerSGD's waits within waits never end on Gloo with two buckets or more."""


class Diverged(Exception):
    """Loss or gradient is not finite any more; on all ranks at once."""


def make_config(
    name: str, values: Mapping[str, Any], contender: Contender, warmup_steps: int
) -> Config:
    """How a contender trains a recipe: with the optimizer that suits it, unless it says another."""
    config = recipe(name, **values)
    own: dict[str, Any] = {}
    if config.optimizer in ("adamw", "torch-adamw"):
        own["optimizer"] = "adamw" if contender.sparse else "torch-adamw"
    own["warmup_steps"] = contender.dense_steps(warmup_steps)
    return dataclasses.replace(config, **{**own, **contender.training})


class Training:
    """A model in DDP, and one contender's way to average its gradients. Collective.

    Args:
        steps: 0 for the epochs of the configuration.
        bucket_mb: of DDP's own contenders; None leaves it to DDP.
    """

    def __init__(
        self,
        config: Config,
        contender: Contender,
        density: float | None,
        steps: int,
        bucket_mb: float | None = None,
    ) -> None:
        self.config, self.contender = config, contender
        torch.manual_seed(config.seed)
        # Emulated hosts are one machine, on which one rank gets the corpus ready.
        self.speech = Speech(config, torch.device("cpu"), local_rank=dist.get_rank())
        self.net = self.speech.model
        self.per_epoch = self.speech.batches_per_epoch
        self.steps = steps or config.max_epochs * self.per_epoch
        self.optimizer = make_optimizer(config, self.net)
        self.compression: Compression | None = None
        self._stats: StepStats | None = None
        self.model = self._wrap(density, bucket_mb)
        self._done, self._last_gradient = 0, 0.0
        self._hooks = [p.register_hook(self._note_time) for p in self.net.parameters()]

    def _wrap(self, density: float | None, bucket_mb: float | None) -> DistributedDataParallel:
        contender, config, options = self.contender, self.config, no_broadcast()
        if contender.own:
            model = DistributedDataParallel(self.net, **options)
            defaults: dict[str, Any] = {"warmup_steps": config.warmup_steps}
            if density:
                defaults["density"] = density
            self.compression = attach(
                model,
                contender.algorithm(**defaults),
                scope=config.scope,
                bucket_mb=config.bucket_mb,
                dense_below=config.dense_below,
                norm_clip=config.norm_clip or None,
            )
            self.compression.subscribe(lambda stats: setattr(self, "_stats", stats))
            return model
        if contender.name == "powersgd":
            options["bucket_cap_mb"] = _ONE_BUCKET_MB
        elif bucket_mb is not None:
            options["bucket_cap_mb"] = bucket_mb
        model = DistributedDataParallel(self.net, **options)
        if contender.name != "dense":
            model.register_comm_hook(*ddp_hook(contender))
        return model

    def batches(self) -> Generator[Batch, None, None]:
        """Of all epochs."""
        for epoch in range(1, 1 + math.ceil(self.steps / self.per_epoch)):
            with contextlib.closing(self.speech.batches(epoch)) as batches:
                yield from batches

    def step(self, batches: Iterator[Batch]) -> dict[str, Any]:
        """Forward, backward, clip, step; what it took."""
        config, watch = self.config, Watch()
        epoch = 1 + self._done // self.per_epoch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self._done, self.steps, epoch)
        self.optimizer.zero_grad()
        batch = next(batches)
        watch.lap("data")
        with torch.autocast("cpu", torch.bfloat16, config.autocast == "bf16"):
            loss = self.speech.loss(self.model, batch)
        value = loss.item()
        watch.lap("forward")
        # The library counts its own; DDP without a hook sends all gradients.
        with contextlib.nullcontext() if self.compression else Watched() as watched:
            loss.backward()
        ended = watch.lap("backward")
        watch.move("backward", "synchronise", ended - self._last_gradient)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), config.clip or math.inf).item()
        if not math.isfinite(norm):  # all ranks have the same
            raise Diverged(f"diverged in step {self._done}: the gradient's norm is {norm}")
        self.optimizer.step()
        watch.lap("update")
        self._done += 1
        if self.contender.name == "dense":
            gradients = sum(p.nbytes for p in self.net.parameters())
            sent = dense_bytes(gradients, dist.get_world_size())
        elif watched:
            sent = watched.nbytes
        else:
            assert self._stats is not None  # by the time backward returns
            sent = self._stats.bytes_sent
        parts = {part: watch.seconds[part] for part in PARTS}
        return {
            "loss": value,
            "communication": parts["synchronise"],
            "compute": sum(parts.values()) - parts["synchronise"],
            "bytes": sent,
            "stages": parts,
        }

    def close(self) -> None:
        """Let go of what would keep the model."""
        for hook in self._hooks:
            hook.remove()
        if self.compression is not None:
            self.compression.close()

    def _note_time(self, _: Tensor) -> None:
        """When a gradient was there; what backward takes after the last one is communication."""
        self._last_gradient = time.perf_counter()
