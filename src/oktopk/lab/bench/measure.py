"""What a rank of `oktopk bench` runs: `python -m oktopk.lab.bench.measure`, on each host.

It reads lines of JSON and answers each with lines of JSON. The first line says who it is, the
others are jobs: one contender, measured. Ranks live for many jobs, since to start them takes
seconds. They end with their parent, whatever becomes of it: when their input does.

Every rank measures itself, and answers with its records of all steps. The parent takes the slowest
rank of each step. So nothing travels for the sake of measuring, but in the raw workload a number
between steps, which makes all ranks begin together.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ...algorithms import OkTopk
from ...common import host as room
from ...common.errors import UserError
from ...core.allreduce import SparseAllreduce
from ...core.transport import NonFiniteGradientError
from .contenders import BASELINE, parse
from .raw import Gradients, Raw

Say = Callable[[Mapping[str, Any]], None]
_STOP, _WARM_UP, _MEASURE = 0, 1, 2
_STEPS_TO_WARM_UP = 10
_SECONDS_TO_WARM_UP = 20.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = _take_stdout()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        rank = Rank(json.loads(lines.get()), say)
        say({"ready": os.getpid()})
        while job := json.loads(lines.get()):
            say({"done": rank.run(job)})
    except UserError as error:
        say({"mistake": str(error)})
        os._exit(1)
    except Exception as error:
        if lack := room.shortage(error):
            say({"mistake": f"{lack}: use fewer hosts, or a smaller --numel or model"})
        else:
            say({"failed": traceback.format_exc()})
        os._exit(1)  # threads may wait for peers that are gone
    answers.close()
    os._exit(0)


def _take_stdout() -> IO[str]:
    """The way to the parent; what anything else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _read(lines: queue.SimpleQueue[str]) -> None:
    folder = ""
    for line in sys.stdin:
        folder = folder or json.loads(line)["folder"]
        lines.put(line)
    # The parent is gone, and could not clean up.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Rank:
    """One of the ranks. Every job is done by all of them together."""

    def __init__(self, plan: Mapping[str, Any], say: Say) -> None:
        self.rank, self.size = int(plan["rank"]), int(plan["size"])
        self.folder = Path(plan["folder"])
        self.interface: str = plan["interface"]
        # With several ranks behind an interface it counts what is not one's own.
        self.counts: bool = plan["counts"]
        self._say = say
        self._gradients: Gradients | None = None
        self._made_for: tuple[int, int] | None = None
        self._warm = False
        self._notes: list[str] = []
        if self.rank == 0:
            logging.getLogger("oktopk").addHandler(_Notes(self._notes))
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        torch.set_num_threads(plan["threads"])
        dist.init_process_group(
            "gloo",
            # Hosts that are emulated share their files, which needs no port.
            store=FileStore(str(self.folder / "store"), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=plan["timeout"]),
        )

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Records of a job: of each step, and what there is to say about all."""
        if job["workload"] == "train" and not self._warm:
            self._warm_up(job)
            self._warm = True
            gc.collect()
        self._notes.clear()
        try:
            found = self._raw(job) if job["workload"] == "raw" else self._train(job)
        finally:
            gc.collect()  # the contender's memory, before the next one needs its own
        return {**found, "notes": list(self._notes)}

    def _raw(self, job: Mapping[str, Any]) -> dict[str, Any]:
        numel, seed = job["numel"], job["seed"]
        if self._made_for != (numel, seed):
            self._gradients, self._made_for = None, None
            self._gradients, self._made_for = Gradients(numel, seed), (numel, seed)
        gradients = self._gradients
        assert gradients is not None
        raw = Raw(parse(job["contender"], training=False), gradients.tensor, job["density"])
        steps: list[dict[str, Any]] = []
        budget = _Budget(job)
        for index in range(job["first"], sys.maxsize):
            gradients.prepare(index)
            phase = self._agree(budget.phase())
            if phase == _STOP:
                break
            traffic, cpu, since = self._traffic(), time.process_time(), time.perf_counter()
            record = raw.step()
            seconds = time.perf_counter() - since
            record |= {"seconds": seconds, "cpu": time.process_time() - cpu, "traffic": traffic}
            budget.taken(phase)
            self._tell(len(steps), job)
            steps.append({**record, "measured": phase == _MEASURE})
        return {"steps": steps, "traffic": self._traffic(), "numel": numel}

    def _train(self, job: Mapping[str, Any]) -> dict[str, Any]:
        from .training import Diverged, Training, make_config  # needs the extra `speech`

        contender = parse(job["contender"], training=True)
        config = make_config(job["recipe"], job["values"], contender, job["warmup_steps"])
        buckets = {**job["values"], **contender.training}.get("bucket_mb")
        training = Training(config, contender, job["density"], job["steps"], buckets)
        steps: list[dict[str, Any]] = []
        failed = ""
        dist.barrier()
        stop = _StopFile(self.folder / f"stop-{job['number']}", self.rank, job["seconds"])
        traffic, cpu, start = self._traffic(), time.process_time(), time.perf_counter()
        before = start
        with contextlib.closing(training.batches()) as batches:
            while len(steps) < training.steps and not stop.reached(len(steps)):
                try:
                    record = training.step(batches)
                except (Diverged, NonFiniteGradientError) as error:  # on all ranks
                    failed = str(error).partition(". ")[0]
                    break
                now, cpu_now = time.perf_counter(), time.process_time()
                record |= {"seconds": now - before, "elapsed": now - start, "cpu": cpu_now - cpu}
                steps.append({**record, "traffic": traffic, "measured": True})
                traffic, cpu, before = self._traffic(), cpu_now, now
                self._tell(len(steps) - 1, {"steps": training.steps})
        dist.barrier()
        ended = self._traffic()
        training.close()
        return {
            "steps": steps,
            "traffic": ended,
            "failed": failed,
            "numel": sum(p.numel() for p in training.net.parameters()),
            "per_epoch": training.per_epoch,
            "planned": training.steps,
            "samples": config.batch_size * self.size,
            "optimizer": config.optimizer,
            "lr": config.lr,
            "dense_steps": contender.dense_steps(job["warmup_steps"]),
        }

    def _warm_up(self, job: Mapping[str, Any]) -> None:
        """Dense steps and a sparse one that are not measured. What is slow only once in a process
        (primitives for new shapes, allocators, files, kernels) would else be the first contender's
        to pay, which is dense."""
        from .training import Diverged, Training, make_config

        dense = parse(BASELINE, training=True)
        config = make_config(job["recipe"], job["values"], dense, 0)
        training = Training(config, dense, None, _STEPS_TO_WARM_UP)
        steps = min(_STEPS_TO_WARM_UP, training.per_epoch)
        until = time.perf_counter() + _SECONDS_TO_WARM_UP
        # From the second epoch on, short and long batches are mixed.
        with (
            contextlib.closing(training.speech.batches(2)) as batches,
            contextlib.suppress(Diverged, NonFiniteGradientError),  # on all ranks
        ):
            for step in range(steps):
                if not self._agree(int(time.perf_counter() < until)):
                    break
                training.step(batches)
                self._tell(step, {"steps": steps})
        training.close()
        SparseAllreduce(OkTopk(density=0.1, warmup_steps=0), 1000)(torch.randn(1000))

    def _agree(self, mine: int) -> int:
        """Rank 0's number, for all; a barrier, too."""
        number = torch.tensor([mine if self.rank == 0 else 0])
        dist.all_reduce(number)
        return int(number)

    def _traffic(self) -> list[int] | None:
        """Bytes that the interface has sent and received, if it counts."""
        return interface_bytes(self.interface) if self.counts else None

    def _tell(self, step: int, job: Mapping[str, Any]) -> None:
        if self.rank == 0:
            self._say({"step": step + 1, "steps": job["steps"]})


class _Budget:
    """How many steps there are: as many as asked for, but at slow links no more than there is time
    for. Rank 0's word counts."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._settle, self._skip, self._steps = job["settle"], job["skip"], job["steps"]
        self._least, self._seconds = job["least"], job["seconds"]
        self._counts = {_WARM_UP: 0, _MEASURE: 0}
        self._start = time.perf_counter()
        self._since: float | None = None

    def phase(self) -> int:
        """Of the next step."""
        now = time.perf_counter()
        skipped, measured = self._counts[_WARM_UP], self._counts[_MEASURE]
        # Most of those to skip only make results better, so they may not take all the time.
        in_time = skipped < self._settle or now - self._start < self._seconds / 2
        if not measured and skipped < self._skip and in_time:
            return _WARM_UP
        if self._since is None:
            self._since = now
        late = measured >= self._least and now - self._since > self._seconds
        return _STOP if late or measured >= self._steps else _MEASURE

    def taken(self, phase: int) -> None:
        self._counts[phase] += 1


class _StopFile:
    """Tells all ranks after which step time is up, without a message: rank 0 writes it to a file.

    It does so before a step that is to be the last. No other rank can be past it by then, as every
    step needs all ranks.
    """

    def __init__(self, path: Path, rank: int, seconds: float) -> None:
        self._path, self._rank = path, rank
        self._until = time.perf_counter() + seconds
        self._last: int | None = None

    def reached(self, done: int) -> bool:
        if self._last is None and self._rank == 0 and time.perf_counter() > self._until:
            self._last = done + 1
            part = self._path.with_suffix(".part")
            part.write_text(str(self._last))
            part.replace(self._path)
        elif self._last is None and self._path.exists():
            self._last = int(self._path.read_text())
        return self._last is not None and done >= self._last


class _Notes(logging.Handler):
    """Keeps warnings for the parent."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


def interface_bytes(interface: str) -> list[int] | None:
    """Bytes that an interface has sent and received since it is up; None where nobody counts."""
    try:
        text = Path("/proc/self/net/dev").read_text()  # that of this network namespace
    except OSError:
        return None
    for line in text.splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == interface:
            columns = numbers.split()
            return [int(columns[8]), int(columns[0])]
    return None


if __name__ == "__main__":
    sys.exit(main())
