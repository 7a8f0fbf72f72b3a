"""Accumulator: residual + gradient of one rank in one step.

The residual and the velocity from before the step are only read. The new ones are written to memory
of their own, so a step that fails has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..wire.message import Entries
from .comm import Comm
from .select import smallest


@dataclass(frozen=True)
class Velocity:
    """DGC's momentum correction: each rank accumulates velocities, not gradients."""

    factor: float
    before: Tensor
    after: Tensor


class Accumulator:
    """The vector that an algorithm selects from.

    Args:
        gradient: flat parts that together form the vector.
        out: where the average goes: parts of the same sizes, or the same parts.
        residual: this rank's error feedback before the step.
        clean: whether the residual is known to be all zeros.
        memory: where residual + gradient goes.
        k: the number of entries to apply.
        comm: the other ranks; it is told whether this rank's values are finite.
        factor: multiplies the gradient when it enters.
    """

    def __init__(
        self,
        gradient: Sequence[Tensor],
        out: Sequence[Tensor],
        residual: Tensor,
        clean: bool,
        memory: Tensor,
        k: int,
        comm: Comm,
        factor: float = 1.0,
        velocity: Velocity | None = None,
    ) -> None:
        self.gradient = gradient
        self.out = out
        self.values = memory
        """residual + gradient after `accumulate`. The algorithm leaves the new residual in it."""
        self.k = k
        self.numel = memory.numel()
        self.sizes = [part.numel() for part in gradient]
        self._residual, self._clean = residual, clean
        self._comm, self._factor, self._velocity = comm, factor, velocity
        same_type = all(part.dtype == memory.dtype for part in gradient)
        self._as_it_is = same_type and factor == 1.0 and velocity is None
        """Whether the gradient needs no change before it is added to the residual."""
        self._overwritten = False
        self._bad_parts: list[int] | None = None

    def accumulate(self, threshold: float) -> Entries:
        """values = residual + gradient; return its entries that reach the threshold."""
        with self._comm.time("accumulate"):
            threshold = max(threshold, smallest(self.values.dtype))
            parts = self.gradient if self._as_it_is else [self._prepare()]
            indices, values, finite = self._comm.kernels.accumulate(
                self._residual, parts, self.values, threshold
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
                self._residual, parts, self.values, threshold, self.k, wanted
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
            return prepared if self._velocity is None else self.values.copy_(prepared)

    def clear(self, offered: Entries, applied: Entries) -> None:
        """Forget the entries that this rank offered and all ranks applied; the rest is kept.

        Args:
            offered: with the values that the other ranks have read.
        """
        with self._comm.time("apply"):
            take = self._comm.kernels.take_common
            take(self.values, offered.indices, offered.values, applied.indices)
            if self._velocity is not None:  # factor masking: applied entries lose their momentum
                velocity = self._velocity.after
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
        prepared = self.values if self._velocity is None else self._velocity.after
        for piece, part in zip(prepared.split(self.sizes), self.gradient, strict=True):
            piece.copy_(part)
        if self._factor != 1.0:
            prepared.mul_(self._factor)
        if self._velocity is not None:
            prepared.add_(self._velocity.before, alpha=self._velocity.factor)
        return prepared


def slices(parts: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Each part, and its range in the vector that the parts form together."""
    start = 0
    for part in parts:
        yield slice(start, start + part.numel()), part
        start += part.numel()
