"""What happened in one step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import Self

from ..common.format import table
from .detail import Staleness

STAGES = ("accumulate", "select", "exchange", "reduce", "gather", "apply")


@dataclass(frozen=True)
class StepStats:
    """One step as one rank saw it. All numbers are finite, on dense and skipped steps too."""

    step: int
    """Number of this step, from 0."""
    phase: str
    """`sparse` if entries were applied, `dense` if all elements were."""
    numel: int
    """Elements of the gradient."""
    target: int
    """k, the number of entries asked for."""
    selected_local: int
    """Entries this rank offered."""
    selected_global: int
    """Entries applied, the same on every rank."""
    bytes_sent: int
    """Bytes this rank handed to torch.distributed, all of them; see transport.py."""
    bytes_received: int
    messages: int
    seconds: dict[str, float]
    """Seconds of each stage. Where one pass accumulates and selects, it counts as accumulate."""
    local_threshold: float
    """Magnitude that all entries this rank offered reach; 0 on dense steps."""
    global_threshold: float
    """Magnitude that all applied sums over ranks reach; 0 where there is no such limit."""
    skipped: bool = False
    """True if some rank had a NaN or Inf and the step was skipped (`nonfinite="skip"`)."""
    overflow: int = 0
    """Entries this rank held back because messages of fixed size had no room for them."""

    @property
    def density(self) -> float:
        """Share of elements applied."""
        return self.selected_global / self.numel

    @property
    def sparsity(self) -> float:
        return 1.0 - self.density

    @property
    def compression_ratio(self) -> float:
        """Elements per applied entry; the number of elements where none was applied."""
        return self.numel / max(1, self.selected_global)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        derived = ("density", "sparsity", "compression_ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class Stopwatch:
    """Seconds of each stage; a stage entered inside another is not counted twice.

    with stopwatch("exchange"):
        ...

    Where one stage follows the other, `lap` costs less.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stages: tuple[str, ...] = ()
        """The stage that is under way, and before it those that it was entered in."""
        self._since = time.perf_counter()

    def __call__(self, stage: str) -> Self:
        self._charge()
        self._stages = (*self._stages, stage)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._charge()
        self._stages = self._stages[:-1]

    def lap(self, stage: str) -> None:
        """The time since the last stage or lap ended, or since the start, belongs to this stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stages:
            self.seconds[self._stages[-1]] += now - self._since
        self._since = now


def together(parts: Sequence[StepStats]) -> StepStats:
    """One step of several buckets as one."""
    first = parts[0]
    sparse = [part for part in parts if part.phase == "sparse"]
    return StepStats(
        step=first.step,
        phase="sparse" if sparse else "dense",
        numel=sum([part.numel for part in parts]),
        target=sum([part.target for part in parts]),
        selected_local=sum([part.selected_local for part in parts]),
        selected_global=sum([part.selected_global for part in parts]),
        bytes_sent=sum([part.bytes_sent for part in parts]),
        bytes_received=sum([part.bytes_received for part in parts]),
        messages=sum([part.messages for part in parts]),
        seconds={stage: sum([part.seconds[stage] for part in parts]) for stage in STAGES},
        local_threshold=min((part.local_threshold for part in sparse), default=0.0),
        global_threshold=min((part.global_threshold for part in sparse), default=0.0),
        skipped=first.skipped,
        overflow=sum([part.overflow for part in parts]),
    )


@dataclass
class Totals:
    """Sums over steps."""

    steps: int = 0
    dense_steps: int = 0
    """Steps in which all elements were averaged."""
    skipped_steps: int = 0
    """Steps that were skipped because of a NaN or Inf."""
    discarded_steps: int = 0
    """Steps that were taken back because their averages were thrown away."""
    elements: int = 0
    """Elements of all gradients."""
    asked: int = 0
    """Entries that should have been applied."""
    applied: int = 0
    overflow: int = 0
    """Entries held back because messages of fixed size had no room for them."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def add(self, stats: StepStats) -> None:
        self.steps += 1
        self.dense_steps += stats.phase == "dense"
        self.skipped_steps += stats.skipped
        self.elements += stats.numel
        self.asked += stats.target
        self.applied += stats.selected_global
        self.overflow += stats.overflow
        self.bytes_sent += stats.bytes_sent
        self.bytes_received += stats.bytes_received
        self.messages += stats.messages
        for stage, seconds in stats.seconds.items():
            self.seconds[stage] += seconds

    @property
    def sparsity(self) -> float:
        """Mean share of elements that were not applied; 0 before the first step."""
        return 1.0 - self.applied / self.elements if self.elements else 0.0

    @property
    def compression_ratio(self) -> float:
        """Elements per applied entry; 1 before the first step."""
        return self.elements / max(1, self.applied) if self.elements else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        return asdict(self) | {
            "sparsity": self.sparsity,
            "compression_ratio": self.compression_ratio,
        }


@dataclass(frozen=True)
class BucketSummary:
    """The parameters of one bucket, and its totals."""

    parameters: tuple[str, ...]
    numel: int
    algorithm: str
    totals: Totals


@dataclass(frozen=True)
class GroupSummary:
    """The parameters of one module that are treated alike."""

    numel: int
    dense: bool
    """Whether they are always averaged densely, being small or named so."""
    elements: int
    applied: int

    @property
    def density(self) -> float:
        """Mean share of elements that were applied in a step."""
        return self.applied / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class ParameterSummary:
    """One parameter in sparse steps: those in which some bucket was sparse."""

    numel: int
    elements: int
    """Summed over sparse steps."""
    applied: int


@dataclass(frozen=True)
class Summary:
    """Totals and means since the start; `print` shows it as a table."""

    totals: Totals
    buckets: tuple[BucketSummary, ...]
    groups: dict[str, GroupSummary]
    """By the name of the module that the parameters belong to."""
    busy: float
    """Seconds that the communication thread worked."""
    waited: float
    """Seconds that the training thread waited for it. The rest was hidden behind backward."""
    parameters: dict[str, ParameterSummary] = field(default_factory=dict)
    """By name."""
    staleness: Staleness | None = None
    """How long entries waited; None unless steps are inspected, see `Handle.inspect`."""
    choice: str = ""
    """What `Auto` has chosen, and why; empty before that, and with other algorithms."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        return {
            "totals": self.totals.as_dict(),
            "buckets": [
                {
                    "parameters": list(bucket.parameters),
                    "numel": bucket.numel,
                    "algorithm": bucket.algorithm,
                    "totals": bucket.totals.as_dict(),
                }
                for bucket in self.buckets
            ],
            "groups": {
                name: asdict(group) | {"density": group.density}
                for name, group in self.groups.items()
            },
            "busy": self.busy,
            "waited": self.waited,
            "parameters": {name: asdict(each) for name, each in self.parameters.items()},
            "staleness": None if self.staleness is None else asdict(self.staleness),
            "choice": self.choice,
        }

    def __str__(self) -> str:
        totals = self.totals
        lines = [
            f"{totals.steps} steps, {totals.dense_steps} of them dense, "
            f"{totals.skipped_steps} skipped, {totals.discarded_steps} discarded; "
            f"{totals.bytes_sent / 1e6:,.1f} MB sent",
            f"sparsity {totals.sparsity:.2%}, {totals.compression_ratio:.1f} x fewer entries",
            f"communication thread busy {self.busy:.2f} s, waited for {self.waited:.2f} s: "
            + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in totals.seconds.items()),
            *([f"auto: {self.choice}"] if self.choice else []),
        ]
        if self.staleness is not None:
            waits = self.staleness
            lines.append(
                f"entries waited {waits.mean:.1f} steps on average, 99 % of them at most "
                f"{waits.p99}, the longest {waits.max}"
            )
        rows = [("bucket", "elements", "algorithm", "sparsity", "MB sent", "seconds")]
        for index, bucket in enumerate(self.buckets):
            seconds = sum(bucket.totals.seconds.values())
            sent = bucket.totals.bytes_sent / 1e6
            share = f"{bucket.totals.sparsity:.2%}"
            rows.append(
                (
                    str(index),
                    f"{bucket.numel:,}",
                    bucket.algorithm,
                    share,
                    f"{sent:,.1f}",
                    f"{seconds:.2f}",
                )
            )
        lines += ["", *table(rows, left=0)]
        groups = [("module", "elements", "averaged", "applied a step")]
        for name, group in self.groups.items():
            how = "densely" if group.dense else "sparsely"
            groups.append((name, f"{group.numel:,}", how, f"{group.density:.2%}"))
        return "\n".join([*lines, "", *table(groups, left=0)])
