"""What is reduced together: options, parameters and their places in buckets."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from ..algorithms import Step
from .allreduce import SparseAllreduce
from .stats import BucketSummary, GroupSummary, Summary, Totals

DENSE_BELOW = 8192
"""Parameters with fewer elements are averaged densely. Biases and the parameters of norms are
below this in all but the widest models; together they are a thousandth of the elements, and a
wrong one hurts every output of its layer."""
BUCKET_MB = 25.0


class GradScaler(Protocol):
    """What is needed of torch.amp.GradScaler."""

    def get_scale(self) -> float: ...

    def is_enabled(self) -> bool: ...


@dataclass(frozen=True)
class Options:
    """How gradients are reduced, besides the algorithm. The same for DDP and without it."""

    scope: str = "bucket"
    """`bucket` selects within each bucket, and overlaps with backward; `model` selects over all
    gradients at once, as the paper does, after backward."""
    dense_below: int = DENSE_BELOW
    """Parameters with fewer elements than this are averaged densely, in one message."""
    dense: Sequence[str] = ()
    """Names of further parameters to average densely; `*` stands for anything."""
    bucket_mb: float = BUCKET_MB
    """Megabytes of gradient in a bucket. Smaller ones overlap better, larger ones take fewer
    messages."""
    norm_clip: float | None = None
    """Scales this rank's gradient to at most this norm before it enters the residual. The norm
    is that of all gradients, so communication begins when backward has ended."""
    momentum: float = 0.0
    """Above 0: DGC's momentum correction with factor masking. Ranks accumulate velocities
    instead of gradients; the optimizer must have no momentum of its own."""
    grad_scaler: GradScaler | None = None
    """The GradScaler that scales the loss, if any: residuals are kept unscaled, and in a step
    with an overflow anywhere all ranks get NaN, so that their scalers skip it together."""
    nonfinite: str = "raise"
    """What to do with a NaN or Inf on any rank where there is no GradScaler: `raise`
    NonFiniteGradientError on all ranks, or `skip` the step: averages are zero, and optimizers
    leave these parameters as they are."""
    cleared: str = "discard"
    """What to do when averages are cleared, by `zero_grad()`, say, before an optimizer has stepped
    with them: `discard` the step, as `handle.discard()` does, or `keep` it. Keep it if you use
    averages in another way than by an optimizer's step, for example to combine those of several
    losses."""

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options by name; what is wrong with them is a ValueError."""
        known = [field.name for field in fields(cls)]
        for option in options:
            if option not in known:
                raise ValueError(f"there is no option {option!r}; there are {', '.join(known)}")
        made = cls(**options)
        problem = made.problem()
        if problem:
            raise ValueError(problem)
        return made

    def problem(self) -> str | None:
        """What is wrong, and how to mend it."""
        if self.scope not in ("bucket", "model"):
            return f'scope is {self.scope!r}, but must be "bucket" or "model"'
        if self.nonfinite not in ("raise", "skip"):
            return f'nonfinite is {self.nonfinite!r}, but must be "raise" or "skip"'
        if self.cleared not in ("discard", "keep"):
            return f'cleared is {self.cleared!r}, but must be "discard" or "keep"'
        if not self.bucket_mb > 0:
            return f"bucket_mb is {self.bucket_mb!r}, but must be above 0"
        if self.norm_clip is not None and not self.norm_clip > 0:
            return f"norm_clip is {self.norm_clip!r}, but must be above 0, or None for no clipping"
        if not 0 <= self.momentum < 1:
            return f"momentum is {self.momentum!r}, but must be at least 0 and below 1"
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            return f"grad_scaler is {self.grad_scaler!r}, but must be a GradScaler, or None"
        if isinstance(self.dense, str):
            return f"dense is {self.dense!r}, but must be a list of names: [{self.dense!r}]"
        return None


@dataclass(frozen=True)
class Slot:
    """A parameter's place: its elements, in the order in which they lie in memory."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return self.size.numel()

    def shaped(self, flat: Tensor) -> Tensor:
        """A flat piece of memory seen as the parameter is."""
        return flat.as_strided(self.size, self.stride)


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced together."""

    slots: list[Slot]
    dense: bool
    """Whether this is a bucket of small parameters, always averaged densely."""
    reduce: SparseAllreduce
    totals: Totals = field(default_factory=Totals)
    applied: list[int] = field(default_factory=list)
    """Entries applied to each parameter so far."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """What has arrived in this step."""
    step: Step | None = None
    """The reduction of this step, not yet committed."""
    ready: float = 0.0
    """When the last gradient of the latest step came, by time.perf_counter."""

    @property
    def complete(self) -> bool:
        return len(self.gradients) == len(self.slots)

    def flat_pieces(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """A vector like the bucket's residual, parameter by parameter."""
        return zip(self.slots, flat.split([slot.numel for slot in self.slots]), strict=True)

    def pieces(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """The same, in the parameters' shapes."""
        for slot, part in self.flat_pieces(flat):
            yield slot, slot.shaped(part)


def slots_of(named_parameters: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    """The places of parameters, without empty ones.

    `empty_like` has the strides that their gradients have.
    """
    return [
        Slot(name, p.shape, torch.empty_like(p).stride(), p.dtype, p.device)
        for name, p in named_parameters
        if p.numel()
    ]


def cut(slots: Sequence[Slot], options: Options) -> list[tuple[list[Slot], bool]]:
    """Parameters of each bucket, and whether it is one that is always averaged densely.

    Backward makes the last parameters' gradients first, so these are in the first bucket. Those
    that are averaged densely come last, in one bucket, and so in one message. (One of each type,
    in a model with parameters of several types.)
    """

    def small(slot: Slot) -> bool:
        named = any(fnmatch.fnmatchcase(slot.name, pattern) for pattern in options.dense)
        return named or slot.numel < options.dense_below

    limit = math.inf if options.scope == "model" else options.bucket_mb * 1e6
    large = _group([slot for slot in reversed(slots) if not small(slot)], limit)
    rest = _group([slot for slot in reversed(slots) if small(slot)], math.inf)
    return [(group, False) for group in large] + [(group, True) for group in rest]


def _group(slots: list[Slot], limit: float) -> list[list[Slot]]:
    """Consecutive parameters of one type, at most `limit` bytes together."""
    open_buckets: dict[torch.dtype, list[Slot]] = {}
    done = []
    for slot in slots:
        bucket = open_buckets.setdefault(slot.dtype, [])
        size = sum(s.numel for s in bucket) + slot.numel
        if bucket and size * slot.dtype.itemsize > limit:
            done.append(bucket)
            bucket = open_buckets[slot.dtype] = []
        bucket.append(slot)
    return done + [bucket for bucket in open_buckets.values() if bucket]


def summarize(buckets: Sequence[Bucket], totals: Totals, busy: float, waited: float) -> Summary:
    """What became of all steps so far; see `Summary`."""
    groups: dict[str, list[GroupSummary]] = {}
    for bucket in buckets:
        for slot, applied in zip(bucket.slots, bucket.applied, strict=True):
            module = slot.name.rpartition(".")[0] or slot.name
            elements = slot.numel * bucket.totals.steps
            part = GroupSummary(slot.numel, bucket.dense, elements, applied)
            groups.setdefault(module + (" (small)" if bucket.dense else ""), []).append(part)
    return Summary(
        totals=copy.deepcopy(totals),
        buckets=tuple(
            BucketSummary(
                tuple(slot.name for slot in bucket.slots),
                bucket.reduce.numel,
                type(bucket.reduce.algorithm).__name__,
                copy.deepcopy(bucket.totals),
            )
            for bucket in buckets
        ),
        groups={
            name: GroupSummary(
                sum(part.numel for part in parts),
                parts[0].dense,
                sum(part.elements for part in parts),
                sum(part.applied for part in parts),
            )
            for name, parts in sorted(groups.items())
        },
        busy=busy,
        waited=waited,
    )
