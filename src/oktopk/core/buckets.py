"""Buckets: which tensors are reduced together, and the options for reducing them."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from .detail import Staleness
from .events import Events
from .reduction import RESIDUAL_DTYPE, Attempt, Reduction
from .stats import BucketSummary, GroupSummary, ParameterSummary, Summary, Totals

DENSE_BELOW = 8192
"""Parameters with fewer elements are averaged densely. Biases and the parameters of norms are
below this in all but the widest models; together they are a thousandth of the elements, and a
wrong one hurts every output of its layer."""
BUCKET_MB = 25.0


class GradScaler(Protocol):
    """The methods of torch.amp.GradScaler that are needed here."""

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
        """Options by name. Raises ValueError if they are wrong."""
        known = [field.name for field in fields(cls)]
        for option in options:
            if option not in known:
                raise ValueError(f"there is no option {option!r}; there are {', '.join(known)}")
        made = cls(**options)
        problem = made.problem()
        if problem:
            raise ValueError(problem)
        return made

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler, if it is enabled."""
        scaler = self.grad_scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    def problem(self) -> str | None:
        """The first mistake, and how to correct it; None if there is none."""
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
    """One named tensor's range in a bucket: its elements, in the order of their memory."""

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
    small: bool
    """Whether this is a bucket of small parameters, always averaged densely."""
    reduction: Reduction
    totals: Totals = field(default_factory=Totals)
    applied: list[int] = field(default_factory=list)
    """Entries applied to each parameter so far."""
    dense_steps: int = 0
    """Steps among them in which all elements of all buckets were applied."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that have arrived in this step, by parameter."""
    attempt: Attempt | None = None
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


def slots_of(named_tensors: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    """The slots of tensors, without empty ones.

    `empty_like` has the strides that their gradients have.
    """
    return [
        Slot(name, tensor.shape, torch.empty_like(tensor).stride(), tensor.dtype, tensor.device)
        for name, tensor in named_tensors
        if tensor.numel()
    ]


def problem_of(slots: Sequence[Slot]) -> str | None:
    """Why these tensors cannot be reduced, and what to do."""
    if not slots:
        return "there is no parameter to train: all of them have requires_grad=False"
    [(name, count)] = Counter(slot.name for slot in slots).most_common(1)
    if count > 1:
        return f"{count} tensors have the name {name}, but names must be unique"
    for slot in slots:
        if slot.dtype.is_complex:
            return (
                f"{slot.name} is complex, but parameters must be real: make it one of "
                "torch.view_as_real(...), and use torch.view_as_complex in forward"
            )
        if slot.dtype not in RESIDUAL_DTYPE:
            known = ", ".join(map(str, RESIDUAL_DTYPE))
            return f"{slot.name} is {slot.dtype}, but must be one of {known}"
    devices = {str(slot.device) for slot in slots}
    if len(devices) > 1:
        return (
            f"parameters are on {', '.join(sorted(devices))}, but must be on one device in each "
            "process: move the model with .to(device) first"
        )
    return None


def cut(slots: Sequence[Slot], options: Options) -> list[tuple[list[Slot], bool]]:
    """The slots of each bucket, and whether it is a small one, always averaged densely.

    Backward makes the last parameters' gradients first, so these are in the first bucket. Small
    parameters come last, in one bucket, and so in one message. (There is one such bucket for each
    type, in a model with parameters of several types.)
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


def summarize(
    buckets: Sequence[Bucket],
    events: Events,
    staleness: Staleness | None = None,
    choice: str = "",
) -> Summary:
    """Totals and means of all steps so far; see `Summary`."""
    groups: dict[str, list[GroupSummary]] = {}
    for bucket in buckets:
        for slot, applied in zip(bucket.slots, bucket.applied, strict=True):
            module = slot.name.rpartition(".")[0] or slot.name
            elements = slot.numel * bucket.totals.steps
            part = GroupSummary(slot.numel, bucket.small, elements, applied)
            groups.setdefault(module + (" (small)" if bucket.small else ""), []).append(part)
    return Summary(
        totals=copy.deepcopy(events.totals),
        buckets=tuple(
            BucketSummary(
                tuple(slot.name for slot in bucket.slots),
                bucket.reduction.numel,
                type(bucket.reduction.running).__name__,
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
        busy=events.busy,
        waited=events.waited,
        parameters={
            slot.name: ParameterSummary(slot.numel, *_sparsely(bucket, slot, applied))
            for bucket in buckets
            for slot, applied in zip(bucket.slots, bucket.applied, strict=True)
        },
        staleness=staleness,
        choice=choice,
    )


def _sparsely(bucket: Bucket, slot: Slot, applied: int) -> tuple[int, int]:
    """Elements of a parameter, and those of them that were applied, in sparse steps."""
    steps = bucket.totals.steps - bucket.totals.skipped_steps - bucket.dense_steps
    return slot.numel * steps, applied - slot.numel * bucket.dense_steps
