"""The training of a recipe in DDP.

Model, data, loss, optimizer and learning rate are those of `oktopk train`. Only the way to average
gradients is the contender's. All contenders begin with the same weights and see the same batches.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...core.stats import StepStats
from ...ddp import Compression, attach
from ...train.config.config import Config
from ...train.config.recipes import recipe
from ...train.model import make_workload, no_broadcast
from ...train.optimizers import learning_rate, make_optimizer
from ...train.step import Diverged, train_step
from .contenders import Contender, parse
from .messages import Cost, TrainingJob
from .raw import Watched, ddp_hook, dense_bytes

PARTS = ("data", "forward", "backward", "synchronise", "update")
_ONE_BUCKET_MB = 1 << 20
"""One bucket for all: with several, PowerSGD's nested waits never end on Gloo."""


def make_config(
    name: str, values: Mapping[str, Any], contender: Contender, warmup_steps: int
) -> Config:
    """The recipe's configuration, with an optimizer that suits the contender."""
    config = recipe(name, **values)
    own: dict[str, Any] = {}
    if config.optimizer.name in ("adamw", "torch-adamw"):
        own["optimizer"] = "adamw" if contender.sparse else "torch-adamw"
    own["warmup_steps"] = contender.dense_steps(warmup_steps)
    return config.replace(**{**own, **contender.training})


class Training:
    """A model in DDP, and one contender's way to average its gradients. Collective."""

    def __init__(self, job: TrainingJob) -> None:
        self.contender = contender = parse(job.contender, training=True)
        self.config = config = make_config(job.recipe, job.values, contender, job.warmup_steps)
        torch.manual_seed(config.run.seed)
        # Emulated hosts are one machine, on which one rank gets the corpus ready.
        self.workload = make_workload(config, torch.device("cpu"), local_rank=dist.get_rank())
        self.net = self.workload.model
        self.per_epoch = self.workload.batches_per_epoch // config.run.nsteps_update
        self.steps = job.steps or config.run.max_epochs * self.per_epoch
        self.optimizer = make_optimizer(config.optimizer, self.net)
        self.compression: Compression | None = None
        self._stats: StepStats | None = None
        self.model = self._wrap(job)
        self._done, self._last_gradient = 0, 0.0
        self._hooks = [p.register_hook(self._note_time) for p in self.net.parameters()]

    def _wrap(self, job: TrainingJob) -> DistributedDataParallel:
        contender, config, options = self.contender, self.config, no_broadcast()
        if contender.own:
            model = DistributedDataParallel(self.net, **options)
            defaults: dict[str, Any] = {"warmup_steps": config.compression.warmup_steps}
            if job.density:
                defaults["density"] = job.density
            self.compression = attach(
                model,
                contender.algorithm(**defaults),
                scope=config.compression.scope,
                bucket_mb=config.compression.bucket_mb,
                dense_below=config.compression.dense_below,
                norm_clip=config.compression.norm_clip or None,
            )
            self.compression.subscribe(lambda stats: setattr(self, "_stats", stats))
            return model
        if contender.name == "powersgd":
            options["bucket_cap_mb"] = _ONE_BUCKET_MB
        elif "bucket_mb" in {**job.values, **contender.training}:  # else DDP decides
            options["bucket_cap_mb"] = config.compression.bucket_mb
        model = DistributedDataParallel(self.net, **options)
        if contender.name != "dense":
            model.register_comm_hook(*ddp_hook(contender))
        return model

    def batches(self, first_epoch: int = 1) -> Generator[Any, None, None]:
        """Of all epochs."""
        epochs = math.ceil(self.steps / self.per_epoch)
        for epoch in range(first_epoch, first_epoch + epochs):
            with contextlib.closing(self.workload.batches(epoch)) as batches:
                yield from islice(batches, self.per_epoch * self.config.run.nsteps_update)

    def step(self, batches: Iterator[Any]) -> Cost:
        """One step, and what it took."""
        epoch = 1 + self._done // self.per_epoch
        lr = learning_rate(self.config.optimizer, self._done, self.steps, epoch)
        arguments = self.config, self.workload, self.model, self.optimizer, batches, lr
        try:
            # The library counts its own; DDP without a hook sends all gradients.
            with contextlib.nullcontext() if self.compression else Watched() as watched:
                done = train_step(*arguments)
        except Diverged as error:
            raise Diverged(f"diverged in step {self._done}: {error}") from None
        done.watch.move("backward", "synchronise", done.backward[1] - self._last_gradient)
        self._done += 1
        if self.contender.name == "dense":
            gradients = sum(p.nbytes for p in self.net.parameters())
            sent = dense_bytes(gradients, dist.get_world_size())
        elif watched:
            sent = watched.nbytes
        else:
            assert self._stats is not None  # by the time backward returns
            sent = self._stats.bytes_sent
        parts = {part: done.watch.seconds[part] for part in PARTS}
        communication = parts["synchronise"]
        return Cost(sum(parts.values()) - communication, communication, sent, parts, loss=done.loss)

    def close(self) -> None:
        """Remove everything that keeps the model alive."""
        for hook in self._hooks:
            hook.remove()
        if self.compression is not None:
            self.compression.close()

    def _note_time(self, _: Tensor) -> None:
        """Note when a gradient is computed. After the last one, backward only communicates."""
        self._last_gradient = time.perf_counter()
