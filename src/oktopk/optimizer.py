"""DistributedOptimizer: averaged gradients for any torch optimizer, without DDP."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from .adam import advise
from .algorithms import Algorithm
from .core.buckets import Options
from .core.reducer import AllReducer, log
from .core.transport import NonFiniteGradientError, Operation
from .core.usage import reducer_of
from .core.watch import clear_skipped, discard_if_cleared, watch
from .core.worker import raised_by_all
from .handle import Handle

_KEY = "compression"


class DistributedOptimizer(Handle, Optimizer):
    """Wraps an optimizer so that every rank steps with the average of all ranks' gradients.

    ```python
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        algorithm=oktopk.OkTopk(density=0.02),
    )
    ```

    Gradients are handed over as backward makes them. When backward returns, `p.grad` is the
    average, ready for clipping, inspection and GradScaler, as with DDP. Parameters start as they
    are on rank 0; buffers are each rank's own.

    A parameter without a gradient on this rank counts as zero; without one on any rank it keeps
    `grad=None`, on all ranks. Ranks must call backward equally often; one that has no batch left
    just calls `step()`, or `synchronize()`.

    A model is wrapped once: `close()` an earlier wrapper before you wrap it again.

    Args:
        optimizer: any torch optimizer.
        named_parameters: of the model. Those that are frozen, or that the optimizer does not
            have, are left out.
        algorithm: what to reduce with.
        norm_clip: see `oktopk.Options`.
        trainer: an object whose lists `sparsities`, `compression_ratios` and
            `communication_sizes` get one number a step.
        group: a process group that nothing else uses; None makes one of all ranks.
        options: see `oktopk.Options`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        algorithm: Algorithm,
        norm_clip: float | None = None,
        trainer: Any = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        # Not Optimizer.__init__: parameters, groups and state are those of `optimizer`.
        self.optimizer = optimizer
        with raised_by_all(group, _device(optimizer)):
            named_parameters = list(named_parameters)
            self._all = dict(named_parameters)
            self._frozen = [p for _, p in named_parameters if not p.requires_grad]
            self._parameters = _trained(optimizer, named_parameters)
            _refuse_second(self._parameters)
            settings = Options.of(norm_clip=norm_clip, **options)
            if settings.momentum and any(g.get("momentum") for g in optimizer.param_groups):
                raise ValueError(
                    "both the optimizer and its wrapper have momentum: use an optimizer with "
                    "momentum=0 with momentum correction"
                )
        self._reducer = AllReducer(
            self._parameters.items(),
            algorithm,
            group,
            settings,
            may_be_unused=True,
            second_moments=True,
            trainer=trainer,
        )
        self._buckets = self._reducer.buckets
        names = (name for bucket in self._buckets for name in bucket)
        self._end_watch = watch(
            self._reducer, {name: self._parameters[name] for name in names}, advise
        )
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._strides = {name: torch.empty_like(p).stride() for name, p in self._parameters.items()}
        self._sync = True
        self._synchronized = False
        self._backward: int | None = None
        """The number that autograd gave to the backward that is under way."""
        self._arrived: set[str] = set()
        self._submitted = 0
        # Weakly: parameters keep their hooks where the garbage collector does not look.
        ready = weakref.WeakMethod(self._ready)

        def tell(parameter: Tensor) -> None:
            method = ready()
            if method is not None:
                method(parameter)

        self._hooks = [
            parameter.register_post_accumulate_grad_hook(tell)
            for parameter in self._parameters.values()
        ]
        self.broadcast_parameters()

    @property
    def reducer(self) -> AllReducer:
        return self._reducer

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._all.items()

    def close(self) -> None:
        """Average no more: the model's gradients are left alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._end_watch()
        self.reducer.close()

    def broadcast_parameters(self, source: int = 0) -> None:
        """Give all ranks the parameters of one. Collective; done once at the start."""
        self.reducer.peers.broadcast([p.detach() for p in self._parameters.values()], source)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward in here accumulate; the next backward outside averages all."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _ready(self, parameter: Tensor) -> None:
        """Called by backward, for each parameter whose gradient is complete."""
        if not self._sync:
            self._synchronized = False
            return
        backward = torch._C._current_graph_task_id()
        if self._backward is None:
            self._backward = backward
            self._synchronized = False
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.synchronize)
        elif self._backward != backward:
            raise RuntimeError(
                "a backward began before the last one had ended: use checkpoint(..., "
                "use_reentrant=False); if the last one failed, call zero_grad() and try again"
            )
        self._arrived.add(self._names[id(parameter)])
        left = self._buckets[self._submitted :]
        while left and self._arrived.issuperset(left.pop(0)):
            self._submit()

    def _submit(self) -> None:
        """Hand over the next bucket. All ranks use this order, even if others are ready first."""
        gradients, absent = {}, []
        for name in self._buckets[self._submitted]:
            parameter = self._parameters[name]
            if parameter.grad is None:
                absent.append(name)
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = _flat(name, parameter, self._strides[name])
        self._submitted += 1
        last = self._submitted == len(self._buckets)
        self.reducer.submit(gradients, next(iter(gradients.values())), last, absent)

    def synchronize(self) -> None:
        """Wait until all gradients are averages. A rank that called no backward contributes zeros.

        Backward calls this at its end, so only a rank without a backward needs to.
        """
        if self._synchronized:
            return
        if any(p.requires_grad for p in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the optimizer was wrapped is trained now, and "
                "nobody would average it: wrap again after unfreezing (close() this one first)"
            )
        if self._backward is None:  # on a rank without a backward nobody has looked yet
            discard_if_cleared(self.reducer)
        while self._submitted < len(self._buckets):
            self._submit()
        self._new_round()
        try:
            self.reducer.wait()
        except NonFiniteGradientError:
            self._synchronized = True  # a step after catching it moves nothing
            raise
        self._synchronized = True
        usage = self.reducer.usage
        if usage.leave_out and usage.stepping:  # in a closure: nobody else would
            clear_skipped(self.reducer)
        for name in self.reducer.unused:
            self._parameters[name].grad = None

    def _new_round(self) -> None:
        self._backward, self._submitted, self._arrived = None, 0, set()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the wrapped optimizer, on all ranks or, after a NaN or Inf, on none.

        With a closure, the wrapped optimizer is always called. After a skipped step it
        finds no gradients.
        """
        result = None
        if closure is not None:
            result = self.optimizer.step(closure)
        else:
            self.synchronize()
            if not self.reducer.skipped:
                result = self.optimizer.step()
        self._synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._backward is not None:  # one that failed half-way
            self.reducer.forget()
            self._new_round()
        self._synchronized = False
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and this rank's residuals under `compression`.

        Every rank must save its own.
        """
        return self.optimizer.state_dict() | {_KEY: self.reducer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of a wrapped optimizer, or of a plain one.

        A plain one's has no residuals, so those here stay. In a new wrapper they are empty.
        """
        has = _KEY in state_dict
        fix = "load the same kind of state"
        self.reducer.peers.agree(Operation.LOAD, None, f"{_KEY} in state_dict: {has}", fix)
        inner = {key: value for key, value in state_dict.items() if key != _KEY}
        if has:
            self.reducer.load_state_dict(state_dict[_KEY], strict)
        else:
            log.warning("no compression in the optimizer's state: residuals stay as they are")
            self.reducer.resumed = True  # no second warning
        problem = None
        try:
            self.optimizer.load_state_dict(inner)
        except Exception as error:  # of any kind: the other ranks must hear of it
            problem = f"the optimizer's own state does not fit: {error}"
        self.reducer.peers.agree(Operation.LOAD, problem, "", fix)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "parameters cannot be added to a wrapped optimizer: wrap it when it has them all"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r}, algorithm={self.algorithm})"

    _step_supports_amp_scaling = False
    """GradScaler must unscale gradients itself; a fused optimizer inside is not told the scale."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled, it is a part of its process: save "
            "its state_dict() instead"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # not there yet, or not to be found
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def _device(optimizer: Optimizer) -> torch.device | None:
    """The device of the first parameter; None if there is none, or if this is no optimizer."""
    groups = getattr(optimizer, "param_groups", ())
    return next((p.device for group in groups for p in group["params"]), None)


def _trained(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, nn.Parameter]:
    """The trained parameters that both sides have, by name."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    first = {id(p): name for name, p in reversed(named)}
    named = [(name, p) for name, p in named if first[id(p)] == name]  # tied ones once
    by_name = dict(named)
    if len(by_name) < len(named):
        raise ValueError("names in named_parameters are not unique: two models need prefixes")
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = len(held - {id(p) for p in by_name.values()})
    if missing:
        raise ValueError(
            f"{missing} parameters of the optimizer are not in named_parameters: pass the "
            "named_parameters() of the whole model"
        )
    return {name: p for name, p in by_name.items() if id(p) in held}


def _refuse_second(parameters: Mapping[str, nn.Parameter]) -> None:
    if any(map(reducer_of, parameters.values())):
        gc.collect()  # one that nobody holds may wait for this
    taken = [name for name, p in parameters.items() if reducer_of(p) is not None]
    if taken:
        raise ValueError(
            f"another handle averages the gradients of {', '.join(taken[:5])} already, so they "
            "would be averaged twice: close() it first"
        )


def _flat(name: str, parameter: nn.Parameter, stride: tuple[int, ...]) -> Tensor:
    """The gradient as one flat piece of memory, in the order of the parameter's own elements."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError(
            f"{name} has a sparse gradient: build the embedding with sparse=False to compress it"
        )
    if gradient.stride() != stride:
        gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))
