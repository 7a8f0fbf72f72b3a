"""The results of `oktopk bench`, and how they follow from the steps that ranks measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..losses import running_means, seconds_to, window_of
from .messages import Answer, Course, Step


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of many values."""

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
    """The conditions of a comparison. Only results of one setting, in one run, are compared."""

    workload: str
    """`raw` or `train`."""
    hosts: int
    """Ranks, P: one on each host."""
    rate: str | None
    """Of a host's link, as the user wrote it; None: not limited."""
    bits: float | None
    """The same in bits a second."""
    delay: str | None
    """One way."""
    loss: float
    """Per cent of packets that are lost."""
    loopback: bool
    """The machine's loopback, where bytes cost next to nothing, instead of an emulated network."""
    cores: int
    threads: int
    """Of each rank."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks wait for each other's computing, which they would not on real hosts."""
        return self.hosts * self.threads > self.cores

    @property
    def link(self) -> str:
        """A description of the link."""
        if self.loopback:
            return "loopback, not shaped"
        lost = f", {self.loss:g} % lost" if self.loss else ""
        return (
            (self.rate or "unlimited rate") + (f", {self.delay} delay" if self.delay else "") + lost
        )


@dataclass(frozen=True)
class Result:
    """One contender in one setting. Times are seconds of a step unless stated otherwise."""

    setting: Setting
    contender: str
    """As the user wrote it."""
    density: float | None
    """None for contenders without one."""
    numel: int
    """Elements of the gradient."""
    steps: int
    """Steps that were measured."""
    seconds: Spread
    """Of the slowest rank in each step."""
    speedup: float | None
    """Median of dense in the same setting and run, over this median. In training, both medians are
    of the steps that both took, because batches differ. None if there are none."""
    compute: float
    """Median over steps of the ranks' mean; in training, everything but `communication`."""
    communication: float
    """The same for exchanging and waiting; in training, the time of backward after the last
    gradient is computed, compression included."""
    cpu: float
    """Seconds of a core that a rank used: all its threads, and the system's work for them."""
    stages: dict[str, float]
    """Parts of a step, as `compute`; empty where they are not known."""
    bytes_counted: float
    """Bytes that a rank sends, by our count: 2m(P-1)/P for an allreduce of m bytes."""
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
        """ValueError if this cannot have been measured, because its file is damaged."""
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
    pieces: Sequence[Sequence[Answer]],
    steady_from: int = 0,
) -> Result:
    """The result of a contender, whose steps were taken in one job or several.

    Args:
        pieces: every rank's answer, for each job.
        steady_from: the first step that counts.
    """
    steps = [step for piece in pieces for step in _by_step(piece)][steady_from:]
    measured = [step for step in steps if step[0].measured]
    costs = [[record.cost for record in step] for step in measured]
    applied = [step[0].applied for step in costs if step[0].applied is not None]
    moved = [record.moved for step in measured for record in step if record.moved is not None]
    return Result(
        setting=setting,
        contender=contender,
        density=density,
        numel=pieces[0][0].numel,
        steps=len(measured),
        seconds=Spread.of(_slowest(measured)),
        speedup=None,
        compute=_middle([cost.compute for cost in step] for step in costs),
        communication=_middle([cost.communication for cost in step] for step in costs),
        cpu=_middle([record.cpu for record in step] for step in measured),
        stages={
            name: _middle([cost.stages[name] for cost in step] for step in costs)
            for name in costs[0][0].stages
        },
        bytes_counted=statistics.fmean(cost.nbytes for step in costs for cost in step),
        bytes_sent=statistics.fmean(each.sent for each in moved) if moved else None,
        bytes_received=statistics.fmean(each.received for each in moved) if moved else None,
        applied=statistics.fmean(applied) if applied else None,
        notes=list(dict.fromkeys(note for piece in pieces for note in piece[0].notes)),
    )


def _by_step(answers: Sequence[Answer]) -> list[tuple[Step, ...]]:
    """For each step, the records of all ranks."""
    return list(zip(*(answer.steps for answer in answers), strict=True))


def _slowest(steps: Iterable[Sequence[Step]]) -> list[float]:
    return [max(record.seconds for record in step) for step in steps]


def _middle(steps: Iterable[Sequence[float]]) -> float:
    """The median over steps of the ranks' mean."""
    return statistics.median(statistics.fmean(ranks) for ranks in steps)


def add_training(result: Result, answers: Sequence[Answer]) -> Result:
    """The same result, with everything that only training has: the curve, the losses."""
    course, steps = answers[0].course, _by_step(answers)
    assert course is not None
    ends = [max(record.elapsed for record in step) for step in steps]
    losses = [statistics.fmean(_loss(record) for record in step) for step in steps]
    window = window_of(course.steps_per_epoch, course.planned)
    means = running_means(losses, window)
    return dataclasses.replace(
        result,
        samples_per_second=course.samples * len(steps) / ends[-1],
        total_seconds=ends[-1],
        step_seconds=_slowest(steps),
        final_loss=None if course.failed else means[-1],
        curve=[
            [round(s, 4), loss] for s, loss in zip(ends, means, strict=True) if math.isfinite(loss)
        ],
        window=window,
        notes=[*_endings(course, len(steps)), *result.notes],
    )


def _loss(record: Step) -> float:
    return math.nan if record.cost.loss is None else record.cost.loss


def _endings(course: Course, steps: int) -> Iterator[str]:
    """Why there are fewer steps than planned, or none that says anything."""
    if course.failed:
        yield course.failed
    elif steps < course.planned:
        yield (
            f"ended by --seconds after {steps} of {course.planned} steps: ms and samples/s are of "
            "fewer batches than others', x dense is of the steps that both took"
        )
    if steps < course.dense_steps + 2:
        yield "it took only dense steps, so its time says nothing about others"


def compare(
    results: Sequence[Result], target_loss: float | None, baseline: str = "dense"
) -> list[Result]:
    """Results of one setting, with their ratios to dense.

    Args:
        target_loss: of training; None takes the loss that dense has at its end.
        baseline: the contender that is dense; it may have no result.
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
    return None if result.window is None else seconds_to(result.curve, result.window, target)
