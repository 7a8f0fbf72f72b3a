"""Reduction: one vector on one rank, and the transaction around an algorithm.

It owns the residual, the velocity, the algorithm's state and the counters. A step is
an `Attempt` until it is committed. Residual and velocity have two copies each. A step reads one and
writes the other, so committing exchanges them, and taking a step back exchanges them again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm, Dense, Reduced, State, Written
from ..kernels import for_device, numbers
from ..kernels.plan import Vectors
from ..wire.message import Entries, Wire
from . import schema
from .accumulator import Accumulator, Steps, slices
from .comm import Comm
from .select import select
from .stats import StepStats
from .transport import Rider, Transport

RESIDUAL_DTYPE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
FLOATS = schema.tensor(torch.float32, torch.float64)
"""A residual or a velocity."""
_DENSE = Dense()
_wire_of = functools.cache(Wire)
"""One wire for each format, as it remembers its codec."""


def prepare(algorithm: Algorithm, numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of sparse steps now, not in the middle of a run."""
    if not isinstance(algorithm, Dense) and dtype in RESIDUAL_DTYPE:
        for_device(device).prepare(RESIDUAL_DTYPE[dtype], numel, algorithm.fixed_size, device)


@dataclass(frozen=True)
class Progress:
    """How far a reduction is."""

    step: int = 0
    """Steps so far: dense, sparse and skipped."""
    skipped: int = 0
    """Skipped steps among them. They count neither for the warm-up nor for a ramp."""
    state: State = field(default_factory=State)
    """The algorithm's."""
    clean: bool = True
    """Whether the residual is known to be all zeros."""

    @property
    def taken(self) -> int:
        """Steps that were not skipped."""
        return self.step - self.skipped


@dataclass
class Attempt:
    """A step that is not committed: its average is written, and nothing else has changed."""

    acc: Accumulator
    comm: Comm
    reduced: Reduced | Written
    state: State
    """The algorithm's, after this step."""
    finite: bool
    """Whether all values are finite; the same on all ranks."""
    clean: bool = False
    """Whether nothing is left in the residual."""
    applied: Sequence[int] = ()
    """Entries applied in each part, where the values are finite."""

    @property
    def sparse(self) -> bool:
        return isinstance(self.reduced, Written) or isinstance(self.reduced.sums, Entries)


class Reduction:
    """One vector of one rank, averaged over ranks step by step.

    A step is `attempt`, and then `commit`, `skip`, or nothing at all, which leaves everything as it
    was. All ranks must choose the same.

    Args:
        algorithm: what to reduce with.
        numel: number of elements.
        transport: a process group; this object resets its counters in each step.
        dtype: type of the gradient. The residual of a 16-bit gradient is float32.
        momentum: factor of DGC's momentum correction, or 0.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        numel: int,
        transport: Transport,
        dtype: torch.dtype,
        momentum: float = 0.0,
    ) -> None:
        self.algorithm = algorithm
        self.running = algorithm.first()
        """What the next step runs: `algorithm`, or what a chooser has chosen; see `run`."""
        self.numel = numel
        self.dtype = dtype
        self.device = transport.device
        self.momentum = momentum
        self.last: StepStats | None = None
        """Statistics of the last step; None before the first."""
        self._transport = transport
        self.residual = torch.zeros(numel, dtype=RESIDUAL_DTYPE[dtype], device=self.device)
        """This rank's error feedback. The next step replaces it: clone it to keep it."""
        self.velocity = torch.zeros_like(self.residual[: numel if momentum else 0])
        """This rank's velocity, empty without momentum. Clone it to keep it."""
        self._spare_residual = torch.empty_like(self.residual)
        self._spare_velocity = torch.empty_like(self.velocity)
        self._steps = Steps()
        self._now = Progress(state=self.running.init())
        self._before: _Before | None = None
        prepare(algorithm, numel, dtype, self.device)

    @property
    def steps(self) -> int:
        """Steps so far: dense, sparse and skipped."""
        return self._now.step

    @property
    def taken(self) -> int:
        """Steps that were not skipped."""
        return self._now.taken

    @property
    def dense(self) -> bool:
        """Whether the next step is a dense one."""
        warm_up = self._now.taken < self.running.warmup_steps
        return warm_up or isinstance(self.running, Dense)

    @property
    def transport(self) -> Transport:
        """The other ranks, as this reduction sees them."""
        return self._transport

    @property
    def target(self) -> int:
        """k, the number of entries that the next step applies."""
        return self.numel if self.dense else self.running.target(self.numel, self._now.taken)

    def sum_with(self, gradient: Sequence[Tensor], factor: float) -> Tensor:
        """residual + gradient, as the next step has it, in new memory. Nothing changes."""
        values = torch.cat([part.to(self.residual.dtype) for part in gradient])
        if factor != 1.0:
            values *= factor
        if self.momentum:
            values.add_(self.velocity, alpha=self.momentum)
        return values.add_(self.residual)

    def change(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm or density, on all ranks at once; the residual stays.

        Steps are counted on, so a new algorithm's warm-up counts from the very first step.
        """
        self.algorithm = algorithm
        self.run(algorithm.first())

    def run(self, running: Algorithm) -> None:
        """Run this from the next step on, on all ranks at once; the residual stays."""
        if running == self.running:
            return
        # A wire format changes how entries travel, but not what thresholds mean.
        if dataclasses.replace(running, wire=self.running.wire) != self.running:
            self._now = dataclasses.replace(self._now, state=running.init())
            self._steps = Steps()
        self.running, self._before = running, None
        prepare(running, self.numel, self.dtype, self.device)

    def attempt(
        self,
        gradient: Sequence[Tensor],
        out: Sequence[Tensor],
        factor: float = 1.0,
        scale: float = 1.0,
        point: int | None = None,
        rider: Rider | None = None,
    ) -> Attempt:
        """All of a step but its end: the average is in `out`, and nothing else has changed.

        Args:
            gradient: flat tensors which together have `numel` elements; unchecked.
            out: the same, for the average; may be the same tensors.
            factor: multiplies the gradient when it enters.
            scale: multiplies the average, but not the residual.
            point: this rank's program point, for ranks to compare; None: they do not.
            rider: a vector of other elements, to be summed on the way if that is possible.
        """
        dense = self.dense
        algorithm, state = (_DENSE, State()) if dense else (self.running, self._now.state)
        acc, comm = self._begin(algorithm, gradient, out, factor, scale, point, rider)
        reduced, after = algorithm.reduce(state, acc, comm)
        self._check(algorithm, reduced, state, after)
        return self._end(acc, comm, reduced, self._now.state if dense else after)

    def attempt_on_the_way(
        self,
        gradient: Sequence[Tensor],
        factor: float,
        scale: float,
        point: int | None,
        carrier: Callable[[Rider], None],
    ) -> Attempt:
        """A dense step in place, summed in the messages of another reduction if that is possible.

        Args:
            carrier: attempts the other reduction, with this rider.
        """
        acc, comm = self._begin(_DENSE, gradient, gradient, factor, scale, point)
        sums = acc.merge()
        rider = Rider(sums, self._transport.size)
        carrier(rider)
        if not rider.summed:
            with comm.time("reduce"):
                self._transport.all_reduce(sums)
        reduced = Reduced(sums, residual=None, offered=acc.numel)
        return self._end(acc, comm, reduced, self._now.state)

    def _begin(
        self,
        algorithm: Algorithm,
        gradient: Sequence[Tensor],
        out: Sequence[Tensor],
        factor: float,
        scale: float,
        point: int | None,
        rider: Rider | None = None,
    ) -> tuple[Accumulator, Comm]:
        k = algorithm.target(self.numel, self._now.taken)
        self._before = None  # the spare copies are written to from here on
        self._transport.reset()
        self._transport.point = point
        comm = Comm(self._transport, self._wire(algorithm, k), self.numel, rider)
        with_velocity = (self.momentum, self.velocity, self._spare_velocity)
        vectors = Vectors(
            gradient, out, self.residual, self._spare_residual, factor, scale,
            *(with_velocity if self.momentum else ()),
        )  # fmt: skip
        acc = Accumulator(vectors, self._now.clean, k, comm, self._steps)
        return acc, comm

    def _end(
        self, acc: Accumulator, comm: Comm, reduced: Reduced | Written, state: State
    ) -> Attempt:
        if isinstance(reduced, Written):
            return Attempt(acc, comm, reduced, state, comm.finite, applied=reduced.applied)
        # Finite values may have an infinite sum: the same on every rank.
        finite = comm.finite and _is_finite(reduced.sums)
        attempt = Attempt(acc, comm, reduced, state, finite)
        if finite:
            with comm.time("apply"):
                self._write(attempt, reduced)
        return attempt

    def _check(
        self, algorithm: Algorithm, reduced: Reduced | Written, before: State, after: State
    ) -> None:
        """Refuse results that would become a wrong average, or a state that cannot be saved."""
        name = type(algorithm).__name__
        for what, vector, size in [] if isinstance(reduced, Written) else self._vectors(reduced):
            if (vector.shape, vector.dtype) != ((size,), self.residual.dtype):
                raise TypeError(
                    f"{name}.reduce returned {what} of shape {tuple(vector.shape)} and "
                    f"{vector.dtype}, but they must be flat, with {size} elements of "
                    f"{self.residual.dtype}"
                )
        if type(after) is not type(before):
            raise TypeError(
                f"{name}.reduce returned a state of type {type(after).__name__}, but must return "
                f"one of type {type(before).__name__}, as init() does"
            )

    def _vectors(self, reduced: Reduced) -> Iterator[tuple[str, Tensor, int]]:
        """The vectors of a result, and how many elements each must have."""
        sums = reduced.sums
        if isinstance(sums, Entries):
            yield "sums", sums.values, len(sums)
        else:
            yield "sums", sums, self.numel
        if reduced.residual is not None:
            yield "residual", reduced.residual, self.numel

    def _wire(self, algorithm: Algorithm, k: int) -> Wire:
        """At density 1 values travel unrounded: the result is to be the dense average."""
        exact = "float32" if self.residual.dtype == torch.float32 else "plain"
        form = exact if k == self.numel else algorithm.wire
        return _wire_of(form, numbers.index_dtype(self.numel), self.residual.dtype)

    def commit(self, attempt: Attempt) -> None:
        """Take over the residual, velocity and state of a step; `discard` takes it back."""
        keeps = not (attempt.clean and self._now.clean)
        if attempt.clean and keeps:
            self._spare_residual.zero_()  # everything was applied
        self._before = _Before(self._now, keeps)
        if keeps:
            self._swap_residual()
        self._swap_velocity()
        self._now = Progress(
            self._now.step + 1, self._now.skipped, attempt.state, clean=attempt.clean
        )
        self._report(attempt)

    def skip(self, attempt: Attempt, fill: float) -> None:
        """Forget a step, on every rank: the average is `fill` everywhere."""
        attempt.finite = False
        for part in attempt.acc.out:
            part.fill_(fill)
        now = self._now
        self._now = dataclasses.replace(now, step=now.step + 1, skipped=now.skipped + 1)
        self._report(attempt)

    def discard(self) -> None:
        """Take back the last step, exactly: as if its gradient had never come.

        Residual, velocity, the algorithm's state and the step number are those from before it. Use
        it for a result that is thrown away. Otherwise its gradient would wait in the residual and
        come back. All ranks must do it together, before the next step.
        """
        if self._before is None:
            raise RuntimeError(
                "there is no step to discard: none was taken since the start, or it was skipped, "
                "discarded before, or the algorithm or the state was changed after it"
            )
        self.rewind()
        self._before = None

    @property
    def can_rewind(self) -> bool:
        """Whether the last step can still be taken back."""
        return self._before is not None

    def rewind(self) -> None:
        """Exchange the present with the state before the last step. Twice changes nothing.

        Possible until the next step begins.
        """
        assert self._before is not None
        if self._before.swapped:
            self._swap_residual()
        self._swap_velocity()
        self._now, self._before = self._before.progress, _Before(self._now, self._before.swapped)

    def _swap_residual(self) -> None:
        self.residual, self._spare_residual = self._spare_residual, self.residual

    def _swap_velocity(self) -> None:
        self.velocity, self._spare_velocity = self._spare_velocity, self.velocity

    def give_back(self, attempt: Attempt, part: int, scale: float) -> None:
        """After `commit`: nobody can use the average of one part, so keep it in the residual.

        One rank keeps all of it, so that it is there once.
        """
        assert self._before is not None
        if not self._before.swapped:  # the zeros from before the step stay there for `rewind`
            self._spare_residual.zero_()
            self._swap_residual()
            self._before = _Before(self._before.progress, swapped=True)
        here, applied = list(slices(attempt.acc.out))[part]
        if self._transport.rank == part % self._transport.size:
            self.residual[here] += applied.to(self.residual.dtype) * (self._transport.size / scale)
        self._now = dataclasses.replace(self._now, clean=False)
        applied.zero_()

    def _write(self, attempt: Attempt, reduced: Reduced) -> None:
        """Write averages to `out`, and complete the new residual."""
        acc, size = attempt.acc, self._transport.size
        attempt.clean = reduced.residual is None and self.dtype == acc.values.dtype
        if isinstance(reduced.sums, Entries):
            sums = reduced.sums
            averages = self._round(sums.values / size, acc.scale)
            self._keep(acc, reduced, sums.values, averages, sums.indices)
            attempt.comm.kernels.scatter(acc.out, sums.indices, averages)
            attempt.applied = counts_of(acc.sizes, sums.indices)
            return
        attempt.applied = acc.sizes
        if acc.scale == 1.0 and self.dtype == reduced.sums.dtype:
            for piece, part in zip(reduced.sums.split(list(acc.sizes)), acc.out, strict=True):
                torch.div(piece, size, out=part)
            self._keep(acc, reduced, reduced.sums, reduced.sums)
            return
        averages = self._round(reduced.sums / size, acc.scale)
        self._keep(acc, reduced, reduced.sums, averages)
        for piece, part in zip(averages.split(list(acc.sizes)), acc.out, strict=True):
            part.copy_(piece)

    def _round(self, averages: Tensor, scale: float) -> Tensor:
        """Averages in the gradient's type. The residual keeps the part beyond its largest value."""
        if scale != 1.0:
            averages = averages * scale
        if averages.dtype == self.dtype:
            return averages
        limit = torch.finfo(self.dtype).max
        return averages.clamp(-limit, limit).to(self.dtype)

    def _keep(
        self,
        acc: Accumulator,
        reduced: Reduced,
        sums: Tensor,
        averages: Tensor,
        indices: Tensor | None = None,
    ) -> None:
        """Complete the new residual: the algorithm's, and the errors of rounding to 16 bits.

        All ranks hold the same sums; each keeps the errors of its own share of them.
        """
        size, rank, count = self._transport.size, self._transport.rank, sums.numel()
        share = slice(count * rank // size, count * (rank + 1) // size)
        rounded = averages.dtype != sums.dtype
        if rounded:  # before the residual is written: the sums may lie in the same memory
            errors = sums[share] - averages[share].to(sums.dtype) * (size / acc.scale)
        residual, kept = acc.values, reduced.residual
        if kept is None and rounded:
            residual.zero_()
        elif kept is not None and kept is not residual:
            residual.copy_(kept)
        if rounded:
            residual[share if indices is None else indices[share]] += errors

    def _report(self, attempt: Attempt) -> None:
        reduced, transport, finite = attempt.reduced, self._transport, attempt.finite
        self.last = StepStats(
            step=self._now.step - 1,
            phase="sparse" if attempt.sparse else "dense",
            numel=self.numel,
            target=attempt.acc.k,
            selected_local=reduced.offered,
            selected_global=sum(attempt.applied) if finite else 0,
            bytes_sent=transport.bytes_sent,
            bytes_received=transport.bytes_received,
            messages=transport.messages,
            seconds=attempt.comm.time.seconds,
            local_threshold=reduced.local_threshold if finite else 0.0,
            global_threshold=reduced.global_threshold if finite else 0.0,
            skipped=not finite,
            overflow=reduced.overflow,
        )

    def progress(self) -> dict[str, Any]:
        """Plain values to save, besides residual and velocity."""
        now = self._now
        return {"step": now.step, "skipped": now.skipped, "state": now.state.as_dict()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any], running: Algorithm) -> None:
        """Take over a saved state of what runs then, in which `problem` finds nothing wrong."""
        self.running, self._before = running, None
        self.residual.copy_(saved["residual"])
        self.velocity.copy_(saved["velocity"])
        state = running.init().loaded(saved["state"], self._transport.size)
        clean = not bool(self.residual.any())
        self._now = Progress(saved["step"], saved["skipped"], state, clean)

    def problem(self, saved: Mapping[str, Any], running: Algorithm) -> str | None:
        """Why a saved state does not fit, and what to do."""
        residual, velocity = saved["residual"], saved["velocity"]
        if residual.shape != self.residual.shape or residual.dtype != self.residual.dtype:
            return (
                f"the state's residual has {residual.numel()} elements of {residual.dtype}, this "
                f"reduction {self.numel} of {self.residual.dtype}: load it into one constructed "
                "with the same numel and dtype"
            )
        if velocity.shape != self.velocity.shape or velocity.dtype != self.velocity.dtype:
            return (
                f"the state's velocity has {velocity.numel()} elements of {velocity.dtype}, this "
                f"reduction's {self.velocity.numel()} of {self.velocity.dtype}: load it into one "
                "constructed with momentum if it was saved with it, and without if not"
            )
        wrong = self.contradiction(saved, running)
        return wrong and f"the state is damaged: state{wrong}"

    def contradiction(self, saved: Mapping[str, Any], running: Algorithm) -> str | None:
        """Why the parts of saved progress do not fit together, if they do not."""
        if saved["skipped"] > saved["step"]:
            return f'["skipped"] is {saved["skipped"]}, but of {saved["step"]} steps in all'
        wrong = running.init().problem(saved["state"], self.numel)
        return wrong and f'["state"]{wrong}'

    def agreed(self, saved: Mapping[str, Any], running: Algorithm) -> str:
        """A summary that must be the same for the saved states of all ranks."""
        state = running.init().loaded(saved["state"], self._transport.size)
        shared = zlib.crc32(repr(sorted(state.shared().items())).encode())
        return f"step={saved['step']}, skipped={saved['skipped']}, crc32 of the state={shared}"


@dataclass(frozen=True)
class _Before:
    """How to take back the last step."""

    progress: Progress
    swapped: bool
    """Whether the residuals were exchanged; if not, the residual is all zeros."""


def _is_finite(sums: Entries | Tensor) -> bool:
    if isinstance(sums, Entries):
        return not len(sums) or math.isfinite(float(sums.values.abs().max()))
    # The sum of all elements shows a NaN or Inf sooner than a search does.
    return math.isfinite(float(sums.sum())) or len(select(sums, math.inf)) == 0


def counts_of(sizes: Sequence[int], indices: Tensor) -> list[int]:
    """How many of the sorted indices are in each part of a vector."""
    if len(sizes) == 1:
        return [indices.numel()]
    cuts = torch.tensor([*accumulate(sizes)], dtype=indices.dtype, device=indices.device)
    ends = torch.searchsorted(indices, cuts).tolist()
    return [end - start for start, end in pairwise([0, *ends])]
