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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .engine import AllReducer, log, reducer_of
from .kernels import for_device

_REFRESH_INTERVAL = 512
_SPARSE_BETA1 = 0.5
"""Momentum of sparse steps. What arrives is the mean of many steps already; to spread it over ten
more makes it only later."""
_HORIZON_BETA = 0.999
"""The second moment follows no faster than a moving average with this factor a step: what divides
without looking at the gradient must not be noisy."""
_PRIOR_STEPS = 8
"""Dense steps after which a second moment is half its elements' own, half their surroundings'."""
_LARGEST = 10, 100
"""A gradient moves a parameter by at most as many learning rates in all as there were steps, within
these limits; the second moment is raised where it would be more. What has waited for many steps
may move it far, but not what the warm-up never saw, such as a rare word's embedding: it would be
divided by nothing."""


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
        valid = type(refresh_interval) is int and refresh_interval >= 1
        if refresh_interval is not None and not valid:
            raise ValueError(
                f"refresh_interval is {refresh_interval!r}, but must be a whole number of steps, "
                "at least 1, or None to keep the second moment as the warm-up left it"
            )
        for name in ("amsgrad", "capturable", "differentiable"):
            if options.get(name):
                raise ValueError(f"{name}=True is not supported with sparse gradients")
        self.refresh_interval = refresh_interval
        # torch's own; before torch 2.7 Adam and AdamW have no class in common but Optimizer.
        self._torch.__init__(self, params, lr, betas, eps, weight_decay, **options)  # type: ignore[arg-type]
        self._step_supports_amp_scaling = False  # GradScaler is to unscale gradients itself

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"refresh_interval": self.refresh_interval}

    # It reads numbers from tensors, so torch.compile could not make one piece of it anyway.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: torch's own where averages are dense, and linear where they are sparse."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reducers = self._reducers()
        linear: set[Tensor] = set()
        for reducer, named in reducers.items():
            _note_clipping(reducer, named)
            linear |= self._linear(reducer, named)
        gradients = {p: p.grad for p in linear}
        for p in linear:
            p.grad = None  # torch's step leaves it out
        try:
            inspect.unwrap(self._torch.step)(self)  # without its hooks, which are run around ours
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        for reducer, named in reducers.items():
            self._refresh(reducer, {name: p for name, p in named.items() if p in linear})
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p in linear and p.grad is not None]
            if with_gradient:
                self._step_linearly(group, with_gradient)
        return loss

    def _reducers(self) -> dict[AllReducer, dict[str, Tensor]]:
        """Who averages the gradients of this optimizer's parameters, and of which, by name."""
        reducers: dict[AllReducer, dict[str, Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                found = reducer_of(p)
                if found is not None:
                    reducers.setdefault(found[0], {})[found[1]] = p
        for reducer in reducers:
            reducer.track_squares(self.refresh_interval, self)
        return reducers

    def _linear(self, reducer: AllReducer, named: Mapping[str, Tensor]) -> set[Tensor]:
        """The parameters to step linearly: of those with a sparse average, the ones whose second
        moment is known from dense steps. The others are left to torch for good."""
        if not reducer.sparse:
            reducer.notes.pop("known", None)
            reducer.notes.pop("ratio", None)
            return set()
        known = reducer.notes.setdefault("known", {})
        unknown = []
        for name in reducer.sparse - known.keys():
            p = named.get(name)
            if p is not None and p.grad is not None:
                state = self.state.get(p, {})
                known[name] = bool(state) and _smooth(state["exp_avg_sq"], float(state["step"]))
                unknown += [] if known[name] else [name]
        if unknown and reducer.rank == 0:
            log.warning(
                "%d parameters have sparse gradients from their first step on (%s), so their "
                "second moment is not known, and they are stepped as by torch's %s: give the "
                "algorithm warmup_steps, say 100",
                len(unknown),
                ", ".join(sorted(unknown)[:3]),
                self._torch.__name__,
            )
        return {p for name, p in named.items() if name in reducer.sparse and known.get(name)}

    def _refresh(self, reducer: AllReducer, linear: Mapping[str, Tensor]) -> None:
        """Let the second moment follow what is known anew of the ranks' own gradients."""
        ratios = reducer.notes.setdefault("ratio", {})
        applied, averaged = reducer.notes.get("clipping", (1.0, 1.0))
        clipping = applied / averaged if applied and averaged else 1.0
        betas = {p: group["betas"][1] for group in self.param_groups for p in group["params"]}
        totals = reducer.square_totals
        for name in linear.keys() & totals.keys() - ratios.keys():
            if totals[name] > 0:  # the first round is over: as a whole nothing is to change
                moment, bias = self._moment(linear[name], betas[linear[name]])
                ratios[name] = _sum(moment) / bias / (totals[name] * clipping)
        for part in reducer.take_squares(linear):
            if part.name not in ratios:
                continue
            beta = betas[linear[part.name]]
            moment, bias = self._moment(linear[part.name], beta)
            flat = moment.as_strided((moment.numel(),), (1,))
            here = flat[part.start : part.start + part.values.numel()]
            new = (part.values * (ratios[part.name] * clipping * bias)).to(here.dtype)
            new = here.lerp(new, 1 - max(beta, _HORIZON_BETA) ** part.steps)
            here.copy_(torch.where(torch.isfinite(new), new, here))

    def _moment(self, p: Tensor, beta: float) -> tuple[Tensor, float]:
        """A parameter's second moment, as its elements lie in memory, and the bias in it."""
        state = self.state[p]
        like = torch.empty_like(p)
        if state["exp_avg_sq"].stride() != like.stride():  # from a checkpoint, say
            state["exp_avg_sq"] = like.copy_(state["exp_avg_sq"])
        return state["exp_avg_sq"], 1 - beta ** float(state["step"])

    def _step_linearly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """AdamW's step, but that its second moment, free of bias, stays as it is."""
        if group["amsgrad"]:
            raise ValueError("amsgrad=True is not supported with sparse gradients")
        lr, decay, beta2 = float(group["lr"]), group["weight_decay"], group["betas"][1]
        beta1 = min(group["betas"][0], _SPARSE_BETA1)
        steps = torch.stack([self.state[p]["step"] for p in parameters]).tolist()
        for p, before in zip(parameters, steps, strict=True):
            state, bias = self.state[p], 1 - beta2 ** (before + 1)
            assert p.grad is not None
            for_device(p.device).adam(
                p,
                p.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                sign=-1.0 if group["maximize"] else 1.0,
                grown=bias / (1 - beta2**before),
                least=math.sqrt(bias) / min(max(before, _LARGEST[0]), _LARGEST[1]),
                weight=1 - beta1,
                decay=0.0 if self._decoupled else decay,
                shrink=1 - lr * decay if self._decoupled else 1.0,
                unbias=1 / math.sqrt(bias),
                eps=group["eps"],
                lr=lr,
            )
            state["step"] += 1


def _note_clipping(reducer: AllReducer, named: Mapping[str, Tensor]) -> None:
    """Keep moving averages of how large an average was, and is now that it is to be applied.

    The ranks' own squares are to be as small as clipping has made the averages.
    """
    if reducer.probe is None or reducer.square_interval is None:
        return
    name, average = reducer.probe
    gradient = named[name].grad if name in named else None
    if gradient is not None:
        now = [_sum(t.double().square()) for t in (gradient, average)]
        before = reducer.notes.get("clipping", now)
        part = 1 / reducer.square_interval
        reducer.notes["clipping"] = [a + part * (b - a) for a, b in zip(before, now, strict=True)]


def _smooth(moment: Tensor, steps: float) -> bool:
    """Make up for a second moment being of few steps: what an element has not shown yet is taken
    from its row and its column, as in Adafactor. False where nothing is known at all."""
    matrix = moment.reshape(moment.shape[0], -1) if moment.ndim > 1 else moment.reshape(1, -1)
    rows, columns, total = (_sums(matrix, dims) for dims in ([1], [0], [0, 1]))
    if not total > 0:
        return False
    expected = (rows * columns / total).reshape(moment.shape).to(moment.dtype)
    moment.lerp_(expected, _PRIOR_STEPS / (_PRIOR_STEPS + steps))
    return True


def _sums(values: Tensor, dims: Sequence[int]) -> Tensor:
    """Over some dimensions, which are kept, of values that are not negative. As integers, so that
    their order makes no difference and all ranks get the same, whatever their number of threads."""
    largest = float(values.max())
    if not 0 < largest < math.inf:
        return torch.zeros([1] * values.ndim, dtype=torch.float64, device=values.device)
    unit = largest / (2**62 // values.numel())
    return (values.double() / unit).to(torch.int64).sum(list(dims), keepdim=True) * unit


def _sum(values: Tensor) -> float:
    """Of all."""
    return float(_sums(values, range(values.ndim)))


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
        **options: Any,
    ) -> None:
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
    last bit. Give the algorithm a warm-up: the second moment comes from it. 100 steps or more are
    best; where dense steps take long, five will do.

    Args:
        refresh_interval: sparse steps in which the second moment of every element is brought up to
            date once, a part in each step; costs 4/refresh_interval bytes for an element and
            step, twice, like a dense allreduce. None keeps it as the warm-up left it.
        options: those of torch.optim.AdamW; not amsgrad, capturable and differentiable.
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
        **options: Any,
    ) -> None:
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
    plain = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if not sparse or not plain or isinstance(optimizer, _SparseAdam):
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    found = sparse & {pair[0] for p in parameters if (pair := reducer_of(p))}
    _watched.difference_update(found)
    if any(reducer.rank == 0 for reducer in found):
        log.warning(
            "torch's %s takes steps that are too small with sparse gradients: what has waited for "
            "many steps looks like one large gradient to its second moment. oktopk.%s is the same "
            "optimizer without this",
            type(optimizer).__name__,
            "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Adam",
        )
