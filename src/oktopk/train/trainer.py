"""Trainer: the loop. Read `run`, `train_epoch`, `train_step` in this order.

All workers run it alike; rank 0 tells observers (the view, the run's folder) what happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import checkpoint
from ..algorithms import Dense
from ..common.cache import expanded
from ..common.errors import UserError
from ..core.stats import StepStats
from ..core.transport import NonFiniteGradientError
from ..ddp import attach
from ..workloads.speech.batches import Batch
from ..workloads.speech.workload import Speech
from .config.config import Config
from .console.live import View
from .meters import PARTS, Sums, Watch, memory
from .optimizers import learning_rate, make_optimizer
from .records import BucketTiming, EpochRecord, Example, Observer, Outcome, Plan, StepRecord
from .run_folder import CHECKPOINT, RunFolder, latest_run, new_run_folder, previous_epochs
from .together import attempt, average_buffers, gather, mean


class Trainer:
    """Trains what a configuration says.

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

        torch.manual_seed(config.seed)
        self.workload = Speech(config, self.device, local_rank)
        self.net = self.workload.model.to(self.device)
        self.folder, resumed = gather(attempt(self._choose_folder))[0]
        weights_from = str(self.folder) if resumed else config.pretrain
        if config.pretrain and not resumed:
            self._take_weights(config.pretrain)
        self.optimizer = make_optimizer(config, self.net)
        self.model = DistributedDataParallel(
            self.net,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            **no_broadcast(),
        )
        self.handle = attach(
            self.model,
            config.make_algorithm(),
            trainer=self,
            scope=config.scope,
            bucket_mb=config.bucket_mb,
            dense_below=config.dense_below,
            norm_clip=config.norm_clip or None,
            momentum=config.momentum if config.momentum_correction else 0.0,
        )
        self._stats: StepStats
        self.handle.subscribe(lambda stats: setattr(self, "_stats", stats))

        self.epoch, self.batches_done, self.step = 1, 0, 0
        self.of_epoch, self.of_run = Sums(), Sums()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.bucket_backward = [0.0] * len(self.handle.reducer.buckets)
        self.started = time.perf_counter()
        if resumed:
            self._load()
        self.plan = self._make_plan(weights_from)
        self.observers: Sequence[Observer] = ()
        if self.rank == 0:
            kept = RunFolder(
                self.folder,
                tensorboard=config.tensorboard,
                # A run that was to be resumed may have ended before its first checkpoint.
                resume_step=self.step if config.resume else None,
                resume_epoch=self.epoch,
            )
            self.observers = (View(), kept) if observers is None else observers
        self.epochs = attempt(self._epochs_before) if resumed else []

    def run(self) -> Outcome | None:
        """Train to the end. Rank 0 gets what became of it."""
        try:
            attempt(lambda: self._tell("started", self.plan))
            while self.step < self.plan.steps:
                self.train_epoch()
                self.end_epoch()
            outcome = self._outcome()
            self._tell("finished", outcome)
            return outcome if self.rank == 0 else None
        finally:
            for observer in self.observers:
                observer.close()

    def train_epoch(self) -> None:
        """What is left of this epoch's steps."""
        batches = self.workload.batches(self.epoch, self.batches_done)
        with contextlib.closing(batches):
            while not self._epoch_is_over():
                record = self.train_step(batches)
                self._tell("stepped", record)
                every = self.config.checkpoint_every
                if every > 0 and self.step % every == 0 and not self._epoch_is_over():
                    self.save()

    def train_step(self, batches: Iterator[Batch]) -> StepRecord:
        """Forward, backward, synchronise, clip, step."""
        config, watch = self.config, Watch()
        lr = learning_rate(config, self.step, self.plan.steps, self.epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss, waited = 0.0, self.handle.reducer.waited
        for index in range(config.nsteps_update):
            batch = next(batches)
            watch.lap("data")
            last = index == config.nsteps_update - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast(self.device.type, torch.bfloat16, config.autocast == "bf16"):
                    part = self.workload.loss(self.model, batch) / config.nsteps_update
                loss += part.item()
                began = watch.lap("forward")
                try:
                    part.backward()  # averages gradients over workers, in the last part
                except NonFiniteGradientError as error:
                    raise self._diverged(str(error)) from None
                watch.lap("backward")
        watch.move("backward", "synchronise", self.handle.reducer.waited - waited)
        self._time_buckets(began)
        limit = config.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), limit).item()
        if not math.isfinite(norm):  # all workers have the same
            raise self._diverged(f"the norm of the gradient is {norm}")
        self.optimizer.step()
        watch.lap("update")

        record = StepRecord(
            step=self.step,
            epoch=self.epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            samples=config.batch_size * config.nsteps_update * self.size,
            phase=self._stats.phase,
            sparsity=self._stats.sparsity,
            compression_ratio=self._stats.compression_ratio,
            bytes_sent=self._stats.bytes_sent,
            bytes_received=self._stats.bytes_received,
            seconds=watch.seconds,
        )
        self.step += 1
        self.batches_done += config.nsteps_update
        for sums in (self.of_epoch, self.of_run):
            sums.add(record, self._stats)
        for part_name, seconds in record.seconds.items():
            self.seconds[part_name] += seconds
        return record

    def end_epoch(self) -> None:
        """Validate, report, save. With --max-steps the last epoch may be a part of one."""
        config, sums, last = self.config, self.of_epoch, self.step >= self.plan.steps
        own = self._copy_of_buffers()
        average_buffers(self.net)
        loss = mean([sums.loss / sums.steps], self.device)[0]
        validation: dict[str, float] = {}
        examples: tuple[Example, ...] = ()
        if self.epoch == 1 or self.epoch % config.validate_every == 0 or last:
            validation, examples = self.workload.validate(self.net, self._validating)
        for name, value in {"training loss": loss, **validation}.items():
            if not math.isfinite(value):  # all workers have the same
                raise self._diverged(f"the {name} of epoch {self.epoch} is {value}")
        phases = {0: "dense", sums.steps: "sparse"}
        samples = sums.steps * config.batch_size * config.nsteps_update * self.size
        record = EpochRecord(
            epoch=self.epoch,
            steps=self.step,
            loss=loss,
            lr=self.optimizer.param_groups[0]["lr"],
            phase=phases.get(sums.sparse_steps, "mixed"),
            sparsity=sums.sparsity / sums.steps,
            compression_ratio=sums.compression_ratio,
            bytes_sent=sums.bytes_sent,
            seconds=sums.seconds,
            samples_per_second=samples / sums.seconds,
            waited_for_data=sums.data,
            validation=validation,
            examples=examples,
        )
        if self.rank == 0:
            self.epochs.append(record)
        self._tell("epoch_ended", record)
        if self.batches_done // config.nsteps_update < self.plan.steps_per_epoch:
            self._set_buffers(own)  # a run that is resumed goes on as if it had not ended here
        else:
            self.epoch, self.batches_done, self.of_epoch = self.epoch + 1, 0, Sums()
        every = config.checkpoint_every
        if last or every == 0 or (every > 0 and self.step % every == 0):
            self.save()

    def save(self) -> None:
        """A checkpoint from which training goes on bitwise as if it had not stopped."""
        buffers = self._copy_of_buffers()
        own = {
            "buffers": buffers,
            "random": torch.get_rng_state(),
            "of_epoch": dataclasses.asdict(self.of_epoch),
        }
        average_buffers(self.net)  # what others see is the model as it is validated
        shared = {
            "model": {**self.net.state_dict(), **self._copy_of_buffers()},
            "optimizer": self.optimizer.state_dict(),
            "settings": self._settings_of_steps(),
            "step": self.step,
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "of_run": dataclasses.asdict(self.of_run),
        }
        self._set_buffers(buffers)
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
        self.of_run = Sums(**shared["of_run"])
        if own is None or shared["settings"] != settings:
            return  # other batches than before: the epoch begins anew
        self.batches_done = shared["batches_done"]
        self._set_buffers(own["buffers"])
        torch.set_rng_state(own["random"])
        self.of_epoch = Sums(**own["of_epoch"])

    def _settings_of_steps(self) -> dict[str, Any]:
        """What decides which batches a step has, and what is kept of it."""
        names = ("optimizer", "batch_size", "nsteps_update", "seed")
        return {name: getattr(self.config, name) for name in names}

    def _copy_of_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.net.named_buffers()}

    def _diverged(self, why: str) -> UserError:
        return UserError(
            f"training diverged in step {self.step}: {why}. A smaller --lr, a smaller --clip or "
            "--norm-clip helps"
        )

    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.net.named_buffers():
            buffer.copy_(values[name])

    def _take_weights(self, path: str) -> None:
        """Begin with the weights that --pretrain names."""
        weights = attempt(lambda: read_weights(expanded(path)))
        try:
            self.net.load_state_dict(weights)
        except RuntimeError as error:
            lines = " ".join(str(error).split())[:300]
            raise UserError(f"--pretrain {path} does not fit the model: {lines}") from None

    def _choose_folder(self) -> tuple[Path, bool]:
        """Rank 0's choice: the run's folder, and whether to go on with what is in it."""
        config = self.config
        if self.rank:
            return Path(), False
        given = expanded(config.run_dir) if config.run_dir else None
        if config.resume == "auto":
            found = given if given and _has_checkpoint(given) else None
            if not given:
                found = latest_run(config.recipe or "run")
            if found:
                return found, True
        elif config.resume:
            folder = expanded(config.resume)
            if given and given != folder:
                raise UserError(f"--resume {folder} goes on there: leave out --run-dir {given}")
            if not _has_checkpoint(folder):
                raise UserError(f"--resume {folder}: no run with a checkpoint is there")
            return folder, True
        if given and _has_checkpoint(given):
            raise UserError(
                f"--run-dir {given} holds a run already: --resume auto goes on with it, another "
                "folder begins a new one"
            )
        return given or new_run_folder(config.recipe or "run"), False

    def _epochs_before(self) -> list[EpochRecord]:
        """Those of the run that is resumed; rank 0 reports them with its own."""
        return [] if self.rank else list(previous_epochs(self.folder, self.epoch))

    def _make_plan(self, weights_from: str) -> Plan:
        config = self.config
        per_epoch = self.workload.batches_per_epoch // config.nsteps_update
        left = (config.max_epochs - self.epoch + 1) * per_epoch
        left -= self.batches_done // config.nsteps_update
        steps = self.step + max(0, left)
        if config.max_steps is not None:
            steps = max(self.step, min(steps, config.max_steps))
        algorithm = self.handle.algorithm
        dense = isinstance(algorithm, Dense)
        parameters = sum(p.numel() for p in self.net.parameters())
        return Plan(
            config=config,
            folder=str(self.folder),
            workers=self.size,
            device=str(self.device),
            parameters=parameters,
            samples=self.workload.samples,
            epochs=config.max_epochs,
            steps_per_epoch=per_epoch,
            steps=steps,
            first_step=self.step,
            dense_steps=steps if dense else algorithm.warmup_steps,
            dense_bytes=round(2 * 4 * parameters * (self.size - 1) / self.size),
            weights_from=weights_from,
        )

    def _epoch_is_over(self) -> bool:
        done = self.batches_done // self.config.nsteps_update
        return done >= self.plan.steps_per_epoch or self.step >= self.plan.steps

    def _time_buckets(self, began: float) -> None:
        """Backward's time, to the buckets: each until it is ready, from when the one before was."""
        ready = self.handle.reducer.ready
        for index in sorted(range(len(ready)), key=ready.__getitem__):
            self.bucket_backward[index] += ready[index] - began
            began = ready[index]

    def _validating(self, done: int, total: int) -> None:
        for observer in self.observers:
            observer.validating(done, total)

    def _tell(self, what: str, about: object) -> bool:
        for observer in self.observers:
            getattr(observer, what)(about)
        return True

    def _outcome(self) -> Outcome:
        sums = self.of_run
        here = max(1, self.step - self.plan.first_step)
        usage = gather(memory(self.device))
        return Outcome(
            plan=self.plan,
            epochs=tuple(self.epochs) if self.rank == 0 else (),
            steps=self.step,
            sparse_steps=sums.sparse_steps,
            sparsity=sums.sparse_sparsity / max(1, sums.sparse_steps),
            compression_ratio=sums.compression_ratio,
            bytes_sent=sums.bytes_sent,
            dense_bytes=self.plan.dense_bytes * sums.steps,
            seconds=time.perf_counter() - self.started,
            step_seconds={part: seconds / here for part, seconds in self.seconds.items()},
            buckets=self._bucket_timings(here),
            memory={name: max(part[name] for part in usage) for name in usage[0]},
        )

    def _bucket_timings(self, steps: int) -> tuple[BucketTiming, ...]:
        timings = []
        buckets = self.handle.stats().buckets
        for bucket, backward in zip(buckets, self.bucket_backward, strict=True):
            seconds = {stage: s / steps for stage, s in bucket.totals.seconds.items()}
            timings.append(
                BucketTiming(
                    parameters=bucket.parameters,
                    numel=bucket.numel,
                    algorithm=bucket.algorithm,
                    sparsity=bucket.totals.sparsity,
                    bytes_sent=bucket.totals.bytes_sent / steps,
                    backward=backward / steps,
                    merge=seconds["accumulate"],
                    compression=seconds["select"],
                    allreduce=seconds["exchange"] + seconds["reduce"] + seconds["gather"],
                    demerge=seconds["apply"],
                )
            )
        return tuple(timings)


def no_broadcast() -> dict[str, Any]:
    """DDP's option not to broadcast buffers in every step; its name changed in torch 2.13.

    Running statistics are averaged once an epoch instead, when they are needed.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    new = "forward_sync_buffers"
    return {new if new in names else "broadcast_buffers": False}


def _has_checkpoint(folder: Path) -> bool:
    return os.path.exists(folder / CHECKPOINT / checkpoint.MANIFEST)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A model's state_dict from a run's folder, a checkpoint, or a file."""
    try:
        if path.is_dir():
            inner = path / CHECKPOINT
            found: Any = checkpoint.read_shared(inner if inner.is_dir() else path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--pretrain {path}: there is no such file or folder") from None
    except Exception as error:  # torch.load raises all sorts
        problem = " ".join(str(error).split())[:200] or "it is no file that torch.save wrote"
        raise UserError(f"--pretrain {path} cannot be read: {problem}") from None
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise UserError(f"--pretrain {path} holds no state_dict of a model")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}
