"""SparseAllreduce: the public call around an algorithm.

It owns what belongs to one gradient on one rank (residual, thresholds, boundaries, counters),
checks what comes in, and commits a step only when all of it has succeeded.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms import Algorithm, Dense, State, Step
from ..algorithms.base import Buffers, Momentum, slices
from ..kernels import for_device
from ..wire.message import Entries
from . import schema
from .select import TREND_LIMIT, Carried
from .stats import StepStats
from .transport import Operation, Transport

_RESIDUAL_DTYPE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
KEPT: dict[str, schema.Check] = {
    "boundaries": schema.tensor(torch.int64, dims=1),
    "local_threshold": schema.number(0, finite=False),  # infinity: none yet
    "local_trend": schema.number(-TREND_LIMIT, TREND_LIMIT),
    "global_threshold": schema.number(0, finite=False),
    "global_trend": schema.number(-TREND_LIMIT, TREND_LIMIT),
    "step": schema.whole(),
    "skipped": schema.whole(),
    "sparse_steps": schema.whole(),
}
"""What a state has besides tensors of the size of the gradient."""
FLOATS = schema.tensor(torch.float32, torch.float64)
"""A residual or a velocity."""
_STATE = schema.record({"residual": FLOATS, "velocity": FLOATS} | KEPT)


def prepare(algorithm: Algorithm, numel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what sparse steps need now, not in the middle of a run."""
    if not isinstance(algorithm, Dense) and dtype in _RESIDUAL_DTYPE:
        for_device(device).prepare(_RESIDUAL_DTYPE[dtype], numel)


class SparseAllreduce:
    """Averages a flat gradient over ranks, applying only its most important entries.

    ```python
    reduce = SparseAllreduce(OkTopk(density=0.02), numel=grad.numel())
    average = reduce(grad)
    ```

    What is not applied stays in `residual` and is added to the next gradient: nothing is lost.

    Constructing it is collective: all ranks of the group do it together, with the same
    arguments, and an error on every rank says so if they differ.

    Args:
        algorithm: what to reduce with, for example `OkTopk(density=0.02)`.
        numel: number of elements of the gradient.
        group: the process group; None is the default group, or this process alone where
            torch.distributed is not initialised.
        dtype: type of the gradient. The residual of a 16-bit gradient is float32.
        device: where the gradient is; None is the CPU, or the current GPU of an NCCL group.
        nonfinite: what to do with a NaN or Inf on any rank: "raise" NonFiniteGradientError on
            every rank, or "skip" the step, that is return zeros on every rank.
        momentum: above 0, ranks sum velocities (momentum * velocity + gradient) instead of
            gradients before they select, and forget the velocity of what was applied: DGC's
            momentum correction with factor masking. The optimizer must then have no momentum.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        numel: int,
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        nonfinite: str = "raise",
        momentum: float = 0.0,
    ) -> None:
        transport = Transport(group, device)
        problem = _problem(algorithm, numel, dtype, nonfinite, momentum)
        with transport.together(Operation.CONSTRUCT):
            transport.agree(
                problem,
                f"{numel=}, {dtype=}, {nonfinite=}, {momentum=}, {algorithm=}",
                "construct SparseAllreduce with the same arguments",
            )
        self.algorithm = algorithm
        self.numel = numel
        self.dtype = dtype
        self.device = transport.device
        self.nonfinite = nonfinite
        self.momentum = momentum
        self.last: StepStats | None = None
        """Statistics of the last step; None before the first."""
        residual_dtype = _RESIDUAL_DTYPE[dtype]
        self._transport = transport
        self._residual = torch.zeros(numel, dtype=residual_dtype, device=self.device)
        self._velocity = torch.zeros_like(self._residual[: numel if momentum else 0])
        self._buffers = Buffers(numel, residual_dtype, self.device)
        self._buffers.velocity = torch.empty_like(self._velocity)
        self._state = State()
        self._before: _Before | None = None
        self._dense, self._first = Dense(), False
        prepare(self.algorithm, self.numel, self.dtype, self.device)

    @property
    def residual(self) -> Tensor:
        """This rank's error feedback. The next step replaces it: clone it to keep it."""
        return self._residual

    @property
    def velocity(self) -> Tensor:
        """This rank's velocity, empty without `momentum`. As `residual`, clone it to keep it."""
        return self._velocity

    @property
    def steps(self) -> int:
        """Steps so far: dense, sparse and skipped."""
        return self._state.step

    @property
    def taken(self) -> int:
        """Steps that were not skipped: those that warm-up and ramp count."""
        return self._state.step - self._state.skipped

    @property
    def dense(self) -> bool:
        """Whether the next step is a dense one."""
        warm_up = self.taken < self.algorithm.warmup_steps
        return warm_up or isinstance(self.algorithm, Dense)

    def at(self, place: int, first: bool = False) -> None:
        """Say which reduction of the program comes next; see `Transport.place`.

        If it is the `first` of several that belong together, ranks make sure that they are at the
        same place before anything of a size that depends on it travels.
        """
        self._transport.place, self._first = place, first

    def change(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm or density, on all ranks at once; the residual stays.

        Steps are counted on, so a new algorithm's warm-up counts from the first step of all.
        """
        if algorithm != self.algorithm:
            self.algorithm = algorithm
            old = self._state
            self._state = State(step=old.step, skipped=old.skipped, clean=old.clean)
            self._before = None
            prepare(self.algorithm, self.numel, self.dtype, self.device)

    def __call__(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Average over ranks; the result is bitwise the same on every rank.

        Args:
            gradient: flat and contiguous, of the size, type and device given at construction.
            out: where to put the result, for example `gradient` itself; new memory if None.
                After an error its content is undefined.
        """
        self._check_tensor("gradient", gradient)
        if out is not None:
            self._check_tensor("out", out)
        else:
            out = torch.empty_like(gradient, requires_grad=False)
        step = self.begin([gradient.detach()], [out.detach()])
        if step.finite:
            self.commit(step)
        elif self.nonfinite == "skip":
            self.skip(step, fill=0.0)
        else:
            bad = step.nonfinite_parts()
            self._transport.blame(self.steps, None if bad is None else bool(bad))
        return out

    def begin(
        self,
        gradient: Sequence[Tensor],
        out: Sequence[Tensor],
        factor: float = 1.0,
        scale: float = 1.0,
    ) -> Step:
        """All of a step but its end: the average is in `out`, nothing else has changed.

        The end is `commit`, `skip`, or nothing at all, which leaves everything as it was. All
        ranks must choose the same; `finite` of what is returned is the same on all of them.

        Args:
            gradient: flat tensors which together have `numel` elements; unchecked.
            out: the same, for the average; may be the same tensors.
            factor: multiplies the gradient when it enters.
            scale: multiplies the average, but not what is kept in the residual.
        """
        algorithm = self._dense if self.dense else self.algorithm
        target = algorithm.target(self.numel, self.taken)
        self._before = None  # its buffers are written to from here on
        exact = "float32" if self._residual.dtype == torch.float32 else "plain"
        self._transport.reset()
        if self._first:
            self._transport.meet()
        step = Step(
            gradient,
            out,
            self._residual,
            target,
            dataclasses.replace(self._state),
            self._transport,
            self._buffers,
            # Who asks for everything gets it.
            exact if target == self.numel else algorithm.wire,
            factor,
            Momentum(self.momentum, self._velocity) if self.momentum else None,
        )
        reduced = step.reduced = algorithm.reduce(step)
        if isinstance(reduced, Entries):
            # Finite values may have sums that are not: the same on every rank.
            largest = float(reduced.values.abs().max()) if len(reduced) else 0.0
            step.finite = step.finite and math.isfinite(largest)
        if step.finite:
            with step.time("apply"):
                if isinstance(reduced, Entries):
                    self._write_entries(step, reduced, scale)
                else:
                    self._write_dense(step, reduced, scale)
        return step

    def _write_entries(self, step: Step, sums: Entries, scale: float) -> None:
        averages = self._round(sums.values / self._transport.size, scale)
        self._keep_rounding(step, sums.values, averages, scale, sums.indices)
        step.kernels.scatter(step.out, sums.indices, averages)
        step.applied = [len(sums)]
        if len(step.out) > 1:
            stops = [here.stop for here, _ in slices(step.out)]
            cuts = torch.tensor(stops, dtype=sums.indices.dtype, device=self.device)
            ends = torch.searchsorted(sums.indices, cuts).tolist()
            step.applied = [end - start for start, end in pairwise([0, *ends])]

    def _write_dense(self, step: Step, sums: Tensor, scale: float) -> None:
        size = self._transport.size
        step.applied = [part.numel() for part in step.out]
        step.state.clean = self.dtype == sums.dtype
        if step.state.clean and scale == 1.0:
            for here, part in slices(step.out):
                torch.div(sums[here], size, out=part)
            return
        averages = self._round(sums / size, scale)
        for here, part in slices(step.out):
            part.copy_(averages[here])
        self._keep_rounding(step, sums, averages, scale)

    def commit(self, step: Step) -> None:
        """Take the step's residual, velocity and state for the next; `discard` takes it back."""
        sparse = isinstance(step.reduced, Entries)
        if not sparse and step.state.clean and not self._state.clean:
            step.accumulated.zero_()  # everything was applied
        swapped = sparse or not (step.state.clean and self._state.clean)
        self._before = _Before(self._state, swapped)
        if swapped:
            self._swap_residual()
        if sparse:
            step.state.clean = False
            step.state.sparse_steps += 1
        self._swap_velocity()
        self._state = step.state
        self._state.step += 1
        self._report(step)

    def discard(self) -> None:
        """Take back the last step, exactly: as if its gradient had never come.

        Residual, velocity, thresholds, regions and step number are those from before it. For a
        result that is thrown away; without this its gradient would wait in the residual and come
        back. All ranks must do it together, before the next step.
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
        """Change places with what was there before the last step. Doing it twice changes nothing.

        Possible until the next step begins.
        """
        assert self._before is not None
        if self._before.swapped:
            self._swap_residual()
        self._swap_velocity()
        self._state, self._before = self._before.state, _Before(self._state, self._before.swapped)

    def _swap_residual(self) -> None:
        buffers = self._buffers
        self._residual, buffers.accumulated = buffers.accumulated, self._residual

    def _swap_velocity(self) -> None:
        self._velocity, self._buffers.velocity = self._buffers.velocity, self._velocity

    def skip(self, step: Step, fill: float) -> None:
        """Forget a step, on every rank: the average is `fill` everywhere."""
        step.finite = False
        for part in step.out:
            part.fill_(fill)
        self._state.step += 1
        self._state.skipped += 1
        self._report(step)

    def give_back(self, step: Step, part: int, scale: float) -> None:
        """After `commit`: what was applied to one part cannot be used, and is kept instead.

        One rank takes it all, so that it is there once.
        """
        assert self._before is not None
        if not self._before.swapped:  # the residual before the step, zeros, stays for `rewind`
            self._buffers.accumulated.zero_()
            self._swap_residual()
            self._before = _Before(self._before.state, swapped=True)
        here, applied = list(slices(step.out))[part]
        if self._transport.rank == part % self._transport.size:
            amount = applied.to(self._residual.dtype) * (self._transport.size / scale)
            self._residual[here] += amount
        self._state.clean = False
        applied.zero_()

    def _round(self, averages: Tensor, scale: float) -> Tensor:
        """In the gradient's type; what float16 cannot hold waits in the residual."""
        if scale != 1.0:
            averages = averages * scale
        if averages.dtype == self.dtype:
            return averages
        limit = torch.finfo(self.dtype).max
        return averages.clamp(-limit, limit).to(self.dtype)

    def _keep_rounding(
        self,
        step: Step,
        sums: Tensor,
        averages: Tensor,
        scale: float,
        indices: Tensor | None = None,
    ) -> None:
        """What rounding averages to 16 bits costs goes into the residual.

        All ranks hold the same sums; each keeps the errors of its own share of them.
        """
        if averages.dtype == sums.dtype:
            return
        size, rank, count = self._transport.size, self._transport.rank, sums.numel()
        share = slice(count * rank // size, count * (rank + 1) // size)
        errors = sums[share] - averages[share].to(sums.dtype) * (size / scale)
        if indices is None:
            step.accumulated.zero_()
            step.accumulated[share] = errors
        else:
            step.accumulated[indices[share]] += errors

    def _report(self, step: Step) -> None:
        sparse = isinstance(step.reduced, Entries)
        selected = len(step.reduced) if isinstance(step.reduced, Entries) else self.numel
        self.last = StepStats(
            step=self._state.step - 1,
            phase="sparse" if sparse else "dense",
            numel=self.numel,
            target=step.target,
            selected_local=step.selected_local,
            selected_global=selected if step.finite else 0,
            bytes_sent=self._transport.bytes_sent,
            bytes_received=self._transport.bytes_received,
            messages=self._transport.messages,
            seconds=step.time.seconds,
            local_threshold=step.local_threshold if step.finite else 0.0,
            global_threshold=step.global_threshold if step.finite else 0.0,
            skipped=not step.finite,
            overflow=step.overflow,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: tensors and plain numbers. Differs on every rank."""
        state = self._state
        return {
            "residual": self._residual.clone(),
            "velocity": self._velocity.clone(),
            "boundaries": torch.tensor(state.boundaries, dtype=torch.int64),
            "local_threshold": state.local.value,
            "local_trend": state.local.trend,
            "global_threshold": state.total.value,
            "global_trend": state.total.trend,
            "step": state.step,
            "skipped": state.skipped,
            "sparse_steps": state.sparse_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Collective: all ranks load together, each its own state, of the same step; an error on
        every rank says so if one does not, or if a state is damaged, and nothing has changed then.
        Boundaries of another number of ranks are left out, and cut anew in the next step.
        """
        if isinstance(state, Mapping):  # older versions did not count what was skipped
            state = {"skipped": 0, **state}
        problem = self._problem_of(state)
        common = "" if problem else agreed(state)
        with self._transport.together(Operation.LOAD):
            self._transport.agree(problem, common, "load the state of the same step")
        self.restore(state)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take a state that fits, and that ranks agree on."""
        boundaries = state["boundaries"].tolist()
        self._before = None
        self._residual.copy_(state["residual"])
        self._velocity.copy_(state["velocity"])
        self._state = State(
            clean=not bool(self._residual.any()),
            step=state["step"],
            skipped=state["skipped"],
            sparse_steps=state["sparse_steps"],
            local=Carried(float(state["local_threshold"]), float(state["local_trend"])),
            total=Carried(float(state["global_threshold"]), float(state["global_trend"])),
            boundaries=tuple(boundaries) if len(boundaries) == self._transport.size + 1 else (),
        )

    def _problem_of(self, state: Any) -> str | None:
        """Why a state does not fit, and what to do."""
        wrong = _STATE(state)
        if wrong:
            return f"this is not the state of a SparseAllreduce: state{wrong}"
        residual, velocity = state["residual"], state["velocity"]
        if residual.shape != self._residual.shape or residual.dtype != self._residual.dtype:
            return (
                f"the state's residual has {residual.numel()} elements of {residual.dtype}, this "
                f"reduction {self.numel} of {self._residual.dtype}: load it into one constructed "
                "with the same numel and dtype"
            )
        if velocity.shape != self._velocity.shape or velocity.dtype != self._velocity.dtype:
            return (
                f"the state's velocity has {velocity.numel()} elements of {velocity.dtype}, this "
                f"reduction's {self._velocity.numel()} of {self._velocity.dtype}: load it into one "
                "constructed with momentum if it was saved with it, and without if not"
            )
        wrong = contradiction(state, self.numel)
        return wrong and f"the state is damaged: state{wrong}"

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.shape != (self.numel,):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but must be flat with {self.numel} "
                f"elements: pass {name}.flatten(), or construct SparseAllreduce with its numel"
            )
        if tensor.dtype != self.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}, but must be {self.dtype}: construct SparseAllreduce "
                f"with dtype={tensor.dtype}, or convert it with .to({self.dtype})"
            )
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but must be on {self.device}: construct "
                f'SparseAllreduce with device="{tensor.device}", or move it with '
                f'.to("{self.device}")'
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")


@dataclasses.dataclass(frozen=True)
class _Before:
    """How to take back the last step. Its old residual and velocity lie in the buffers."""

    state: State
    swapped: bool
    """Whether residual and buffer were exchanged; if not, the residual is all zeros."""


def agreed(kept: Mapping[str, Any]) -> str:
    """What must be the same in the states of all ranks."""
    numbers = ("step", "skipped", "sparse_steps", "global_threshold", "global_trend")
    boundaries = zlib.crc32(str(kept["boundaries"].tolist()).encode())
    listed = ", ".join(f"{name}={kept[name]}" for name in numbers)
    return f"{listed}, crc32 of boundaries={boundaries}"


def contradiction(kept: Mapping[str, Any], numel: int, ranks: int | None = None) -> str | None:
    """What is wrong with a state for so many elements, though each part alone may be right."""
    for name in ("skipped", "sparse_steps"):
        if kept[name] > kept["step"]:
            return f'["{name}"] is {kept[name]}, but of {kept["step"]} steps in all'
    wrong = schema.regions(numel, ranks)(kept["boundaries"])
    return wrong and f'["boundaries"]{wrong}'


def _problem(
    algorithm: Algorithm, numel: int, dtype: torch.dtype, nonfinite: str, momentum: float
) -> str | None:
    """What is wrong with the arguments, and how to mend it."""
    if not isinstance(algorithm, Algorithm):
        return (
            f"algorithm is {algorithm!r}, but must be an algorithm such as "
            'oktopk.OkTopk(density=0.02) or oktopk.algorithm("oktopk", density=0.02)'
        )
    if type(numel) is not int or numel < 1:
        return f"numel is {numel!r}, but must be a whole number, at least 1"
    if dtype not in _RESIDUAL_DTYPE:
        return f"dtype is {dtype}, but must be one of {', '.join(map(str, _RESIDUAL_DTYPE))}"
    if nonfinite not in ("raise", "skip"):
        return f'nonfinite is {nonfinite!r}, but must be "raise" or "skip"'
    if not 0 <= momentum < 1:
        return f"momentum is {momentum!r}, but must be at least 0 and below 1"
    return None
