"""Usage: whether optimizers use a reducer's averages, and how they find it.

A front end announces the parameters whose gradients a reducer averages. From then on optimizers
find the reducer by their parameters, and watch.py keeps this record up to date.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .reducer import AllReducer

_reducers = WeakIdKeyDictionary()
"""By parameter, its reducer (weakly) and its name there."""


def reducer_of(parameter: Tensor) -> tuple[AllReducer, str] | None:
    """The reducer of a parameter's gradients, and its name there."""
    reference, name = _reducers.get(parameter, (lambda: None, ""))
    reducer = reference()
    return None if reducer is None or reducer.closed else (reducer, name)


class Usage:
    """Whether optimizers step with averages."""

    def __init__(self) -> None:
        self.optimized = False
        """Whether an optimizer has ever stepped with averages; saved in the state."""
        self.stepping = False
        """Whether an optimizer is in its `step`."""
        self.stepped = True
        """Whether an optimizer has stepped since the last averages came, or none have come. Then
        the last step can no longer be taken back."""
        self.leave_out = False
        """Whether the last step was skipped, and an optimizer has yet to leave it out."""
        self._parameters: dict[str, weakref.ref[Tensor]] = {}

    def announce(self, reducer: AllReducer, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Let optimizers find a reducer by its parameters, from now on.

        For the front end to call when gradients of these parameters really come there.
        """
        for name, parameter in named_parameters:
            _reducers[parameter] = weakref.ref(reducer), name
            self._parameters[name] = weakref.ref(parameter)

    def parameters(self) -> dict[str, Tensor]:
        """The announced parameters, by name."""
        found = ((name, reference()) for name, reference in self._parameters.items())
        return {name: parameter for name, parameter in found if parameter is not None}
