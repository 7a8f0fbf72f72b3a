"""What becomes of averages: whether an optimizer steps with them, and whether both fit together.

Every step of any torch optimizer passes through `_before` and `_after`, and every backward through
`_discard_if_cleared`, before it touches a gradient. Nothing here communicates: all ranks run the
same program, so all come to the same conclusion. A rank that does not is found by the next step,
which compares where ranks are.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .engine import AllReducer, log, reducer_of

_SMALL = 1 << 16
"""Elements of a parameter that is quickly looked at."""
_SCALER_FILE = inspect.getfile(torch.amp.grad_scaler.GradScaler)
_hooks: list[Any] = []
_found: weakref.WeakKeyDictionary[Optimizer, tuple[Any, list[weakref.ref[AllReducer]]]]
_found = weakref.WeakKeyDictionary()
"""Who averages for an optimizer, and of which parameters and announcements this was found."""
_announcements = 0


def watch(reducer: AllReducer, named_parameters: Mapping[str, Tensor]) -> Callable[[], None]:
    """Look after a reducer's averages from now on; returns a function that ends it.

    Args:
        named_parameters: those whose gradients the reducer averages.
    """
    global _announcements
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    reducer.announce(named_parameters.items())
    _announcements += 1
    # Both ends of the model: whichever of them backward comes to first, the other tells, too,
    # whether gradients have been cleared.
    small = [item for item in named_parameters.items() if item[1].numel() <= _SMALL]
    order = small or list(named_parameters.items())
    probes = {name: weakref.ref(p) for name, p in (order[0], order[-1])}
    mine = weakref.ref(reducer)

    def look(gradient: Tensor) -> None:
        reducer = mine()
        if reducer is not None and not reducer.stepped:
            found = {name: p for name, ref in probes.items() if (p := ref()) is not None}
            discard_if_cleared(reducer, found)

    handles = [named_parameters[name].register_hook(look) for name in probes]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def discard_if_cleared(reducer: AllReducer, named_parameters: Mapping[str, Tensor]) -> None:
    """Take back the last step if its averages were cleared before an optimizer stepped with them.

    Not before an optimizer has been seen that steps with them: who updates parameters by hand has
    used averages that are cleared.

    Args:
        named_parameters: some of the reducer's parameters, to look at.
    """
    if reducer.stepped or not reducer.optimized or reducer.options.cleared == "keep":
        return
    looked_at = named_parameters.keys() - reducer.unused
    if not looked_at or not all(
        _is_cleared(named_parameters[name], reducer.applied_to(name)) for name in looked_at
    ):
        return
    if not reducer.discard():
        return
    if reducer.rank == 0 and reducer.totals.discarded_steps == 1:
        log.warning(
            "the averages of step %d were cleared before an optimizer stepped with them. "
            "Compression takes such steps back, or their gradients would come again with later "
            "ones. It is cheaper not to average them at all: put backward into model.no_sync(). "
            'If you did use these averages, attach with cleared="keep"',
            reducer.step,
        )


def _is_cleared(parameter: Tensor, applied: int) -> bool:
    gradient = parameter.grad
    return gradient is None or (applied > 0 and not bool(gradient.any()))


def _before(optimizer: Optimizer, *_: Any) -> None:
    for reducer in _reducers(optimizer, _refuse_unknown_scaler):
        _refuse_second_momentum(optimizer, reducer)
        if reducer.skipped:
            _leave_out(optimizer, reducer)
        reducer.notes["optimized"] = reducer.stepped = reducer.stepping = True


def _after(optimizer: Optimizer, *_: Any) -> None:
    for reducer in _reducers(optimizer):
        reducer.stepping, reducer.stepped = False, True


def _reducers(
    optimizer: Optimizer, check: Callable[[AllReducer], None] = lambda reducer: None
) -> list[AllReducer]:
    """Who averages gradients of an optimizer's parameters; `check` is called for a new one."""
    key = _announcements, sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _found or _found[optimizer][0] != key:
        pairs = (reducer_of(p) for group in optimizer.param_groups for p in group["params"])
        found = {pair[0]: None for pair in pairs if pair is not None}
        for reducer in found:
            check(reducer)
        _found[optimizer] = key, [weakref.ref(reducer) for reducer in found]
    reducers = (reference() for reference in _found[optimizer][1])
    return [reducer for reducer in reducers if reducer is not None and not reducer.closed]


def _leave_out(optimizer: Optimizer, reducer: AllReducer) -> None:
    """Let the step leave a reducer's parameters alone, after a step that was skipped.

    Averages of zero would still move them, by momentum and weight decay; optimizers do not touch
    parameters without a gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            pair = reducer_of(p)
            if pair is not None and pair[0] is reducer:
                p.grad = None


def _refuse_second_momentum(optimizer: Optimizer, reducer: AllReducer) -> None:
    groups: Iterable[Mapping[str, Any]] = optimizer.param_groups
    if reducer.options.momentum and any(group.get("momentum") for group in groups):
        raise ValueError(
            f"both compression (momentum={reducer.options.momentum}) and "
            f"{type(optimizer).__name__} have momentum: give the optimizer momentum=0, or attach "
            "without momentum="
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
