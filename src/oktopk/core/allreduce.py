"""SparseAllreduce: the public call for one vector. It checks, and `Reduction` does the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithms import Algorithm
from . import schema
from .chooser import SAVED as CHOOSER
from .chooser import chooser_for
from .reduction import FLOATS, RESIDUAL_DTYPE, Reduction
from .transport import Operation, Transport
from .upgrade import upgraded_progress

_STATE = schema.record(
    {
        "residual": FLOATS,
        "velocity": FLOATS,
        "step": schema.whole(),
        "skipped": schema.whole(),
        "state": schema.entries(schema.plain),
        "chooser": CHOOSER,
    }
)


class SparseAllreduce(Reduction):
    """Averages a flat gradient over ranks, applying only its most important entries.

    ```python
    reduce = SparseAllreduce(OkTopk(density=0.02), numel=grad.numel())
    average = reduce(grad)
    ```

    Entries that are not applied stay in `residual` and are added to the next gradient: nothing is
    lost.

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
            gradients before they select, and forget the velocity of applied entries: DGC's
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
        super().__init__(algorithm, numel, transport, dtype, momentum)
        self.nonfinite = nonfinite
        self._chooser = chooser_for(algorithm, numel)

    def change(self, algorithm: Algorithm) -> None:
        super().change(algorithm)
        self._chooser = chooser_for(algorithm, self.numel)

    def rewind(self) -> None:
        super().rewind()
        if self._chooser is not None:
            self._chooser.rewind()

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
        chooser, since = self._chooser, 0.0
        if chooser is not None:
            since = time.perf_counter()
            self.run(chooser.begin(self.taken, self._transport))
        attempt = self.attempt([gradient.detach()], [out.detach()])
        if attempt.finite:
            self.commit(attempt)
            if chooser is not None:
                chooser.note(time.perf_counter() - since, self.last)
        elif self.nonfinite == "skip":
            self.skip(attempt, fill=0.0)
        else:
            bad = attempt.acc.nonfinite_parts()
            self._transport.blame(self.steps, None if bad is None else bool(bad))
        return out

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: tensors and plain values. Differs on every rank."""
        tensors = {"residual": self.residual.clone(), "velocity": self.velocity.clone()}
        chooser = {} if self._chooser is None else self._chooser.state_dict()
        return tensors | self.progress() | {"chooser": chooser}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Collective: all ranks load together, each its own state, of the same step. If one does not,
        or if a state is damaged, all ranks raise, and nothing has changed. Regions of another
        number of ranks are left out, and cut anew in the next step.
        """
        if isinstance(state, Mapping):
            state = upgraded_progress(state)
        wrong, chooser, running, common = _STATE(state), self._chooser, self.running, ""
        problem = wrong and f"this is not the state of a SparseAllreduce: state{wrong}"
        if not problem:
            chooser = chooser_for(self.algorithm, self.numel, state["chooser"])
            running = self.algorithm if chooser is None else chooser.running
            problem = self.problem(state, running)
        if not problem:
            common = self.agreed(state, running)
            common += "" if chooser is None else f", {chooser.agreed()}"
        with self._transport.together(Operation.LOAD):
            self._transport.agree(problem, common, "load the state of the same step")
        self.restore(state, running)
        self._chooser = chooser

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


def _problem(
    algorithm: Algorithm, numel: int, dtype: torch.dtype, nonfinite: str, momentum: float
) -> str | None:
    """The first mistake in the arguments, and how to correct it."""
    if not isinstance(algorithm, Algorithm):
        return (
            f"algorithm is {algorithm!r}, but must be an algorithm such as "
            'oktopk.OkTopk(density=0.02) or oktopk.algorithm("oktopk", density=0.02)'
        )
    if type(numel) is not int or numel < 1:
        return f"numel is {numel!r}, but must be a whole number, at least 1"
    if dtype not in RESIDUAL_DTYPE:
        return f"dtype is {dtype}, but must be one of {', '.join(map(str, RESIDUAL_DTYPE))}"
    if nonfinite not in ("raise", "skip"):
        return f'nonfinite is {nonfinite!r}, but must be "raise" or "skip"'
    if not 0 <= momentum < 1:
        return f"momentum is {momentum!r}, but must be at least 0 and below 1"
    return None
