"""Accumulator: residual + gradient of one rank in one step.

The residual and the velocity from before the step are only read. The new ones are written to memory
of their own, so a step that fails has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels import Step
from ..kernels.plan import Plan, Vectors
from ..wire.message import Entries
from .comm import Comm
from .select import smallest


class Steps:
    """Memory for the fixed-size steps of one vector.

    The length of the longest region may change from step to step, so a few steps are kept. Other
    changes are rare, and then all are made anew.
    """

    _MOST = 4

    def __init__(self) -> None:
        self._kept: dict[int, Step] = {}
        """By the length of the longest region."""

    def of(self, plan: Plan, values: Tensor, kind: type[Step]) -> Step:
        step = self._kept.get(plan.span)
        if step is None or step.plan is not plan:
            if any(kept.plan.k != plan.k for kept in self._kept.values()):
                self._kept.clear()
            elif len(self._kept) == self._MOST:
                del self._kept[next(iter(self._kept))]
            step = self._kept[plan.span] = kind(plan, values.dtype, values.device)
        return step


class Accumulator:
    """The vector that an algorithm selects from.

    Args:
        vectors: of this rank: its gradient, its residual, and where the average goes.
        clean: whether the residual is known to be all zeros.
        k: the number of entries to apply.
        comm: the other ranks; it is told whether this rank's values are finite.
        steps: memory for fixed-size steps.
    """

    def __init__(
        self, vectors: Vectors, clean: bool, k: int, comm: Comm, steps: Steps | None = None
    ) -> None:
        self.vectors = vectors
        self.gradient = vectors.gradient
        self.out = vectors.out
        self.values = vectors.values
        """residual + gradient after `accumulate`. The algorithm leaves the new residual in it."""
        self.scale = vectors.scale
        self.k = k
        self.numel = self.values.numel()
        self.sizes = tuple([part.numel() for part in self.gradient])
        self._clean, self._comm, self._steps = clean, comm, steps or Steps()
        same_type = self.gradient[0].dtype == self.values.dtype
        self._as_it_is = same_type and vectors.factor == 1.0 and vectors.velocity is None
        """Whether the gradient needs no change before it is added to the residual."""
        self._overwritten = False
        self._bad_parts: list[int] | None = None

    def step(self, plan: Plan) -> Step:
        """The memory and the phases of a fixed-size step."""
        return self._steps.of(plan, self.values, self._comm.kernels.Step)

    def accumulate(self, threshold: float) -> Entries:
        """values = residual + gradient; return its entries that reach the threshold."""
        with self._comm.time("accumulate"):
            threshold = max(threshold, smallest(self.values.dtype))
            parts = self.gradient if self._as_it_is else [self._prepare()]
            indices, values, finite = self._comm.kernels.accumulate(
                self.vectors.residual, parts, self.values, threshold
            )
            self._note(finite)
        return Entries(indices, values)

    def offer(self, threshold: float, wanted: int) -> tuple[Entries, int, float, float]:
        """`accumulate`, and the k largest of the entries that it finds; see `Kernels.offer`.

        Returns:
            The entries: all that were found, if these are no more than k.
            How many were found.
            The magnitude of the smallest entry, and about that of rank `wanted`, if more were.
        """
        with self._comm.time("accumulate"):
            threshold = max(threshold, smallest(self.values.dtype))
            parts = self.gradient if self._as_it_is else [self._prepare()]
            indices, values, finite, found, limit, about = self._comm.kernels.offer(
                self.vectors.residual, parts, self.values, threshold, self.k, wanted
            )
            self._note(finite)
        return Entries(indices, values), found, limit, about

    def _note(self, finite: list[bool]) -> None:
        """Which parts are finite, of the gradient or of the one that was prepared from it."""
        self._comm.finite = all(finite)
        if self._as_it_is:
            self._bad_parts = [number for number, fine in enumerate(finite) if not fine]

    def merge(self) -> Tensor:
        """residual + gradient as one tensor that may be summed in place.

        It may be `values`, `out` or the gradient, so `values` is of no use afterwards.
        """
        with self._comm.time("accumulate"):
            if not self._clean:
                self.accumulate(math.inf)
                return self.values
            if self._as_it_is and len(self.out) == 1 == len(self.gradient):
                # Nothing to copy where they are the same.
                self._overwritten = self.out[0].data_ptr() == self.gradient[0].data_ptr()
                return self.out[0].copy_(self.gradient[0])
            prepared = self._prepare()
            # Velocities must not be summed in place: the next step needs them.
            return prepared if self.vectors.velocity is None else self.values.copy_(prepared)

    def clear(self, offered: Entries, applied: Entries) -> None:
        """Forget the entries that this rank offered and all ranks applied; the rest is kept.

        Args:
            offered: with the values that the other ranks have read.
        """
        with self._comm.time("apply"):
            take = self._comm.kernels.take_common
            take(self.values, offered.indices, offered.values, applied.indices)
            velocity = self.vectors.velocity_after
            if velocity is not None:  # factor masking: applied entries lose their momentum
                take(velocity, offered.indices, velocity[offered.indices], applied.indices)

    def keep_rounding(self, exact: Entries, sent: Tensor, applied: Entries) -> None:
        """Keep the rounding errors of the sums that this rank sent, where they were applied."""
        if sent is not exact.values:
            with self._comm.time("apply"):
                lost = sent - exact.values
                take = self._comm.kernels.take_common
                take(self.values, exact.indices, lost, applied.indices)

    def add(self, entries: Entries) -> None:
        """Put entries into the residual of this rank."""
        self._comm.kernels.add_at(self.values, entries.indices, entries.values)

    def nonfinite_parts(self) -> list[int] | None:
        """The parts of the gradient with a NaN or Inf; None if the gradient was overwritten."""
        if self._bad_parts is not None:
            return self._bad_parts
        if self._overwritten:
            return None
        parts = enumerate(self.gradient)
        return [index for index, part in parts if not bool(torch.isfinite(part).all())]

    def _prepare(self) -> Tensor:
        """The gradient in one piece, in the residual's type, times the factor, with momentum."""
        vectors = self.vectors
        prepared = self.values if vectors.velocity_after is None else vectors.velocity_after
        for piece, part in zip(prepared.split(list(self.sizes)), self.gradient, strict=True):
            piece.copy_(part)
        if vectors.factor != 1.0:
            prepared.mul_(vectors.factor)
        if vectors.velocity is not None:
            prepared.add_(vectors.velocity, alpha=vectors.momentum)
        return prepared


def slices(parts: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Each part, and its range in the vector that the parts form together."""
    start = 0
    for part in parts:
        yield slice(start, start + part.numel()), part
        start += part.numel()
