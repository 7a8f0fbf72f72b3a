"""Adam and AdamW for sparse averages.

Adam divides by the root of a moving average of squared gradients, its second moment. In a sparse
average an element is zero for many steps and then a sum over all of them, which looks like one
large gradient: the second moment rises, and the step is too small by about the root of the
density. Here the second moment does not look at sparse averages. It stays as the dense warm-up left
it, and slowly follows the squares of the ranks' own gradients. So a step is linear in the
gradient, and what error feedback sends late moves a parameter as far as if it had come at once.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .engine import AllReducer, log, reducer_of

_REFRESH_INTERVAL = 256
_HORIZON_BETA = 0.999
"""The second moment follows no faster than a moving average with this factor a step: what divides
without looking at the gradient must not be noisy."""
_LARGEST = 100.0
"""A gradient moves a parameter by at most this many learning rates in all; the second moment is
raised where it would be more. What has waited for many steps may move it far, but not what the
warm-up never saw, such as a rare word's embedding: it would be divided by nothing."""

_Reducers = dict[AllReducer, dict[str, Tensor]]


class _SparseAdam(Optimizer):
    """What Adam and AdamW have in common; `_torch` is torch's class that they derive from."""

    _torch: ClassVar[type[torch.optim.Adam] | type[torch.optim.AdamW]]
    _decoupled: ClassVar[bool]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        refresh_interval: int | None,
        **options: Any,
    ) -> None:
        if refresh_interval is not None and not (
            type(refresh_interval) is int and refresh_interval >= 1
        ):
            raise ValueError(
                f"refresh_interval is {refresh_interval!r}, but must be a whole number of steps, "
                "at least 1, or None to keep the second moment as the warm-up left it"
            )
        self.refresh_interval = refresh_interval
        # torch's own; before torch 2.7 Adam and AdamW have no class in common but Optimizer.
        self._torch.__init__(self, params, lr, betas, eps, weight_decay, **options)  # type: ignore[arg-type]
        self._step_supports_amp_scaling = False  # GradScaler is to unscale gradients itself

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"refresh_interval": self.refresh_interval}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: torch's own where averages are dense, and linear where they are sparse."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reducers = self._reducers()
        _note_clipping(reducers)
        sparse = {
            p for r, named in reducers.items() for name, p in named.items() if name in r.sparse
        }
        linear = self._linear(sparse)
        gradients = {p: p.grad for p in linear}
        for p in linear:
            p.grad = None  # torch's step leaves it out
        try:
            inspect.unwrap(self._torch.step)(self)  # without its hooks, which are run around ours
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        self._mark_unknown(sparse - linear)
        self._refresh(reducers)
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p in linear and p.grad is not None]
            if with_gradient:
                self._step_linearly(group, with_gradient)
        return loss

    def _reducers(self) -> _Reducers:
        """Who averages the gradients of this optimizer's parameters, and of which, by name."""
        reducers: _Reducers = {}
        for group in self.param_groups:
            for p in group["params"]:
                found = reducer_of(p)
                if found is not None:
                    reducers.setdefault(found[0], {})[found[1]] = p
        for reducer in reducers:
            reducer.square_interval = self.refresh_interval
        return reducers

    def _linear(self, sparse: set[Tensor]) -> set[Tensor]:
        """The parameters to step linearly: of those with a sparse average, the ones whose second
        moment is known from dense steps. It is kept without the bias of its beginning."""
        linear = set()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if not state:
                    continue
                moment = state["exp_avg_sq"]
                bias = 1 - group["betas"][1] ** float(state["step"])
                if p in sparse and "linear" not in state:  # the first one after dense steps
                    state["linear"] = bool(moment.any())
                    moment.div_(bias if state["linear"] else 1.0)
                elif p not in sparse and "linear" in state:  # dense again
                    moment.mul_(bias if state.pop("linear") else 1.0)
                if state.get("linear"):
                    linear.add(p)
        return linear

    def _mark_unknown(self, parameters: set[Tensor]) -> None:
        """Parameters that had no dense step go on with torch's own."""
        new = [s for p in parameters if (s := self.state.get(p)) and "linear" not in s]
        for state in new:
            state["linear"] = False
        if new and len(new) == len(parameters):
            log.warning(
                "%d parameters have sparse gradients from their first step on, so their second "
                "moment is not known and they are stepped as by torch's %s: give the algorithm "
                "warmup_steps, say 100",
                len(new),
                self._torch.__name__,
            )

    def _refresh(self, reducers: _Reducers) -> None:
        """Let the second moment follow what is known anew of the ranks' own gradients."""
        betas = {p: group["betas"][1] for group in self.param_groups for p in group["params"]}
        for reducer, named in reducers.items():
            states = {n: self.state[p] for n, p in named.items() if self.state[p].get("linear")}
            for name, total in reducer.square_totals.items():
                state = states.get(name, {"ratio": 0.0})
                if "ratio" not in state:  # the first round is over: nothing is to change as a whole
                    sum_now = float(state["exp_avg_sq"].sum(dtype=torch.float64))
                    state["ratio"] = sum_now / total if total else 0.0
            for part in reducer.take_squares(states):
                state = states[part.name]
                weight = 1 - max(betas[named[part.name]], _HORIZON_BETA) ** part.steps
                moment = state["exp_avg_sq"]
                flat = moment.as_strided((moment.numel(),), (1,))
                here = flat[part.start : part.start + part.values.numel()]
                new = here.lerp((part.values * state["ratio"]).to(here.dtype), weight)
                here.copy_(torch.where(torch.isfinite(new), new, here))

    def _step_linearly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        averages = [state["exp_avg"] for state in states]
        moments = [state["exp_avg_sq"] for state in states]
        lr, decay, beta = float(group["lr"]), group["weight_decay"], group["betas"][0]
        for state in states:
            state["step"] += 1

        least = torch._foreach_div(gradients, _LARGEST)
        torch._foreach_mul_(least, least)
        torch._foreach_maximum_(moments, least)
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if self._decoupled:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        torch._foreach_lerp_(averages, gradients, 1 - beta)
        divisors = torch._foreach_sqrt(moments)
        torch._foreach_add_(divisors, group["eps"])
        sizes = [-lr / (1 - beta ** float(state["step"])) for state in states]
        torch._foreach_addcdiv_(parameters, averages, divisors, sizes)


def _note_clipping(reducers: _Reducers) -> None:
    """Squares of the ranks' own gradients are to be as small as clipping makes averages."""
    for reducer, named in reducers.items():
        name, norm = reducer.probe
        gradient = named[name].grad if name in named else None
        if gradient is not None and norm > 0:
            factor = float(torch.linalg.vector_norm(gradient)) / norm
            if math.isfinite(factor):
                reducer.note_clipping(factor)


class Adam(_SparseAdam, torch.optim.Adam):
    """torch.optim.Adam for compressed gradients; see `AdamW`."""

    _torch, _decoupled = torch.optim.Adam, False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        refresh_interval: int | None = _REFRESH_INTERVAL,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        options = {"foreach": foreach, "maximize": maximize, "fused": fused}
        super().__init__(params, lr, betas, eps, weight_decay, refresh_interval, **options)


class AdamW(_SparseAdam, torch.optim.AdamW):
    """torch.optim.AdamW for compressed gradients.

    ```python
    model = DDP(model)
    oktopk.attach(model, oktopk.OkTopk(density=0.02, warmup_steps=128))
    optimizer = oktopk.AdamW(model.parameters(), lr=1e-3)
    ```

    It finds out by itself which of its parameters are compressed. Without compression, for small
    parameters that are averaged densely, and during the dense warm-up, it is torch's AdamW to the
    last bit. Give the algorithm a warm-up of 100 steps or more: the second moment comes from it.

    Args:
        refresh_interval: sparse steps in which the second moment of every element is brought up to
            date once, a part in each step; costs 4/refresh_interval bytes for an element and
            step, twice, like a dense allreduce. None keeps it as the warm-up left it.

    The others are those of torch.optim.AdamW.
    """

    _torch, _decoupled = torch.optim.AdamW, True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        refresh_interval: int | None = _REFRESH_INTERVAL,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        options = {"foreach": foreach, "maximize": maximize, "fused": fused}
        super().__init__(params, lr, betas, eps, weight_decay, refresh_interval, **options)


_watched: weakref.WeakSet[AllReducer] = weakref.WeakSet()
_hooks: list[Any] = []


def advise(reducer: AllReducer) -> None:
    """Log a line when torch's Adam or AdamW first steps with sparse averages of this reducer."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))
    _watched.add(reducer)


def _look(optimizer: Optimizer, *_: Any) -> None:
    """Before every step of any optimizer."""
    sparse = {reducer for reducer in _watched if reducer.sparse}
    if not sparse:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    found = sparse & {pair[0] for p in parameters if (pair := reducer_of(p))}
    _watched.difference_update(found)
    plain = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    ours = isinstance(optimizer, _SparseAdam)
    if plain and not ours and any(reducer.rank == 0 for reducer in found):
        log.warning(
            "torch's %s takes steps that are too small with sparse gradients: what has waited for "
            "many steps looks like one large gradient to its second moment. oktopk.%s is the same "
            "optimizer without this",
            type(optimizer).__name__,
            "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Adam",
        )
