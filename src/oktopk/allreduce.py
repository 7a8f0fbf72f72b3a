"""SparseAllreduce: the public call around an algorithm.

It owns what belongs to one gradient on one rank (residual, thresholds, boundaries, counters),
checks what comes in, and commits a step only when all of it has succeeded.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithms import Algorithm, Dense, State, Step
from .algorithms.base import Buffers
from .select import Carried
from .stats import StepStats
from .transport import Transport
from .wire import Entries

_RESIDUAL_DTYPE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_DESCRIPTION_BYTES = 1024


class NonFiniteGradientError(FloatingPointError):
    """A gradient held a NaN or Inf on some rank. Every rank raises it, and none has changed."""


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
    ) -> None:
        transport = Transport(group, device)
        problem = _problem(algorithm, numel, dtype, nonfinite)
        _check_agreement(
            transport,
            problem,
            f"{numel=}, {dtype=}, {nonfinite=}, {algorithm=}",
            "construct SparseAllreduce with the same arguments",
        )
        self.algorithm = algorithm
        self.numel = numel
        self.dtype = dtype
        self.device = transport.device
        self.nonfinite = nonfinite
        self.last: StepStats | None = None
        """Statistics of the last step; None before the first."""
        residual_dtype = _RESIDUAL_DTYPE[dtype]
        self._transport = transport
        self._residual = torch.zeros(numel, dtype=residual_dtype, device=self.device)
        self._buffers = Buffers(numel, residual_dtype, self.device)
        self._state = State()
        self._dense = Dense()

    @property
    def residual(self) -> Tensor:
        """This rank's error feedback. The next step replaces it: clone it to keep it."""
        return self._residual

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
        dense = self._state.step < self.algorithm.warmup_steps
        algorithm = self._dense if dense else self.algorithm
        self._transport.reset()
        if out is None:
            out = torch.empty_like(gradient, requires_grad=False)
        step = Step(
            gradient.detach(),
            out.detach(),
            self._residual,
            algorithm.target(self.numel),
            dataclasses.replace(self._state),
            self._transport,
            self._buffers,
        )
        reduced = algorithm.reduce(step)
        if isinstance(reduced, Entries):
            # Finite values may have sums that are not: the same on every rank.
            step.finite = step.finite and bool(torch.isfinite(reduced.values).all())
        if not step.finite and self.nonfinite == "raise":
            raise NonFiniteGradientError(self._blame(step))
        with step.time("apply"):
            if step.finite:
                self._commit(step, reduced)
            else:
                step.out.zero_()
                self._state.step += 1
        self._report(step, reduced)
        return out

    def _blame(self, step: Step) -> str:
        """Which ranks had a NaN or Inf. All ranks ask together, since all know that one had."""
        overwritten = step.out.data_ptr() == step.gradient.data_ptr()
        finite = overwritten or bool(torch.isfinite(step.gradient).all())
        table = self._transport.trade_numbers([[finite]] * self._transport.size)
        bad = [str(rank) for rank, (finite,) in enumerate(table) if not finite]
        where = f"the gradient of rank {', '.join(bad)}" if bad else "a sum over ranks"
        return (
            f"step {self._state.step}: NaN or Inf in {where}. No rank's residual has changed. Find "
            "where it comes from (a learning rate too high, an empty batch, values near the "
            'largest of their type), or pass nonfinite="skip" to skip such steps'
        )

    def _commit(self, step: Step, reduced: Entries | Tensor) -> None:
        """Write the average to `out`, and take the step's residual and state for the next."""
        if isinstance(reduced, Entries):
            averages = self._round(reduced.values / self._transport.size)
            step.out.zero_()
            if averages.dtype == reduced.values.dtype:
                step.kernels.add_at(step.out, reduced.indices, averages)
            else:
                step.out[reduced.indices] = averages
            self._residual, self._buffers.accumulated = step.accumulated, self._residual
            self._keep_rounding(reduced.values, averages, reduced.indices)
            step.state.clean = False
            step.state.sparse_steps += 1
        else:
            if not step.state.clean:
                self._residual.zero_()
            if step.out.dtype == reduced.dtype:
                torch.div(reduced, self._transport.size, out=step.out)
            else:
                step.out.copy_(self._round(reduced / self._transport.size))
                self._keep_rounding(reduced, step.out)
            step.state.clean = step.out.dtype == reduced.dtype
        self._state = step.state
        self._state.step += 1

    def _round(self, averages: Tensor) -> Tensor:
        """In the gradient's type; what float16 cannot hold waits in the residual."""
        if averages.dtype == self.dtype:
            return averages
        limit = torch.finfo(self.dtype).max
        return averages.clamp(-limit, limit).to(self.dtype)

    def _keep_rounding(self, sums: Tensor, averages: Tensor, indices: Tensor | None = None) -> None:
        """What rounding averages to 16 bits costs goes into the residual.

        All ranks hold the same sums; each keeps the errors of its own share of them.
        """
        if averages.dtype == sums.dtype:
            return
        size, rank, count = self._transport.size, self._transport.rank, sums.numel()
        share = slice(count * rank // size, count * (rank + 1) // size)
        errors = sums[share] - averages[share].to(sums.dtype) * size
        self._residual[share if indices is None else indices[share]] += errors

    def _report(self, step: Step, reduced: Entries | Tensor) -> None:
        sparse = isinstance(reduced, Entries)
        selected = len(reduced) if isinstance(reduced, Entries) else self.numel
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
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: tensors and plain numbers. Differs on every rank."""
        state = self._state
        return {
            "residual": self._residual.clone(),
            "boundaries": torch.tensor(state.boundaries, dtype=torch.int64),
            "local_threshold": state.local.value,
            "local_trend": state.local.trend,
            "global_threshold": state.total.value,
            "global_trend": state.total.trend,
            "step": state.step,
            "sparse_steps": state.sparse_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken.

        Collective: all ranks load together, each its own state, of the same step; an error on
        every rank says so if one does not. Boundaries of another number of ranks are left out,
        and cut anew in the next step.
        """
        problem, common = self._problem_of(state), ""
        if not problem:
            common = ", ".join(
                f"{key}={state[key]}"
                for key in ("step", "sparse_steps", "global_threshold", "global_trend")
            )
            boundaries = state["boundaries"].tolist()
            common += f", crc32 of boundaries={zlib.crc32(str(boundaries).encode())}"
        _check_agreement(self._transport, problem, common, "load the state of the same step")
        self._residual.copy_(state["residual"])
        self._state = State(
            clean=not bool(self._residual.any()),
            step=int(state["step"]),
            sparse_steps=int(state["sparse_steps"]),
            local=Carried(float(state["local_threshold"]), float(state["local_trend"])),
            total=Carried(float(state["global_threshold"]), float(state["global_trend"])),
            boundaries=tuple(boundaries) if len(boundaries) == self._transport.size + 1 else (),
        )

    def _problem_of(self, state: dict[str, Any]) -> str | None:
        """Why a state does not fit, and what to do."""
        expected = self.state_dict().keys()
        if state.keys() != expected:
            return (
                f"this is not the state of a SparseAllreduce: it has {sorted(state)}, but must "
                f"have {sorted(expected)}"
            )
        residual = state["residual"]
        if residual.shape != self._residual.shape or residual.dtype != self._residual.dtype:
            return (
                f"the state's residual has {residual.numel()} elements of {residual.dtype}, this "
                f"reduction {self.numel} of {self._residual.dtype}: load it into one constructed "
                "with the same numel and dtype"
            )
        return None

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


def _problem(algorithm: Algorithm, numel: int, dtype: torch.dtype, nonfinite: str) -> str | None:
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
    return None


def _check_agreement(transport: Transport, problem: str | None, mine: str, fix: str) -> None:
    """One small allgather, so that ranks that are wrong or differ fail at once, all of them,
    instead of hanging or going apart later."""
    text = f"ERROR {problem}" if problem else mine
    encoded = text.encode()[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES)
    message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(transport.device)
    texts = [
        bytes(other.tolist()).decode(errors="replace").strip()
        for other in transport.all_gather(message)
    ]
    if problem:
        raise ValueError(problem)
    if len(set(texts)) > 1:
        lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
        raise ValueError(f"ranks disagree: {fix} on every rank\n" + "\n".join(lines))
