"""Run folders for the tests of the report, made by the same classes as those of `oktopk train`."""

from __future__ import annotations

import math
import random
from pathlib import Path

from oktopk.core.detail import (
    BucketDetail,
    Detail,
    Histogram,
    Magnitudes,
    MessageCount,
    Staleness,
)
from oktopk.train.config.config import Config
from oktopk.train.records import (
    BucketTiming,
    EpochRecord,
    Faults,
    KindTotals,
    Outcome,
    Plan,
    StepRecord,
)
from oktopk.train.run_folder import RunFolder

ELEMENTS = (2_400_000, 900_000, 40_000)
"""Of each bucket."""
WORKERS, DENSITY = 4, 0.02
STAGES = ("accumulate", "select", "exchange", "reduce", "gather", "apply")


def make_run(
    folder: Path,
    steps: int = 200,
    *,
    dense_steps: int = 40,
    detail_every: int = 10,
    finished: bool = True,
    **settings: object,
) -> Path:
    """A run folder with all that is recorded, of a training that never happened.

    Args:
        dense_steps: the warm-up; `steps` or more for a dense run.
        detail_every: 0 records no looks into steps.
        settings: flags, such as `seed`.
    """
    made = _Made(folder, steps, dense_steps, Config.of(**{"recipe": "text", **settings}))
    kept = RunFolder(folder)
    kept.started(made.plan)
    per_epoch = made.plan.steps_per_epoch
    for step in range(steps):
        kept.stepped(made.step(step))
        turning = step in (dense_steps - 1, dense_steps, steps - 1)
        if detail_every and (step % detail_every == 0 or turning):
            kept.detailed(made.detail(step))
        if (step + 1) % per_epoch == 0:
            kept.epoch_ended(made.epoch(step))
    if finished:
        kept.finished(made.outcome())
    kept.close()
    return folder


def outcome_of(folder: Path, steps: int = 200) -> Outcome:
    """What a run of `make_run` ends with."""
    return _Made(folder, steps, 40, Config.of(recipe="text")).outcome()


class _Made:
    def __init__(self, folder: Path, steps: int, dense_steps: int, config: Config) -> None:
        self.steps, self.dense_steps, self.config = steps, dense_steps, config
        self.random = random.Random(config.run.seed)
        self.epochs: list[EpochRecord] = []
        per_epoch = max(1, steps // 5)
        self.plan = Plan(
            config=config,
            folder=str(folder),
            workers=WORKERS,
            device="cpu",
            parameters=sum(ELEMENTS),
            samples=8192,
            epochs=5,
            steps_per_epoch=per_epoch,
            steps=steps,
            first_step=0,
            dense_steps=dense_steps,
            dense_bytes=6 * sum(ELEMENTS),
        )

    def about(self, value: float, spread: float = 0.1) -> float:
        return value * self.random.lognormvariate(0, spread)

    def sparse(self, step: int) -> bool:
        return step >= self.dense_steps

    def loss(self, step: int) -> float:
        return 2.1 + 3.2 * math.exp(-6 * step / self.steps)

    def step(self, step: int) -> StepRecord:
        sparse, n = self.sparse(step), sum(ELEMENTS)
        target = round(DENSITY * n) if sparse else n
        applied = round(self.about(target, 0.03)) if sparse else n
        sent = round(self.about(2.2 * applied, 0.02)) if sparse else self.plan.dense_bytes
        means = (0.002, 0.001, 0.012, 0.002, 0.008, 0.001) if sparse else (0, 0, 0.13, 0.01, 0, 0)
        stages = {name: self.about(mean) for name, mean in zip(STAGES, means, strict=True)}
        busy = sum(stages.values())
        seconds = {
            "data": self.about(0.002),
            "forward": self.about(0.03),
            "backward": self.about(0.06),
            "synchronise": max(0.001, busy - self.about(0.03)),
            "update": self.about(0.006),
        }
        return StepRecord(
            step=step,
            epoch=step // self.plan.steps_per_epoch + 1,
            loss=self.about(self.loss(step), 0.05),
            lr=0.003 * (1 - step / self.steps) + 1e-6,
            grad_norm=self.about(2 if sparse else 1.2, 0.3),
            samples=64,
            phase="sparse" if sparse else "dense",
            sparsity=1 - applied / n,
            compression_ratio=n / applied,
            bytes_sent=sent,
            bytes_received=sent,
            seconds=seconds | {"total": sum(seconds.values())},
            target=target,
            offered=round(self.about(target, 0.05)),
            applied=applied,
            overflow=round(self.about(0.01 * target)) if sparse else 0,
            stages=stages,
            busy=busy,
        )

    def detail(self, step: int) -> Detail:
        sparse = self.sparse(step)
        return Detail(
            step=step,
            phase="sparse" if sparse else "dense",
            buckets=tuple(self.bucket(i, n, sparse) for i, n in enumerate(ELEMENTS)),
            staleness=self.staleness() if sparse else None,
            messages=tuple(self.messages(sparse)),
        )

    def bucket(self, index: int, n: int, sparse: bool) -> BucketDetail:
        k = max(1, round(DENSITY * n)) if sparse else n
        exact = 2.0**-9 if sparse else 0.0
        regions = [round(self.about(k / WORKERS)) for _ in range(WORKERS)] if sparse else []
        centre = 22 + (6 if sparse else 0)
        bell = [round(n * math.exp(-(((i - centre) / 5) ** 2)) / 9) for i in range(60)]
        return BucketDetail(
            index=index,
            numel=n,
            k=k,
            offered=k,
            applied=k,
            local_threshold=self.about(exact, 0.05) if sparse else 0.0,
            exact_threshold=exact,
            global_threshold=1.2 * exact,
            regions=tuple(regions),
            magnitudes=Magnitudes(lowest=-50, counts=tuple(bell)),
        )

    def staleness(self) -> Staleness:
        edges = (0, 1, 2, 4, 8, 16, 32, 64, 128)
        counts = tuple(round(self.about(c)) for c in (900, 400, 300, 240, 180, 90, 30, 9))
        return Staleness(self.about(5.0), 48, 120, self.about(22.0), 110, Histogram(edges, counts))

    def messages(self, sparse: bool) -> list[MessageCount]:
        if not sparse:
            return [MessageCount("allreduce", self.plan.dense_bytes, 10)]
        return [
            MessageCount("alltoall", 160_000, 30),
            MessageCount("alltoall", 128, 20),
            MessageCount("allgather", 42_000, 30),
        ]

    def stages_of_a_bucket(self) -> tuple[float, float, float, float, float]:
        return tuple(self.about(0.01) for _ in range(5))  # type: ignore[return-value]

    def epoch(self, step: int) -> EpochRecord:
        loss = self.about(self.loss(step), 0.01)
        record = EpochRecord(
            epoch=(step + 1) // self.plan.steps_per_epoch,
            steps=step + 1,
            loss=loss,
            lr=0.003,
            phase="mixed",
            sparsity=0.5,
            compression_ratio=20.0,
            bytes_sent=10**8,
            seconds=20.0,
            samples_per_second=500.0,
            waited_for_data=0.2,
            validation={"loss": 1.02 * loss, "bits_per_byte": 1.02 * loss / math.log(2)},
            examples=({"prompt": "def f(", "text": "self):\n    return self.x < 3"},),
        )
        self.epochs.append(record)
        return record

    def outcome(self) -> Outcome:
        sparse = max(0, self.steps - self.dense_steps)
        kinds = {
            "linear": (2_200_000, 0.019),
            "embedding": (900_000, 0.004),
            "recurrent": (200_000, 0.05),
            "norm": (20_000, 1.0),
            "bias": (20_000, 1.0),
        }
        return Outcome(
            plan=self.plan,
            epochs=tuple(self.epochs),
            steps=self.steps,
            sparse_steps=sparse,
            sparsity=0.979 if sparse else 0.0,
            compression_ratio=4.6 if sparse else 1.0,
            bytes_sent=10**9,
            dense_bytes=4 * 10**9,
            seconds=0.15 * self.steps,
            step_seconds={"forward": 0.03, "backward": 0.06, "total": 0.1},
            buckets=tuple(
                BucketTiming(
                    (f"layers.{i}.weight",), n, "oktopk", 0.98, 1e5, *self.stages_of_a_bucket()
                )
                for i, n in enumerate(ELEMENTS)
            ),
            memory={"peak_rss": 812.0},
            kinds={
                name: KindTotals(n, n * sparse, round(n * sparse * share))
                for name, (n, share) in kinds.items()
            }
            if sparse
            else {},
            busy=10.0,
            waited=3.0,
            faults=Faults(resumed=1 if self.config.run.seed == 2 else 0),
        )
