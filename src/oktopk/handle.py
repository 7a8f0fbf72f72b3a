"""What a user can do with compression while a model trains, with DDP and without it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .algorithms import Algorithm, Dense
from .core.reducer import AllReducer
from .core.stats import StepStats, Summary


class Handle:
    """Controls of an AllReducer.

    Setting `algorithm`, `start`, `detach`, `check_replicas` and loading a state are collective:
    all ranks do it together.
    """

    @property
    @abstractmethod
    def reducer(self) -> AllReducer:
        """The engine; an error before `start`."""

    def start(self) -> AllReducer:
        """Begin, unless that has been done. Only a handle from `comm_hook` begins later than it is
        made: in the first backward, or when this or another collective method is called."""
        return self.reducer

    @abstractmethod
    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """What replicas must agree on."""

    @property
    def algorithm(self) -> Algorithm:
        """Set it, on all ranks, to change density or algorithm; residuals carry over."""
        return self.reducer.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm) -> None:
        self.start().algorithm = algorithm

    def detach(self) -> None:
        """From now on dense. The next step also applies all that waits in the residuals."""
        self.start().algorithm = Dense()

    def discard(self) -> None:
        """Take back the last step, exactly, because its averages are thrown away.

        A gradient that came once waits in the residuals until it is applied. Where averages are
        not used, as in a step that is left out because its norm is too large, call this instead
        of `optimizer.step()`: residuals, thresholds and moments are then those from before the
        step, as if its gradient had never come. (The first time, the sums of squares from which
        `oktopk.AdamW` follows gradients begin anew.) `p.grad` is left as it is.

        All ranks must call it, before the next backward. See the option `cleared` for averages
        that are cleared without this.
        """
        if not self.reducer.discard():
            raise RuntimeError(
                "there is no step to discard: none was taken yet, the last one was skipped or "
                "discarded before, or an optimizer has stepped with it. Call discard() after "
                "backward(), instead of optimizer.step()"
            )

    def close(self) -> None:
        """End compression for good and let go of its memory; a model in DDP cannot train on."""
        self.reducer.close()

    def stats(self) -> Summary:
        """Totals and means so far; print it for a table."""
        return self.reducer.stats()

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        """Call back with each step's statistics, from the communication thread.

        By the time backward returns, it has been called. Returns a function that ends it.
        """
        return self.reducer.subscribe(callback)

    def set_trainer(self, trainer: Any) -> None:
        """Append to the trainer's `sparsities`, `compression_ratios`, `communication_sizes`."""
        self.reducer.set_trainer(trainer)

    def check_replicas(self) -> None:
        """Raise ReplicaError, on all ranks, unless all have bitwise the same parameters."""
        self.start().check_replicas(self._named_parameters())
