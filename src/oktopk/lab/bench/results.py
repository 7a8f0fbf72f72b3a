"""What `oktopk bench` found: from the ranks' records of their steps to results."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The middle of many values, and the quarters of them below and above."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class Setting:
    """Where contenders are compared: only results of one setting, and of one run, are."""

    workload: str
    """`raw` or `train`."""
    hosts: int
    """Ranks, P: one on each host."""
    rate: str | None
    """Of a host's link, as it was asked for; None: not limited."""
    bits: float | None
    """The same in bits a second."""
    delay: str | None
    """One way."""
    loss: float
    """Per cent of packets that are lost."""
    loopback: bool
    """No emulated network, but the machine's loopback, whose bytes cost next to nothing."""
    cores: int
    threads: int
    """Of each rank."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks wait for each other's computing, as they would not on real hosts."""
        return self.hosts * self.threads > self.cores

    @property
    def link(self) -> str:
        """For people."""
        if self.loopback:
            return "loopback, not shaped"
        lost = f", {self.loss:g} % lost" if self.loss else ""
        return (
            (self.rate or "unlimited rate") + (f", {self.delay} delay" if self.delay else "") + lost
        )


@dataclass(frozen=True)
class Result:
    """One contender in one setting. Seconds are of a step, but where it says otherwise."""

    setting: Setting
    contender: str
    """As it was written."""
    density: float | None
    """None where there is no such thing."""
    numel: int
    """Elements of the gradient."""
    steps: int
    """That were measured."""
    seconds: Spread
    """Of the slowest rank in each step."""
    speedup: float | None
    """Median of dense in the same setting and run, over this median; in training, both of the steps
    that both took, as batches differ. None if there are none."""
    compute: float
    """Median over steps of the ranks' mean; for training what is not `communication`."""
    communication: float
    """The same: exchanging and waiting; for training all that backward takes after the last
    gradient is computed, compression included."""
    cpu: float
    """Seconds of a core that a rank used, all its threads and the kernel's work for it."""
    stages: dict[str, float]
    """As `compute`; empty where stages are not known."""
    bytes_counted: float
    """That a rank hands over, by our count: 2m(P-1)/P for an allreduce of m bytes."""
    bytes_sent: float | None
    """By the interface's counter, protocols included; None on loopback."""
    bytes_received: float | None
    applied: float | None = None
    """Raw: mean number of elements that were applied."""
    notes: list[str] = field(default_factory=list)
    """Warnings, and why training ended early."""

    # Training only.
    samples_per_second: float | None = None
    """Over all steps, a dense warm-up included."""
    total_seconds: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    """Of the slowest rank in every step; the last `steps` of them are measured."""
    final_loss: float | None = None
    """Mean of the last `window` steps."""
    curve: list[list[float]] = field(default_factory=list)
    """Seconds since the start, and the mean loss of the last `window` steps."""
    window: int | None = None
    target_loss: float | None = None
    seconds_to_target: float | None = None
    """None if it was not reached."""
    target_speedup: float | None = None
    """Dense's seconds to the target over this one's."""

    @property
    def name(self) -> str:
        """The contender, with its density where it does not say it itself."""
        return full_name(self.contender, self.density)

    def check(self) -> None:
        """ValueError if nobody can have measured this: files get damaged."""
        if self.setting.workload not in ("raw", "train"):
            raise ValueError(f"setting.workload is {self.setting.workload!r}")
        if any(len(point) != 2 for point in self.curve):
            raise ValueError(f"the curve of {self.name} has points without two numbers")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}")


def full_name(contender: str, density: float | None) -> str:
    """A contender, with its density where it does not say it itself."""
    if density is None or "density=" in contender:
        return contender
    return f"{contender}{',' if ':' in contender else ':'}density={density:g}"


def summarize(
    setting: Setting,
    contender: str,
    density: float | None,
    pieces: Sequence[Sequence[Mapping[str, Any]]],
    steady_from: int = 0,
) -> Result:
    """The result of a job, done in one piece or several.

    Args:
        pieces: every rank's answer, for each piece.
        steady_from: earlier steps are left out of all but the curve.
    """
    steps = [step for piece in pieces for step in _by_step(piece)][steady_from:]
    measured = [step for step in steps if step[0]["measured"]]
    notes = [note for piece in pieces for note in piece[0]["notes"]]
    first = measured[0][0]

    def middle(name: str) -> float:
        return statistics.median(statistics.fmean(r[name] for r in step) for step in measured)

    def stage(name: str) -> float:
        means = [statistics.fmean(r["stages"][name] for r in step) for step in measured]
        return statistics.median(means)

    def traffic(which: int) -> float | None:
        if first["moved"] is None:
            return None
        return statistics.fmean(r["moved"][which] for step in measured for r in step)

    applied = "applied" in first
    return Result(
        setting=setting,
        contender=contender,
        density=density,
        numel=pieces[0][0]["numel"],
        steps=len(measured),
        seconds=Spread.of([max(r["seconds"] for r in step) for step in measured]),
        speedup=None,
        compute=middle("compute"),
        communication=middle("communication"),
        cpu=middle("cpu"),
        stages={name: stage(name) for name in first.get("stages", ())},
        bytes_counted=statistics.fmean(r["bytes"] for step in measured for r in step),
        bytes_sent=traffic(0),
        bytes_received=traffic(1),
        applied=statistics.fmean(step[0]["applied"] for step in measured) if applied else None,
        notes=list(dict.fromkeys(notes)),
    )


def _by_step(piece: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Records of all ranks, step by step, each with the bytes that its interface moved."""
    ranks = []
    for answer in piece:
        records = [dict(record) for record in answer["steps"]]
        readings = [*(record.pop("traffic") for record in records), answer["traffic"]]
        for record, before, after in zip(records, readings, readings[1:], strict=False):
            record["moved"] = before and [b - a for a, b in zip(before, after, strict=True)]
        ranks.append(records)
    return list(zip(*ranks, strict=True))


def add_training(result: Result, answers: Sequence[Mapping[str, Any]]) -> Result:
    """The curve, and what follows from it."""
    first, steps = answers[0], _by_step(answers)
    ends = [max(record["elapsed"] for record in step) for step in steps]
    losses = [statistics.fmean(record["loss"] for record in step) for step in steps]
    # An epoch: batches of long utterances have larger losses than those of short ones, and the
    # first epoch goes from short to long.
    window = max(1, min(first["per_epoch"], first["planned"] // 2))
    means = [
        statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, 1 + len(losses))
    ]
    ended = [first["failed"]] if first["failed"] else []
    planned = first["planned"]
    if not ended and len(steps) < planned:
        ended = [
            f"ended by --seconds after {len(steps)} of {planned} steps: ms and samples/s are of "
            "fewer batches than others', x dense is of the steps that both took"
        ]
    if len(steps) < first["dense_steps"] + 2:
        ended.append("it took none but dense steps, so its time says nothing about others")
    return dataclasses.replace(
        result,
        samples_per_second=first["samples"] * len(steps) / ends[-1],
        total_seconds=ends[-1],
        step_seconds=[max(record["seconds"] for record in step) for step in steps],
        final_loss=None if first["failed"] else means[-1],
        curve=[
            [round(s, 4), loss] for s, loss in zip(ends, means, strict=True) if math.isfinite(loss)
        ],
        window=window,
        notes=[*ended, *result.notes],
    )


def compare(
    results: Sequence[Result], target_loss: float | None, baseline: str = "dense"
) -> list[Result]:
    """Results of one setting, with their ratios to dense.

    Args:
        target_loss: of training; None takes the loss that dense has at its end.
        baseline: the contender that is meant by dense; it may have no result.
    """
    dense = next((result for result in results if result.contender == baseline), None)
    target = target_loss
    if target is None and dense and dense.window and len(dense.curve) >= dense.window:
        target = dense.final_loss
    until = _seconds_to(dense, target) if dense else None
    compared = []
    for result in results:
        speedup = _speedup(dense, result) if dense else None
        if result.setting.workload == "raw":
            compared.append(dataclasses.replace(result, speedup=speedup))
            continue
        seconds = _seconds_to(result, target)
        compared.append(
            dataclasses.replace(
                result,
                speedup=speedup,
                target_loss=target,
                seconds_to_target=seconds,
                target_speedup=until / seconds if until and seconds else None,
            )
        )
    return compared


def _speedup(dense: Result, result: Result) -> float | None:
    if result.setting.workload == "raw":
        return dense.seconds.median / result.seconds.median
    both = (dense, result)
    common = slice(
        max(len(each.step_seconds) - each.steps for each in both),
        min(len(each.step_seconds) for each in both),
    )
    theirs, own = (each.step_seconds[common] for each in both)
    return statistics.median(theirs) / statistics.median(own) if own else None


def _seconds_to(result: Result, target: float | None) -> float | None:
    """When the mean loss of a whole window was first no larger than this."""
    if target is None or result.window is None:
        return None
    whole = result.curve[result.window - 1 :]
    return next((seconds for seconds, loss in whole if loss <= target), None)


def cores() -> int:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
