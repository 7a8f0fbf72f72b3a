"""Measurements of a run: sums over steps, times of buckets, memory."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..core.stats import StepStats, Summary
from ..workloads.base import Validation
from .kinds import KINDS
from .records import BucketTiming, EpochRecord, Faults, KindTotals, Outcome, Plan, StepRecord
from .step import PARTS


@dataclass
class Sums:
    """Sums over steps. Saved, so that a resumed run reports all of itself."""

    steps: int = 0
    sparse_steps: int = 0
    loss: float = 0.0
    sparsity: float = 0.0
    sparse_sparsity: float = 0.0
    """Of the sparse steps only."""
    elements: int = 0
    applied: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    data: float = 0.0
    """Seconds of waiting for batches."""
    busy: float = 0.0
    """Seconds that the communication thread worked."""
    waited: float = 0.0
    """Seconds of waiting for it after backward."""
    skipped_steps: int = 0
    discarded_steps: int = 0
    kinds: dict[str, list[int]] = field(default_factory=dict)
    """Of each kind of parameters, in sparse steps: elements, and those that were applied."""

    def add(self, record: StepRecord, stats: StepStats) -> None:
        sparse = record.phase == "sparse"
        self.steps += 1
        self.sparse_steps += sparse
        self.loss += record.loss
        self.sparsity += record.sparsity
        self.sparse_sparsity += record.sparsity if sparse else 0.0
        self.elements += stats.numel
        self.applied += stats.selected_global
        self.bytes_sent += record.bytes_sent
        self.seconds += record.seconds["total"]
        self.data += record.seconds["data"]
        self.busy += record.busy
        self.waited += record.seconds["synchronise"]
        self.skipped_steps += record.skipped

    @property
    def compression_ratio(self) -> float:
        return self.elements / max(1, self.applied)


class Meters:
    """Measurements of a run, of its current epoch, and of this process.

    Args:
        buckets: how many buckets of gradients there are.
        kinds: of each parameter; see `kinds_of`.
    """

    def __init__(self, buckets: int, kinds: Mapping[str, str]) -> None:
        self.of_epoch, self.of_run = Sums(), Sums()
        self._kinds, self._before = kinds, Sums()
        self._started = time.perf_counter()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._backward = [0.0] * buckets

    def add(self, record: StepRecord, stats: StepStats) -> None:
        for sums in (self.of_epoch, self.of_run):
            sums.add(record, stats)
        for part, seconds in record.seconds.items():
            self._seconds[part] += seconds

    def go_on(self, of_run: Sums) -> None:
        """Take over the sums of the run that is resumed."""
        self.of_run, self._before = of_run, copy.deepcopy(of_run)

    def count(self, summary: Summary) -> None:
        """Take over what the library counts, for a checkpoint or the end of the run."""
        run, before = self.of_run, self._before
        run.discarded_steps = before.discarded_steps + summary.totals.discarded_steps
        run.kinds = {kind: list(counts) for kind, counts in before.kinds.items()}
        for name, each in summary.parameters.items():
            counts = run.kinds.setdefault(self._kinds[name], [0, 0])
            counts[0] += each.elements
            counts[1] += each.applied

    def add_backward(self, began: float, ready: Sequence[float]) -> None:
        """Share out backward's time: a bucket has the time from when the one before was ready."""
        for index in sorted(range(len(ready)), key=ready.__getitem__):
            self._backward[index] += ready[index] - began
            began = ready[index]

    def epoch(self, record: StepRecord, loss: float, validation: Validation) -> EpochRecord:
        """The current epoch, after its last step.

        Args:
            loss: mean over steps and workers.
        """
        sums = self.of_epoch
        return EpochRecord(
            epoch=record.epoch,
            steps=record.step + 1,
            loss=loss,
            lr=record.lr,
            phase={0: "dense", sums.steps: "sparse"}.get(sums.sparse_steps, "mixed"),
            sparsity=sums.sparsity / sums.steps,
            compression_ratio=sums.compression_ratio,
            bytes_sent=sums.bytes_sent,
            seconds=sums.seconds,
            samples_per_second=sums.steps * record.samples / sums.seconds,
            waited_for_data=sums.data,
            validation=validation.metrics,
            examples=validation.examples,
        )

    def outcome(
        self,
        plan: Plan,
        steps: int,
        epochs: Sequence[EpochRecord],
        summary: Summary,
        memory: Sequence[dict[str, float]],
        skipped_samples: int = 0,
    ) -> Outcome:
        """The run, after its last step.

        Args:
            memory: of each worker.
            skipped_samples: by the workload, on this rank.
        """
        self.count(summary)
        sums, here = self.of_run, max(1, steps - plan.first_step)
        return Outcome(
            plan=plan,
            epochs=tuple(epochs),
            steps=steps,
            sparse_steps=sums.sparse_steps,
            sparsity=sums.sparse_sparsity / max(1, sums.sparse_steps),
            compression_ratio=sums.compression_ratio,
            bytes_sent=sums.bytes_sent,
            dense_bytes=plan.dense_bytes * sums.steps,
            seconds=time.perf_counter() - self._started,
            step_seconds={part: seconds / here for part, seconds in self._seconds.items()},
            buckets=self._buckets(summary, here),
            memory={name: max(part[name] for part in memory) for name in memory[0]},
            kinds=self._totals_by_kind(summary),
            busy=sums.busy,
            waited=sums.waited,
            faults=Faults(plan.resumed, sums.skipped_steps, sums.discarded_steps, skipped_samples),
            choice=summary.choice,
        )

    def _totals_by_kind(self, summary: Summary) -> dict[str, KindTotals]:
        numel = Counter[str]()
        for name, each in summary.parameters.items():
            numel[self._kinds[name]] += each.numel
        found = self.of_run.kinds
        return {kind: KindTotals(numel[kind], *found[kind]) for kind in KINDS if kind in found}

    def _buckets(self, summary: Summary, steps: int) -> tuple[BucketTiming, ...]:
        timings = []
        for bucket, backward in zip(summary.buckets, self._backward, strict=True):
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


def memory(device: torch.device) -> dict[str, float]:
    """Megabytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    megabytes = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6}
    if device.type == "cuda":
        megabytes["allocated"] = torch.cuda.memory_allocated(device) / 1e6
        megabytes["max_allocated"] = torch.cuda.max_memory_allocated(device) / 1e6
        megabytes["cached"] = torch.cuda.memory_reserved(device) / 1e6
    return megabytes
