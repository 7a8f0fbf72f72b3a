"""Adam and AdamW for sparse averages.

Adam divides by the root of a moving average of squared gradients, its second moment. In a sparse
average an element is zero for many steps and then a sum over all of them, which looks like one
large gradient: the second moment rises, and the step is too small by about the root of the
density. Here the second moment does not look at sparse averages. It stays as the dense warm-up left
it, and slowly follows the squares of the ranks' own gradients. So a step is linear in the
gradient, and an entry that error feedback sends late moves a parameter as far as if it had come at
once.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .core.moments import SecondMoments
from .core.reducer import AllReducer, log
from .core.usage import reducer_of
from .kernels import for_device

_REFRESH_INTERVAL = 512
_SPARSE_BETA1 = 0.5
"""Momentum of sparse steps. An entry is the sum of many steps already. To spread it over ten more
would only delay it."""
_HORIZON_BETA = 0.999
"""The second moment follows no faster than a moving average with this factor a step. It divides
gradients that it has not seen, so it must not be noisy."""
_PRIOR_STEPS = 8
"""Dense steps after which a second moment is half its elements' own, half their surroundings'."""
_LARGEST = 10, 100
"""A gradient moves a parameter by at most as many learning rates in all as there were steps, within
these limits; the second moment is raised where it would be more. An element that has waited for
many steps may move far, but not one that the warm-up never saw, such as a rare word's embedding: it
would be divided by nothing."""
_LARGEST_STEP = 2.0
"""By how many learning rates a step may move the elements of a parameter, in the root mean square.
It is about 1 as long as the second moment is right, also with sums that have waited. If it is more
than this, gradients have grown suddenly, and it is made 1, as it would be in dense Adam."""

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have said that they know too little."""


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
        self.refresh_interval = refresh_interval
        # torch's own; before torch 2.7 Adam and AdamW have no class in common but Optimizer.
        self._torch.__init__(self, params, lr, betas, eps, weight_decay, **options)  # type: ignore[arg-type]
        self._step_supports_amp_scaling = False  # GradScaler is to unscale gradients itself

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"refresh_interval": self.refresh_interval}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does."""
        _refuse_options([self.defaults | param_group])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of one of these optimizers, or of torch's."""
        _refuse_options(state_dict["param_groups"])
        super().load_state_dict(state_dict)

    @_disable_dynamo  # the engine's threads, and a kernel of its own: nothing to compile
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step: torch's own where averages are dense, and linear where they are sparse."""
        _refuse_options(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        linear = {
            reducer: self._linear(reducer, named) for reducer, named in self._reducers().items()
        }
        parameters = {p for named in linear.values() for p in named.values()}
        gradients = {p: p.grad for p in parameters}
        for p in parameters:
            p.grad = None  # torch's step leaves it out
        try:
            inspect.unwrap(self._torch.step)(self)  # without its hooks, which are run around ours
        finally:
            for p, gradient in gradients.items():
                p.grad = gradient
        for reducer, named in linear.items():
            self._refresh(reducer, named)
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p in parameters and p.grad is not None]
            if with_gradient:
                self._step_linearly(group, with_gradient)
        return loss

    def _reducers(self) -> dict[AllReducer, dict[str, Tensor]]:
        """The reducers of this optimizer's parameters, and those parameters by name."""
        reducers: dict[AllReducer, dict[str, Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                found = reducer_of(p)
                if found is not None and found[0].moments is not None:
                    reducers.setdefault(found[0], {})[found[1]] = p
        return reducers

    def _linear(self, reducer: AllReducer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters to step linearly: of those with a sparse average, the ones whose second
        moment is known from dense steps. torch steps the others."""
        moments = _moments(reducer)
        if not reducer.sparse:
            moments.ratios.clear()
        sparse = {name: p for name, p in named.items() if name in reducer.sparse}
        linear = self._known(reducer, sparse) if sparse else {}
        wanted = bool(linear) or not reducer.sparse  # without linear steps nobody needs squares
        moments.track(self.refresh_interval if wanted else None, self)
        _note_clipping(moments, named)
        return linear

    def _known(self, reducer: AllReducer, sparse: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters whose second moment is known from dense steps.

        The reducer remembers the number of steps of each, negative if sparse averages are in its
        second moment. So a note holds for the moment that it was made for: after dense steps, or
        with another optimizer or another state, the numbers differ, and it is made anew.
        """
        notes, ratios = _moments(reducer).steps, _moments(reducer).ratios
        unknown = []
        for (name, p), steps in zip(sparse.items(), self._steps(sparse.values()), strict=True):
            if abs(notes.get(name, 0)) != steps:
                notes.pop(name, None)
                ratios.pop(name, None)
            if p.grad is not None:
                if name not in notes:
                    known = steps > 0 and _smooth(self.state[p]["exp_avg_sq"], steps)
                    notes[name] = steps if known else -steps
                unknown += [] if notes[name] > 0 else [name]
                notes[name] += 1 if notes[name] > 0 else -1
        if unknown and self not in _told:
            _told.add(self)
            self._tell(reducer, unknown)
        return {name: p for name, p in sparse.items() if notes.get(name, 0) > 0}

    def _tell(self, reducer: AllReducer, unknown: list[str]) -> None:
        if reducer.rank == 0:
            log.warning(
                "oktopk.%s has taken no dense step with %d parameters (%s), so their second moment "
                "is not known, and they are stepped as by torch's %s: give the algorithm "
                "warmup_steps, say 100; where training goes on, load the optimizer's state, too",
                type(self).__name__,
                len(unknown),
                ", ".join(sorted(unknown)[:3]),
                self._torch.__name__,
            )

    def _steps(self, parameters: Iterable[Tensor]) -> list[int]:
        """How many steps each parameter's second moment is of."""
        parameters = list(parameters)
        begun = [p for p in parameters if self.state.get(p)]
        if not begun:
            return [0] * len(parameters)
        device = self.state[begun[0]]["step"].device
        counts = torch.stack([self.state[p]["step"].to(device) for p in begun]).tolist()
        steps = dict(zip(begun, map(int, counts), strict=True))
        return [steps.get(p, 0) for p in parameters]

    def _refresh(self, reducer: AllReducer, linear: Mapping[str, Tensor]) -> None:
        """Let the second moment follow the newly known squares of the ranks' own gradients."""
        if self.refresh_interval is None:
            return
        moments = _moments(reducer)
        ratios = moments.ratios
        applied, averaged = moments.clipping or (1.0, 1.0)
        clipping = applied / averaged if applied and averaged else 1.0
        betas = {p: float(g["betas"][1]) for g in self.param_groups for p in g["params"]}
        totals = moments.totals
        for name in linear.keys() & totals.keys() - ratios.keys():
            if totals[name] > 0:  # the first round is over: as a whole nothing is to change
                moment, bias = self._moment(linear[name], betas[linear[name]])
                ratios[name] = _sum(moment) / bias / (totals[name] * clipping)
        for part in moments.take(linear):
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
        moment = state["exp_avg_sq"]
        return moment, _bias(beta, float(state["step"]), moment.dtype)

    def _step_linearly(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """AdamW's step, but the second moment, corrected for its bias, stays as it is."""
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        for p, steps in zip(parameters, self._steps(parameters), strict=True):
            state = self.state[p]
            assert p.grad is not None
            for_device(p.device).adam(
                p,
                p.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                sign=-1.0 if group["maximize"] else 1.0,
                weight=1 - min(beta1, _SPARSE_BETA1),
                decay=0.0 if self._decoupled else decay,
                shrink=1 - lr * decay if self._decoupled else 1.0,
                eps=group["eps"],
                lr=lr,
                most=_LARGEST_STEP,
                **_factors(beta2, steps, state["exp_avg_sq"].dtype),
            )
            state["step"] += 1


def _factors(beta2: float, steps: int, dtype: torch.dtype) -> dict[str, float]:
    """Factors for the kernels, for a second moment of so many steps."""
    bias = _bias(beta2, steps + 1, dtype)
    return {
        "grown": bias / _bias(beta2, steps, dtype),
        "least": math.sqrt(bias) / min(max(steps, _LARGEST[0]), _LARGEST[1]),
        "unbias": 1 / math.sqrt(bias),
    }


def _bias(beta2: float, steps: float, dtype: torch.dtype) -> float:
    """The divisor that corrects a second moment which began with zero.

    A second moment of 16 bits does not take notice of a growth by less than 1 %. So there it grows
    in leaps of 9 %, and is this much smaller than torch's in between.
    """
    bias: float = 1 - beta2**steps
    if torch.finfo(dtype).bits > 16 or bias <= 0:
        return bias
    return math.pow(2, math.floor(8 * math.log2(bias)) / 8)


def _refuse_options(groups: Iterable[Mapping[str, Any]]) -> None:
    for group in groups:
        for name in ("amsgrad", "capturable", "differentiable"):
            if group.get(name):
                raise ValueError(f"{name}=True is not supported with sparse gradients")


def _moments(reducer: AllReducer) -> SecondMoments:
    assert reducer.moments is not None  # only such reducers are looked for
    return reducer.moments


def _note_clipping(moments: SecondMoments, named: Mapping[str, Tensor]) -> None:
    """Keep moving averages of an average's size, before and after clipping.

    They scale the ranks' own squares in the same way.
    """
    probe = moments.probe
    if probe is None or moments.interval is None:
        return
    gradient = named[probe.name].grad if probe.name in named else None
    if gradient is not None:
        now = [_sum(t.double().square()) for t in (gradient, probe.average)]
        if not all(map(math.isfinite, now)):
            return
        before, part = moments.clipping or now, 1 / moments.interval
        moments.clipping = [a + part * (b - a) for a, b in zip(before, now, strict=True)]


def _smooth(moment: Tensor, steps: float) -> bool:
    """Complete a second moment of few steps: mix each element with an estimate from its row and
    its column, as in Adafactor. Returns False if nothing is known at all."""
    matrix = moment.reshape(moment.shape[0], -1) if moment.ndim > 1 else moment.reshape(1, -1)
    rows, columns, total = (_sums(matrix, dims) for dims in ([1], [0], [0, 1]))
    if not total > 0:
        return False
    expected = (rows * columns / total).reshape(moment.shape).to(moment.dtype)
    moment.lerp_(expected, _PRIOR_STEPS / (_PRIOR_STEPS + steps))
    return True


def _sums(values: Tensor, dims: Sequence[int]) -> Tensor:
    """Sums of values that are not negative, over some dimensions, which are kept. They are sums of
    integers, so all ranks get the same, with any number of threads."""
    largest = float(values.max())
    if not 0 < largest < math.inf:
        return torch.zeros([1] * values.ndim, dtype=torch.float64, device=values.device)
    unit = largest / (2**62 // values.numel())
    sums = (values.double() / unit).to(torch.int64).sum(list(dims), keepdim=True)
    return sums.double() * unit


def _sum(values: Tensor) -> float:
    """The sum of all values."""
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


_advised: weakref.WeakSet[AllReducer] = weakref.WeakSet()
"""Reducers with whose sparse averages torch's Adam has stepped."""


def advise(optimizer: Optimizer, reducer: AllReducer) -> None:
    """Log likely mistakes, once each; called before each step with a reducer's averages.

    They are torch's Adam or AdamW with sparse averages, and an optimizer that goes on with training
    although compression begins anew.
    """
    if not reducer.usage.optimized:
        _look_for_earlier_steps(optimizer, reducer)
    plain = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if not reducer.sparse or not plain or isinstance(optimizer, _SparseAdam):
        return
    if reducer not in _advised and reducer.rank == 0:
        log.warning(
            "torch's %s takes steps that are too small with sparse gradients: an entry that has "
            "waited for many steps looks like one large gradient to its second moment. oktopk.%s "
            "is the same optimizer without this",
            type(optimizer).__name__,
            "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Adam",
        )
    _advised.add(reducer)


def _look_for_earlier_steps(optimizer: Optimizer, reducer: AllReducer) -> None:
    """Warn if a framework may have saved and loaded everything but the compression."""
    if reducer.resumed or reducer.rank != 0:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    mine = [p for p in parameters if (pair := reducer_of(p)) and pair[0] is reducer]
    states = [optimizer.state.get(p, {}) for p in mine]
    steps = max((int(state.get("step", 0)) for state in states), default=0)
    if steps or any(state.get("momentum_buffer") is not None for state in states):
        log.warning(
            "the optimizer has taken %s before, compression begins with empty residuals: if this "
            "run was compressed before, load its compression state, too, with "
            "oktopk.checkpoint.load",
            f"{steps} steps" if steps else "steps",
        )
