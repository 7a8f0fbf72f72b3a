"""What every algorithm is and what it works on.

An algorithm is a frozen configuration with one method, `reduce`. What it remembers between
steps is in a `State`; what it works on in one step is a `Step`. Nothing is committed until all
of a step has succeeded: `Step` holds copies, and an error leaves the old state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.reference import index_dtype
from ..select import TOLERANCE, Carried, aim, keep_from, kth_largest, select, smallest
from ..stats import Stopwatch
from ..transport import Transport
from ..wire import Entries, Wire


@dataclass(frozen=True)
class Algorithm(ABC):
    """Configuration of a reduction. Subclasses add their own knobs."""

    density: float = 0.02
    """Share of the elements that is applied in a step, above 0 and at most 1."""
    warmup_steps: int = 0
    """Dense steps before the first sparse one."""

    def __post_init__(self) -> None:
        if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
            raise ValueError(
                f"density is {self.density!r}, but must be above 0 and at most 1: "
                "0.02 applies 2 % of the elements in each step"
            )
        for knob in fields(self):
            value = getattr(self, knob.name)
            least = 0 if knob.name == "warmup_steps" else 1
            if knob.type == "int" and not (type(value) is int and value >= least):
                raise ValueError(
                    f"{knob.name} is {value!r}, but must be a whole number, at least {least}"
                )

    def target(self, numel: int) -> int:
        """k, the number of entries to apply."""
        return max(1, round(self.density * numel))

    @abstractmethod
    def reduce(self, step: Step) -> Entries | Tensor:
        """Sum over ranks what this step applies: entries, or a dense tensor.

        The sum is bitwise the same on every rank. `step.accumulated` is left as the residual
        to keep, unless the result is dense: then all was applied and nothing is kept. Only a
        dense sum may be in `step.out`; nothing else that outlives the step may be changed.
        """

    @abstractmethod
    def words(self, numel: int, size: int) -> float:
        """Most words that a rank sends in a step on average; an index or a value is a word."""


@dataclass
class State:
    """What is remembered from step to step, besides the residual."""

    step: int = 0
    """Steps taken, dense, sparse and skipped."""
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
        self._region = torch.empty(0, dtype=dtype, device=device)

    def zeros(self, numel: int) -> Tensor:
        """Zeros to sum entries in."""
        if self._region.numel() < numel:
            self._region = self._region.new_empty(numel)
        return self._region[:numel].zero_()


class Step:
    """One reduction in progress."""

    def __init__(
        self,
        gradient: Tensor,
        out: Tensor,
        residual: Tensor,
        target: int,
        state: State,
        transport: Transport,
        buffers: Buffers,
    ) -> None:
        self.gradient = gradient
        self.out = out
        self.residual = residual
        self.target = target
        self.state = state
        self.transport = transport
        self.buffers = buffers
        self.accumulated = buffers.accumulated
        self.kernels = for_device(gradient.device)
        self.wire = Wire(index_dtype(gradient.numel()), residual.dtype)
        self.time = Stopwatch()
        self.selected_local = gradient.numel()
        self.local_threshold = self.global_threshold = 0.0
        self.finite = True
        """Whether all values are finite: of this rank at first, of all ranks at the end."""

    def accumulate(self, threshold: float) -> Entries:
        """accumulated = residual + gradient, and its entries that reach the threshold."""
        with self.time("accumulate"):
            gradient, threshold = self.gradient, max(threshold, smallest(self.residual.dtype))
            if gradient.dtype != self.residual.dtype:
                gradient = self.accumulated.copy_(gradient)
            indices, values, self.finite = self.kernels.accumulate(
                self.residual, gradient, self.accumulated, threshold
            )
        return Entries(indices, values)

    def trade(self, counts: list[int]) -> list[int]:
        """counts[j] goes to rank j; returns what each rank had for this one.

        Along with them ranks tell each other whether their values are finite, so that to agree
        on this costs no message of its own. Until the step is committed, a NaN does no harm.
        """
        traded = self.transport.trade_numbers([[count, self.finite] for count in counts])
        self.finite = all(finite for _, finite in traded)
        return [count for count, _ in traded]

    def share(self, count: int) -> list[int]:
        """Every rank's count, in rank order."""
        return self.trade([count] * self.transport.size)

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

    def clear(self, local: Entries, applied: Entries) -> None:
        """Forget what this rank offered and all applied; the rest stays in the residual."""
        with self.time("apply"):
            self.kernels.clear_common(self.accumulated, local.indices, applied.indices)
