"""Trainer: the loop. Read `run`, `train_epoch`, `train_step`, `end_epoch` in this order.

All workers run it alike. Rank 0 tells observers (the view, the run's folder) about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import checkpoint
from ..algorithms import Dense
from ..common.errors import UserError
from ..common.together import attempt, gather, mean
from ..core.stats import StepStats
from ..ddp import attach
from ..workloads.base import Validation
from .config.config import Config
from .console.live import View
from .folders import CHECKPOINT, choose_folder
from .kinds import kinds_of
from .meters import Meters, Sums, memory
from .metrics_file import previous_epochs
from .model import (
    average_buffers,
    copy_buffers,
    make_workload,
    no_broadcast,
    set_buffers,
    take_weights,
)
from .optimizers import learning_rate, make_optimizer
from .page import Page
from .records import DetailRecord, EpochRecord, Observer, Outcome, Plan, StepRecord
from .reporters import check_reporters, reporters
from .run_folder import RunFolder, times_resumed
from .step import Diverged, train_step


class Trainer:
    """Trains the workload of a configuration.

    Constructing it and `run` are collective. `sparsities`, `compression_ratios` and
    `communication_sizes` (bytes that this worker sent) get a value in each step, the first one
    and the dense ones included.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device | None = None,
        local_rank: int = 0,
        observers: Sequence[Observer] | None = None,
    ) -> None:
        self.config = config
        self.device = device or torch.device("cpu")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sparsities: list[float] = []
        self.compression_ratios: list[float] = []
        self.communication_sizes: list[int] = []

        attempt(lambda: check_reporters(config.run, self.rank))
        torch.manual_seed(config.run.seed)
        self.workload = make_workload(config, self.device, local_rank)
        self.net = self.workload.model.to(self.device)
        self.folder, resumed = gather(attempt(lambda: choose_folder(config.run, self.rank)))[0]
        if config.run.pretrain and not resumed:
            take_weights(self.net, config.run.pretrain)
        self.optimizer = make_optimizer(config.optimizer, self.net)
        self.model = DistributedDataParallel(
            self.net,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            **no_broadcast(),
        )
        self.handle = attach(
            self.model,
            config.compression.algorithm(),
            trainer=self,
            scope=config.compression.scope,
            bucket_mb=config.compression.bucket_mb,
            dense_below=config.compression.dense_below,
            norm_clip=config.compression.norm_clip or None,
            momentum=config.optimizer.momentum if config.optimizer.momentum_correction else 0.0,
        )
        self._stats: StepStats
        self.handle.subscribe(lambda stats: setattr(self, "_stats", stats))

        self.epoch, self.batches_done, self.step = 1, 0, 0
        self.meters = Meters(len(self.handle.reducer.buckets), kinds_of(self.net))
        if resumed:
            self._load()
        self.plan = self._make_plan(str(self.folder) if resumed else config.run.pretrain)
        self._details: list[DetailRecord] = []
        if self.rank == 0 and config.run.detail_every:
            self.handle.inspect(self._details.append, self._detail_is_due)
        self.epochs: list[EpochRecord] = []
        if resumed:  # rank 0 reports the epochs before with its own
            self.epochs += attempt(
                lambda: () if self.rank else previous_epochs(self.folder, self.epoch)
            )
        self.observers: Sequence[Observer] = ()
        if self.rank == 0:
            # A run that was to be resumed may have ended before its first checkpoint.
            resume_step = self.step if config.run.resume else None
            kept = RunFolder(
                self.folder,
                resume_step=resume_step,
                resume_epoch=self.epoch,
            )
            others = reporters(config.run, self.folder, resume_step)
            page = (Page(self.folder),) if config.run.page else ()
            told: Sequence[Observer] = (View(), kept, *others, *page)
            self.observers = told if observers is None else observers

    def run(self) -> Outcome | None:
        """Train to the end. Rank 0 gets the outcome."""
        try:
            attempt(lambda: self._tell("started", self.plan))
            while self.step < self.plan.steps:
                last = self.train_epoch()
                self.end_epoch(last)
            usage = gather(memory(self.device))
            if self.rank:
                return None
            stats = self.handle.stats()
            skipped = getattr(self.workload, "skipped_samples", 0)
            outcome = self.meters.outcome(self.plan, self.step, self.epochs, stats, usage, skipped)
            self._tell("finished", outcome)
            return outcome
        finally:
            for observer in self.observers:
                observer.close()

    def train_epoch(self) -> StepRecord:
        """Take the steps that are left of this epoch."""
        every = self.config.run.checkpoint_every
        batches = self.workload.batches(self.epoch, self.batches_done)
        with contextlib.closing(batches):
            while True:
                record = self.train_step(batches)
                self._tell("stepped", record)
                while self._details:
                    self._tell("detailed", self._details.pop(0))
                if self._epoch_is_over():
                    return record
                if every > 0 and self.step % every == 0:
                    self.save()

    def train_step(self, batches: Iterator[Any]) -> StepRecord:
        """Forward, backward, synchronise, clip, update; then count."""
        config, reducer = self.config, self.handle.reducer
        lr = learning_rate(config.optimizer, self.step, self.plan.steps, self.epoch)
        waited, busy = reducer.events.waited, reducer.events.busy
        try:
            done = train_step(config, self.workload, self.model, self.optimizer, batches, lr)
        except Diverged as error:
            raise self._diverged(str(error)) from None
        done.watch.move("backward", "synchronise", reducer.events.waited - waited)
        self.meters.add_backward(done.backward[0], reducer.ready)
        record = StepRecord(
            step=self.step,
            epoch=self.epoch,
            loss=done.loss,
            lr=lr,
            grad_norm=done.grad_norm,
            samples=config.run.batch_size * config.run.nsteps_update * self.size,
            phase=self._stats.phase,
            sparsity=self._stats.sparsity,
            compression_ratio=self._stats.compression_ratio,
            bytes_sent=self._stats.bytes_sent,
            bytes_received=self._stats.bytes_received,
            seconds=done.watch.seconds,
            target=self._stats.target,
            offered=self._stats.selected_local,
            applied=self._stats.selected_global,
            overflow=self._stats.overflow,
            skipped=self._stats.skipped,
            stages=self._stats.seconds,
            busy=reducer.events.busy - busy,
        )
        self.meters.add(record, self._stats)
        self.step += 1
        self.batches_done += config.run.nsteps_update
        return record

    def end_epoch(self, last: StepRecord) -> None:
        """Validate, report, save. With --max-steps the last epoch may be a part of one."""
        own = copy_buffers(self.net)
        average_buffers(self.net)
        loss = mean([self.meters.of_epoch.loss / self.meters.of_epoch.steps], self.device)[0]
        validation = self._validate()
        for name, value in {"training loss": loss, **validation.metrics}.items():
            if not math.isfinite(value):  # all workers have the same
                raise self._diverged(f"the {name} of epoch {self.epoch} is {value}")
        record = self.meters.epoch(last, loss, validation)
        if self.rank == 0:
            self.epochs.append(record)
        self._tell("epoch_ended", record)
        if self._steps_of_epoch() < self.plan.steps_per_epoch:
            set_buffers(self.net, own)  # a resumed run goes on as if it had not ended here
        else:
            self.epoch, self.batches_done, self.meters.of_epoch = self.epoch + 1, 0, Sums()
        every = self.config.run.checkpoint_every
        if self.step >= self.plan.steps or every == 0 or (every > 0 and self.step % every == 0):
            self.save()

    def save(self) -> None:
        """A checkpoint from which training goes on bitwise as if it had not stopped."""
        buffers = copy_buffers(self.net)
        own = {
            "buffers": buffers,
            "random": torch.get_rng_state(),
            "of_epoch": dataclasses.asdict(self.meters.of_epoch),
        }
        self.meters.count(self.handle.stats())
        average_buffers(self.net)  # others see the model as it is validated
        shared = {
            "model": {**self.net.state_dict(), **copy_buffers(self.net)},
            "optimizer": self.optimizer.state_dict(),
            "settings": self._settings_of_steps(),
            "step": self.step,
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "of_run": dataclasses.asdict(self.meters.of_run),
        }
        set_buffers(self.net, buffers)
        try:
            checkpoint.save(self.folder / CHECKPOINT, self.handle, shared=shared, own=own)
        except OSError as error:
            raise UserError(f"{error}; make room, or name another folder with --run-dir") from None

    def _load(self) -> None:
        try:
            saved = checkpoint.load(self.folder / CHECKPOINT, self.handle)
            shared, own = saved.shared, saved.own
            settings = self._settings_of_steps()
            if shared["settings"]["optimizer"] != settings["optimizer"]:
                raise ValueError(f"the run was begun with {shared['settings']['optimizer']}")
            self.net.load_state_dict(shared["model"])
            self.optimizer.load_state_dict(shared["optimizer"])
        except (ValueError, RuntimeError, OSError, KeyError) as error:
            problem = str(error).partition(" To take what fits")[0]
            raise UserError(
                f"--resume {self.folder}: {problem} (model, optimizer and compression must be "
                "those that the run was begun with)"
            ) from error
        self.step, self.epoch = shared["step"], shared["epoch"]
        self.meters.go_on(Sums(**shared["of_run"]))
        # Earlier versions did not save all of them.
        if own is None or any(
            settings.get(name) != was for name, was in shared["settings"].items()
        ):
            return  # the batches differ, so the epoch begins again
        self.batches_done = shared["batches_done"]
        set_buffers(self.net, own["buffers"])
        torch.set_rng_state(own["random"])
        self.meters.of_epoch = Sums(**own["of_epoch"])

    def _settings_of_steps(self) -> dict[str, Any]:
        """Decides which batches and which optimizer state a step has."""
        values = self.config.as_dict()
        names = ("optimizer", "batch_size", "nsteps_update", "seed")
        sizes = {"samples": self.workload.samples, "batches": self.workload.batches_per_epoch}
        return {name: values[name] for name in names} | sizes

    def _make_plan(self, weights_from: str) -> Plan:
        run, algorithm = self.config.run, self.handle.algorithm
        per_epoch = self.workload.batches_per_epoch // run.nsteps_update
        left = (run.max_epochs - self.epoch + 1) * per_epoch - self._steps_of_epoch()
        steps = self.step + max(0, left)
        if run.max_steps is not None:
            steps = max(self.step, min(steps, run.max_steps))
        parameters = sum(p.numel() for p in self.net.parameters())
        return Plan(
            config=self.config,
            folder=str(self.folder),
            workers=self.size,
            device=str(self.device),
            parameters=parameters,
            samples=self.workload.samples,
            epochs=run.max_epochs,
            steps_per_epoch=per_epoch,
            steps=steps,
            first_step=self.step,
            dense_steps=steps if isinstance(algorithm, Dense) else algorithm.warmup_steps,
            dense_bytes=round(2 * 4 * parameters * (self.size - 1) / self.size),
            weights_from=weights_from,
            resumed=times_resumed(self.folder) if self.rank == 0 and run.resume else 0,
        )

    def _detail_is_due(self, step: int) -> bool:
        """Every few steps, at the end of the warm-up, and in the last step."""
        plan = self.plan
        special = (plan.dense_steps - 1, plan.dense_steps, plan.steps - 1)
        return step % self.config.run.detail_every == 0 or step in special

    def _steps_of_epoch(self) -> int:
        return self.batches_done // self.config.run.nsteps_update

    def _epoch_is_over(self) -> bool:
        return self._steps_of_epoch() >= self.plan.steps_per_epoch or self.step >= self.plan.steps

    def _validate(self) -> Validation:
        """Nothing, where it is not the epoch's turn."""
        turn = self.epoch == 1 or self.epoch % self.config.run.validate_every == 0
        if turn or self.step >= self.plan.steps:
            return self.workload.validate(self.net, self._validating)
        return Validation({})

    def _validating(self, done: int, total: int) -> None:
        for observer in self.observers:
            observer.validating(done, total)

    def _tell(self, what: str, about: object) -> bool:
        for observer in self.observers:
            getattr(observer, what)(about)
        return True

    def _diverged(self, why: str) -> UserError:
        return UserError(
            f"training diverged in step {self.step}: {why}. A smaller --lr, a smaller --clip or "
            "--norm-clip helps"
        )
