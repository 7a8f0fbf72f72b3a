"""Watch whether an optimizer steps with averages, and whether both fit together.

Every step of any torch optimizer passes through `_before` and `_after`, and every backward through
`_Look`, before it touches a gradient. Nothing here communicates: all ranks run the same program, so
all come to the same conclusion. The next step finds a rank that does not: it compares where ranks
are.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .reducer import AllReducer, log
from .usage import reducer_of

_SCALER_FILE = inspect.getfile(torch.amp.grad_scaler.GradScaler)
_hooks: list[Any] = []
_found: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[weakref.ref[AllReducer]]]]
_found = weakref.WeakKeyDictionary()
"""By optimizer, the reducers of its parameters, and the key under which they were looked up."""
_announcements = 0
Advise = Callable[[Optimizer, AllReducer], None]
_advice: weakref.WeakKeyDictionary[AllReducer, Advise] = weakref.WeakKeyDictionary()


def watch(
    reducer: AllReducer, named_parameters: Mapping[str, Tensor], advise: Advise
) -> Callable[[], None]:
    """Look after a reducer's averages from now on; returns a function that ends it.

    Args:
        named_parameters: those whose gradients the reducer averages.
        advise: is called before each step of an optimizer with them.
    """
    global _announcements
    if not _hooks:
        # Also in a step that is compiled: there is nothing in them to compile.
        _hooks.append(register_optimizer_step_pre_hook(_disable_dynamo(_before)))
        _hooks.append(register_optimizer_step_post_hook(_disable_dynamo(_after)))
    reducer.usage.announce(reducer, named_parameters.items())
    _advice[reducer] = advise
    _announcements += 1
    look = _Look(reducer)
    trained = (p for p in named_parameters.values() if p.requires_grad)  # not those frozen since
    handles = [parameter.register_hook(look) for parameter in trained]

    def end() -> None:
        for handle in handles:
            handle.remove()

    weakref.finalize(reducer, end).atexit = False
    return end


class _Look:
    """Called by backward before it writes to the gradient of a parameter, whichever it is.

    The first call of a backward decides. It holds the reducer weakly: parameters keep their hooks
    where the garbage collector does not look.
    """

    def __init__(self, reducer: AllReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._backward = -1

    def __call__(self, gradient: Tensor) -> None:
        reducer = self._reducer()
        if reducer is None or reducer.usage.stepped:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            discard_if_cleared(reducer)


def discard_if_cleared(reducer: AllReducer) -> None:
    """Take back the last step, if its averages were cleared before an optimizer used them."""
    if reducer.usage.stepped or not reducer.discards:
        return
    used = [p for name, p in reducer.usage.parameters().items() if name not in reducer.unused]
    if not all(map(_is_cleared, used)) or not reducer.discard():
        return
    if reducer.rank == 0 and reducer.events.totals.discarded_steps == 1:
        log.warning(
            "the averages of step %d were cleared before an optimizer stepped with them. "
            "Compression takes such steps back, or their gradients would come again with later "
            "ones. It is cheaper not to average them at all: put backward into model.no_sync(). "
            'If you did use these averages, attach with cleared="keep"',
            reducer.step,
        )


def _is_cleared(parameter: Tensor) -> bool:
    return parameter.grad is None or not bool(parameter.grad.any())


def _before(optimizer: Optimizer, *_: Any) -> None:
    for reducer in _reducers(optimizer):
        _refuse_second_momentum(optimizer, reducer)
        _refuse_unknown_scaler(reducer)
        _advice[reducer](optimizer, reducer)
        if reducer.usage.leave_out:
            clear_skipped(reducer)
        reducer.usage.optimized = reducer.usage.stepped = reducer.usage.stepping = True


def _after(optimizer: Optimizer, *_: Any) -> None:
    for reducer in _reducers(optimizer):
        reducer.usage.stepping = False
        reducer.usage.optimized = reducer.usage.stepped = True


def _reducers(optimizer: Optimizer) -> list[AllReducer]:
    """The reducers of an optimizer's parameters."""
    key = _announcements, sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _found or _found[optimizer][0] != key:
        pairs = (reducer_of(p) for group in optimizer.param_groups for p in group["params"])
        found = {pair[0]: None for pair in pairs if pair is not None}
        _found[optimizer] = key, [weakref.ref(reducer) for reducer in found]
    reducers = (reference() for reference in _found[optimizer][1])
    return [reducer for reducer in reducers if reducer is not None and not reducer.closed]


def clear_skipped(reducer: AllReducer) -> None:
    """Let optimizers leave a reducer's parameters alone, after a step that was skipped.

    Averages of zero would still move them, by momentum and weight decay; optimizers do not touch
    parameters without a gradient.
    """
    for p in reducer.usage.parameters().values():
        p.grad = None
    reducer.usage.leave_out = False


def _averages(reducer: AllReducer, parameter: Tensor) -> bool:
    pair = reducer_of(parameter)
    return pair is not None and pair[0] is reducer


def _refuse_second_momentum(optimizer: Optimizer, reducer: AllReducer) -> None:
    if not reducer.options.momentum:
        return
    for group in optimizer.param_groups:
        if group.get("momentum") and any(_averages(reducer, p) for p in group["params"]):
            raise ValueError(
                f"both compression (momentum={reducer.options.momentum}) and "
                f"{type(optimizer).__name__} have momentum: give the optimizer momentum=0, or "
                "attach without momentum="
            )


def _refuse_unknown_scaler(reducer: AllReducer) -> None:
    """A GradScaler that steps this optimizer is among the callers: nothing else tells of it."""
    frame = None if reducer.scaled else sys._getframe()
    while frame is not None and frame.f_code.co_filename != _SCALER_FILE:
        frame = frame.f_back  # other frames are not looked into: that would keep what they hold
    scaler = None if frame is None else frame.f_locals.get("self")
    if isinstance(scaler, torch.amp.grad_scaler.GradScaler) and scaler.is_enabled():
        raise ValueError(
            f"a GradScaler scales the loss (by {scaler.get_scale():g} now), but compression does "
            "not know it, so residuals would be wrong whenever the scale changes: attach with "
            "grad_scaler=scaler"
        )
