"""The program of one rank of `oktopk bench`: `python -m oktopk.lab.bench.measure`, on each host.

It reads messages from its input and answers each of them: see `messages`. Ranks live for many jobs,
because starting them takes seconds. They end when their input does, so they never outlive their
parent.

Every rank measures itself, and answers with all of its steps. The parent takes the slowest rank of
each step. So measuring adds no traffic, except in the raw workload: there, a number travels between
steps and makes all ranks begin together.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ...algorithms import OkTopk
from ...common import host
from ...common.errors import UserError
from ...core.allreduce import SparseAllreduce
from ...core.transport import NonFiniteGradientError
from .budget import MEASURE, STOP, Budget, StopFile
from .contenders import BASELINE, parse
from .messages import (
    Answer,
    Course,
    End,
    Failed,
    FromRank,
    Job,
    Mistake,
    Progress,
    RawJob,
    Ready,
    Start,
    Step,
    Traffic,
    TrainingJob,
    decode,
    encode,
)
from .raw import Gradients, Raw

Say = Callable[[FromRank], None]
_STEPS_TO_WARM_UP = 10
_SECONDS_TO_WARM_UP = 20.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = _take_stdout()

    def say(message: FromRank) -> None:
        answers.write(encode(message))
        answers.flush()

    code = 1
    try:
        _serve(say)
        code = 0
    except UserError as error:
        say(Mistake(str(error)))
    except Exception as error:
        if lack := host.shortage(error):
            say(Mistake(f"{lack}: use fewer hosts, or a smaller --numel or model"))
        else:
            say(Failed(traceback.format_exc()))
    finally:
        os._exit(code)  # threads may wait for peers that are gone


def _take_stdout() -> IO[str]:
    """The way to the parent. Everything else that is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _serve(say: Say) -> None:
    """Join the group, and do all jobs."""
    start: Start = decode(sys.stdin.readline(), Start)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, start.folder), daemon=True).start()
    rank = Rank(start, say)
    say(Ready())
    while True:
        job: Job | End = decode(lines.get(), Job | End)
        if isinstance(job, End):
            return
        say(rank.run(job))


def _read(lines: queue.SimpleQueue[str], folder: str) -> None:
    for line in sys.stdin:
        lines.put(line)
    # The parent is gone, and could not clean up.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Rank:
    """One of the ranks. All of them do every job together."""

    def __init__(self, start: Start, say: Say) -> None:
        self.rank, self.size = start.rank, start.size
        self.folder = Path(start.folder)
        self.interface, self.counts = start.interface, start.counts
        self._say = say
        self._gradients: Gradients | None = None
        self._jobs = 0
        self._warm = False
        self._notes: list[str] = []
        if self.rank == 0:
            logging.getLogger("oktopk").addHandler(_Notes(self._notes))
            logging.getLogger("oktopk").setLevel(logging.INFO)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        torch.set_num_threads(start.threads)
        dist.init_process_group(
            "gloo",
            # Emulated hosts share their files, so no port is needed.
            store=FileStore(str(self.folder / "store"), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=start.timeout),
        )

    def run(self, job: Job) -> Answer:
        """Measure one contender."""
        self._jobs += 1
        if isinstance(job, TrainingJob) and not self._warm:
            self._warm_up(job)
            self._warm = True
            gc.collect()
        self._notes.clear()
        try:
            answer = self._raw(job) if isinstance(job, RawJob) else self._train(job)
        finally:
            gc.collect()  # the contender's memory, before the next one needs its own
        return replace(answer, notes=list(self._notes))

    def _raw(self, job: RawJob) -> Answer:
        gradients = self._gradients_for(job)
        raw = Raw(parse(job.contender, training=False), gradients.tensor, job.density)
        steps: list[Step] = []
        traffic: list[Traffic] = []
        budget = Budget(job)
        for index in range(job.first, sys.maxsize):
            gradients.prepare(index)
            phase = self._agree(budget.phase())
            traffic += self._traffic()
            if phase == STOP:
                break
            cpu, since = time.process_time(), time.perf_counter()
            cost = raw.step()
            seconds = time.perf_counter() - since
            cpu = time.process_time() - cpu
            steps.append(Step(cost, seconds, cpu, measured=phase == MEASURE))
            budget.taken(phase)
            self._tell(len(steps), job.steps)
        return Answer(job.numel, with_traffic(steps, traffic))

    def _gradients_for(self, job: RawJob) -> Gradients:
        """Made once for all contenders."""
        made = self._gradients
        if made is None or (made.numel, made.seed) != (job.numel, job.seed):
            made = self._gradients = None  # frees the memory first
            made = self._gradients = Gradients(job.numel, job.seed)
        return made

    def _train(self, job: TrainingJob) -> Answer:
        from ...train.step import Diverged
        from .training import Training  # needs the extras of the workload

        training = Training(job)
        steps: list[Step] = []
        failed = ""
        dist.barrier()
        stop = StopFile(self.folder / f"stop-{self._jobs}", self.rank, job.seconds)
        traffic, cpu, start = self._traffic(), time.process_time(), time.perf_counter()
        before = start
        with contextlib.closing(training.batches()) as batches:
            while len(steps) < training.steps and not stop.reached(len(steps)):
                try:
                    cost = training.step(batches)
                except (Diverged, NonFiniteGradientError) as error:  # on all ranks
                    failed = str(error).partition(". ")[0]
                    break
                now, cpu_now = time.perf_counter(), time.process_time()
                steps.append(Step(cost, now - before, cpu_now - cpu, elapsed=now - start))
                traffic += self._traffic()
                cpu, before = cpu_now, now
                self._tell(len(steps), training.steps)
        dist.barrier()
        traffic[-1:] = self._traffic()
        training.close()
        return Answer(
            sum(p.numel() for p in training.net.parameters()),
            with_traffic(steps, traffic),
            Course(
                steps_per_epoch=training.per_epoch,
                planned=training.steps,
                samples=training.config.run.batch_size
                * training.config.run.nsteps_update
                * self.size,
                dense_steps=training.contender.dense_steps(job.warmup_steps),
                failed=failed,
            ),
        )

    def _warm_up(self, job: TrainingJob) -> None:
        """Dense steps and a sparse one that are not measured.

        Some work is slow only once in a process: primitives for new shapes, allocators, files,
        kernels. Without this, the first contender would pay for it, which is dense.
        """
        from ...train.step import Diverged
        from .training import Training

        dense = replace(job, contender=BASELINE, density=None, steps=_STEPS_TO_WARM_UP)
        training = Training(dense)
        steps = min(_STEPS_TO_WARM_UP, training.per_epoch)
        until = time.perf_counter() + _SECONDS_TO_WARM_UP
        # From the second epoch on, short and long batches are mixed.
        with (
            contextlib.closing(training.batches(first_epoch=2)) as batches,
            contextlib.suppress(Diverged, NonFiniteGradientError),  # on all ranks
        ):
            for step in range(steps):
                if not self._agree(int(time.perf_counter() < until)):
                    break
                training.step(batches)
                self._tell(step + 1, steps)
        training.close()
        SparseAllreduce(OkTopk(density=0.1, warmup_steps=0), 1000)(torch.randn(1000))

    def _agree(self, mine: int) -> int:
        """Rank 0's number, for all; a barrier, too."""
        number = torch.tensor([mine if self.rank == 0 else 0])
        dist.all_reduce(number)
        return int(number)

    def _traffic(self) -> list[Traffic]:
        """The interface's counters; nothing if it does not count, or not for this rank alone."""
        found = interface_traffic(self.interface) if self.counts else None
        return [] if found is None else [found]

    def _tell(self, step: int, steps: int) -> None:
        if self.rank == 0:
            self._say(Progress(step, steps))


class _Notes(logging.Handler):
    """Keeps what the library logs for the parent."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.INFO)
        self._kept = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


def with_traffic(steps: Sequence[Step], counters: Sequence[Traffic]) -> list[Step]:
    """The steps with the bytes that were moved in each.

    Args:
        counters: before each step, and after the last; empty where the interface does not count.
    """
    if not counters:
        return list(steps)
    moved = [Traffic(b.sent - a.sent, b.received - a.received) for a, b in pairwise(counters)]
    return [replace(step, moved=each) for step, each in zip(steps, moved, strict=True)]


def interface_traffic(interface: str) -> Traffic | None:
    """The counters of an interface in this network namespace; None where there are none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.strip().partition(":")
            if name == interface:
                columns = numbers.split()
                return Traffic(sent=int(columns[8]), received=int(columns[0]))
    return None


if __name__ == "__main__":
    main()
