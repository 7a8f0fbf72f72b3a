"""What every algorithm is and what it works on.

An algorithm is a frozen configuration with one method, `reduce`. What it remembers between
steps is in a `State`; what it works on in one step is a `Step`. Nothing is committed until all
of a step has succeeded: `Step` holds copies, and an error leaves the old state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..core.select import TOLERANCE, Carried, aim, keep_from, kth_largest, select, smallest
from ..core.stats import Stopwatch
from ..core.transport import PeerError, Transport
from ..kernels import for_device
from ..kernels.reference import index_dtype
from ..wire.message import FORMATS, DamagedMessageError, Entries, Wire


@dataclass(frozen=True)
class Algorithm(ABC):
    """Configuration of a reduction. Subclasses add their own knobs."""

    density: float = 0.02
    """Share of the elements that is applied in a step, above 0 and at most 1."""
    warmup_steps: int = 0
    """Dense steps before the first sparse one."""
    ramp: tuple[float, ...] = field(default=(), kw_only=True)
    """Densities to pass through after the warm-up, such as (0.25, 0.06), `ramp_steps` each."""
    ramp_steps: int = field(default=64, kw_only=True)
    wire: str = field(default="int8", kw_only=True)
    """How entries travel: plain, float32, bfloat16, float16 or int8; see wire.py."""

    def __post_init__(self) -> None:
        for knob in fields(self):  # numpy's numbers could not be saved
            object.__setattr__(self, knob.name, _plain(getattr(self, knob.name)))
        object.__setattr__(self, "ramp", tuple(map(_plain, self.ramp)))
        for density in (self.density, *self.ramp):
            if not (isinstance(density, int | float) and 0 < density <= 1):
                raise ValueError(
                    f"density is {density!r}, but must be above 0 and at most 1: "
                    "0.02 applies 2 % of the elements in each step"
                )
        if self.wire not in FORMATS:
            raise ValueError(f"wire is {self.wire!r}, but must be one of {', '.join(FORMATS)}")
        for knob in fields(self):
            value = getattr(self, knob.name)
            least = 0 if knob.name == "warmup_steps" else 1
            if knob.type == "int" and not (type(value) is int and value >= least):
                raise ValueError(
                    f"{knob.name} is {value!r}, but must be a whole number, at least {least}"
                )

    def density_at(self, step: int) -> float:
        """The density asked for in a step that is not dense."""
        stage = (step - self.warmup_steps) // self.ramp_steps
        return self.ramp[stage] if 0 <= stage < len(self.ramp) else self.density

    def target(self, numel: int, step: int | None = None) -> int:
        """k, the number of entries to apply: in one step, or at last, after any ramp."""
        density = self.density if step is None else self.density_at(step)
        return max(1, round(density * numel))

    @abstractmethod
    def reduce(self, step: Step) -> Entries | Tensor:
        """Sum over ranks what this step applies: entries, or a dense tensor.

        The sum is bitwise the same on every rank. `step.accumulated` is left as the residual
        to keep, unless the result is dense: then all was applied and nothing is kept. Only
        `step.merge` may write to `step.out`; nothing else that outlives the step may be changed.
        """

    @abstractmethod
    def words(self, numel: int, size: int) -> float:
        """Most words that a rank sends in a step on average; an index or a value is a word."""


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else value


@dataclass
class State:
    """What is remembered from step to step, besides the residual."""

    step: int = 0
    """Steps so far, dense, sparse and skipped."""
    skipped: int = 0
    """Of these, the skipped ones: they count neither for the warm-up nor for a ramp."""
    sparse_steps: int = 0
    """Sparse steps taken."""
    local: Carried = field(default_factory=Carried)
    """Threshold of this rank's own values."""
    total: Carried = field(default_factory=Carried)
    """Threshold of the sums over ranks, the same on every rank."""
    clean: bool = True
    """Whether the residual is known to be all zeros."""
    boundaries: tuple[int, ...] = ()
    """Region j is boundaries[j] to boundaries[j + 1]; empty before the first sparse step."""


class Buffers:
    """Memory that is kept for the next step; its content is not."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.accumulated = torch.empty(numel, dtype=dtype, device=device)
        self.velocity = torch.empty(0, dtype=dtype, device=device)


@dataclass
class Momentum:
    """DGC's momentum correction: each rank sums velocities, not gradients, before it selects."""

    factor: float
    velocity: Tensor
    """Of the last step; a step writes its own elsewhere."""


class Step:
    """One reduction in progress.

    Args:
        gradient: flat parts, one after the other the vector that is reduced.
        out: where the average goes: parts of the same sizes, or the same parts.
        wire: how entries travel.
        factor: multiplies the gradient when it enters.
    """

    def __init__(
        self,
        gradient: Sequence[Tensor],
        out: Sequence[Tensor],
        residual: Tensor,
        target: int,
        state: State,
        transport: Transport,
        buffers: Buffers,
        wire: str,
        factor: float = 1.0,
        momentum: Momentum | None = None,
    ) -> None:
        self.gradient = gradient
        self.out = out
        self.residual = residual
        self.target = target
        self.state = state
        self.transport = transport
        self.buffers = buffers
        self.factor = factor
        self.momentum = momentum
        self.accumulated = buffers.accumulated
        self.kernels = for_device(residual.device)
        self.wire = Wire(wire, index_dtype(residual.numel()), residual.dtype)
        self.time = Stopwatch()
        self.selected_local = residual.numel()
        self.local_threshold = self.global_threshold = 0.0
        self.finite = True
        """Whether all values are finite: of this rank at first, of all ranks at the end."""
        self.reduced: Entries | Tensor | None = None
        """What the algorithm returned."""
        self.applied: list[int] = []
        """Entries applied in each part, where the values are finite."""
        self.overflow = 0
        """Entries that this rank held back because a message had no room for them."""
        self._lost = False
        self._bad_parts: list[int] | None = None

    def accumulate(self, threshold: float) -> Entries:
        """accumulated = residual + gradient, and its entries that reach the threshold."""
        with self.time("accumulate"):
            threshold = max(threshold, smallest(self.residual.dtype))
            parts = self.gradient if self._as_it_is else [self._prepare()]
            indices, values, finite = self.kernels.accumulate(
                self.residual, parts, self.accumulated, threshold
            )
            self.finite = all(finite)
            if self._as_it_is:
                self._bad_parts = [number for number, fine in enumerate(finite) if not fine]
        return Entries(indices, values)

    def merge(self) -> Tensor:
        """residual + gradient as one tensor that may be summed in place."""
        with self.time("accumulate"):
            if not self.state.clean:
                self.accumulate(math.inf)
                return self.accumulated
            if self._as_it_is and len(self.out) == 1 == len(self.gradient):
                # Nothing to copy where they are the same.
                self._lost = self.out[0].data_ptr() == self.gradient[0].data_ptr()
                return self.out[0].copy_(self.gradient[0])
            prepared = self._prepare()
            # Velocities must not be summed in place: the next step needs them.
            return prepared if self.momentum is None else self.accumulated.copy_(prepared)

    def nonfinite_parts(self) -> list[int] | None:
        """The parts of this rank's gradient with a NaN or Inf; None if it has been overwritten."""
        if self._bad_parts is not None:
            return self._bad_parts
        if self._lost:
            return None
        parts = enumerate(self.gradient)
        return [index for index, part in parts if not bool(torch.isfinite(part).all())]

    @property
    def _as_it_is(self) -> bool:
        """Whether the gradient needs no change before it is added to the residual."""
        same_type = all(part.dtype == self.residual.dtype for part in self.gradient)
        return same_type and self.factor == 1.0 and self.momentum is None

    def _prepare(self) -> Tensor:
        """The gradient in one piece, in the residual's type, times `factor`, with momentum."""
        prepared = self.accumulated if self.momentum is None else self.buffers.velocity
        for here, part in slices(self.gradient):
            prepared[here].copy_(part)
        if self.factor != 1.0:
            prepared.mul_(self.factor)
        if self.momentum is not None:
            prepared.add_(self.momentum.velocity, alpha=self.momentum.factor)
        return prepared

    def check(self, sums: Entries) -> None:
        """Notice finite values whose sum is not, before it is rounded to something that is."""
        if len(sums) and not math.isfinite(float(sums.values.abs().max())):
            self.finite = False

    def trade(self, rows: list[list[int]]) -> list[list[int]]:
        """rows[j], a few numbers, goes to rank j; returns what each rank had for this one.

        Along with them ranks tell each other whether their values are finite, so that to agree
        on this costs no message of its own. Until the step is committed, a NaN does no harm.
        """
        traded = self.transport.trade_numbers([[*row, self.finite] for row in rows])
        self.finite = all(row[-1] for row in traded)
        return [row[:-1] for row in traded]

    def share(self, count: int, size: int = 0) -> tuple[list[int], list[int]]:
        """Every rank's count, and every rank's size, in rank order."""
        shared = self.trade([[count, size]] * self.transport.size)
        for source, (number, _) in enumerate(shared):
            if not 0 <= number <= self.residual.numel():
                raise self.damaged(source, f"it says that there are {number} entries")
        return [row[0] for row in shared], [row[1] for row in shared]

    def decode(
        self,
        message: Tensor,
        source: int,
        low: int = 0,
        high: int | None = None,
        added: int = 0,
        wire: Wire | None = None,
    ) -> tuple[Entries, list[int]]:
        """A message of rank `source`: entries of elements `low` to `high`, and numbers added.

        If numbers are added, the first one tells whether the sender's values are finite. If none
        are, ranks have traded this before.
        """
        wire = wire or self.wire
        try:
            high = self.residual.numel() if high is None else high
            entries, numbers = wire.decode(message, low, high, added)
        except DamagedMessageError as error:
            raise self.damaged(source, str(error)) from error
        said_finite = numbers[0] if numbers else self.finite
        # All values of int8 are finite.
        if said_finite and wire.format != "int8" and not _all_finite(entries.values):
            raise self.damaged(source, "it has a NaN or Inf, of which its sender did not know")
        return entries, numbers

    def damaged(self, source: int, why: str) -> PeerError:
        """The error to raise because of a message that cannot be right."""
        return PeerError(
            f"rank {self.transport.rank} of {self.transport.size}: a message from rank {source} is "
            f"damaged: {why}. Nothing was applied on this rank. Look for a faulty link or faulty "
            "memory, make sure that all ranks run the same version, and restart all from the last "
            "checkpoint"
        )

    def offer(self, exact: bool) -> Entries:
        """Accumulate, and select the k largest entries of this rank, or at least 0.9 k of them.

        One pass finds the candidates, by the carried threshold; the k largest are picked from
        them. Only where there are too few candidates (fewer than k if `exact`, else fewer than
        0.9 k), all elements are looked at again for the exact threshold.
        """
        k, numel, threshold = self.target, self.accumulated.numel(), self.state.local.value
        if k == numel:
            threshold = 0.0
        wanted = aim(k, numel)
        candidates = self.accumulate(threshold)
        with self.time("select"):
            if len(candidates) < (k if exact else (1 - TOLERANCE) * k) and threshold > 0:
                threshold, _ = kth_largest(self.accumulated, wanted)
                candidates = select(self.accumulated, threshold)
            entries, self.local_threshold, right = keep_from(candidates, threshold, k, wanted)
        self.selected_local = len(entries)
        self.state.local = self.state.local.after(right)
        return entries

    def clear(self, sent: Entries, applied: Entries) -> None:
        """Forget what this rank contributed to what all applied; the rest stays in the residual.

        Args:
            sent: what this rank offered, with the values that others have read.
        """
        with self.time("apply"):
            take = self.kernels.take_common
            take(self.accumulated, sent.indices, sent.values, applied.indices)
            if self.momentum is not None:  # what was applied must not be pushed on: factor masking
                velocity = self.buffers.velocity
                take(velocity, sent.indices, velocity[sent.indices], applied.indices)

    def keep_rounding(self, exact: Entries, sent: Tensor, applied: Entries) -> None:
        """Keep what the sums that this rank sent lost by being rounded, where they were applied."""
        if sent is not exact.values:
            with self.time("apply"):
                lost = sent - exact.values
                self.kernels.take_common(self.accumulated, exact.indices, lost, applied.indices)


def slices(parts: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Each part, and where it is in the vector that they make together."""
    start = 0
    for part in parts:
        yield slice(start, start + part.numel()), part
        start += part.numel()


def _all_finite(values: Tensor) -> bool:
    """A sum is finite only if all values are, and is the fastest to see."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())
