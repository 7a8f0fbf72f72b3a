"""Controls of compression for users while a model trains, with DDP or without it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .algorithms import Algorithm, Dense
from .core.detail import Detail
from .core.inspector import SAMPLE
from .core.reducer import AllReducer
from .core.stats import StepStats, Summary


class Handle:
    """Controls of an AllReducer.

    `start`, `set_algorithm`, `detach`, `check_replicas` and loading a state are collective: all
    ranks call them together.
    """

    @property
    @abstractmethod
    def reducer(self) -> AllReducer:
        """The engine; an error before `start`."""

    def start(self) -> AllReducer:
        """Begin, unless it has begun. Only a handle from `comm_hook` begins after its construction:
        in the first backward, or when this or another collective method is called."""
        return self.reducer

    @abstractmethod
    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The parameters that replicas must agree on."""

    @property
    def algorithm(self) -> Algorithm:
        return self.reducer.algorithm

    def set_algorithm(self, algorithm: Algorithm) -> None:
        """Go on with another density or algorithm. Collective, between steps; residuals stay."""
        self.start().set_algorithm(algorithm)

    def detach(self) -> None:
        """Average densely from now on. The next step also applies all residuals."""
        self.set_algorithm(Dense())

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
        return self.reducer.events.subscribe(callback)

    def inspect(
        self,
        callback: Callable[[Detail], object],
        due: Callable[[int], bool],
        *,
        sample: int = SAMPLE,
    ) -> Callable[[], None]:
        """Look into steps of this rank: magnitudes, thresholds, regions, messages, staleness.

        From now on `stats()` says how long entries wait before they are applied. Results do not
        change, and nothing is sent, so any rank may do it, alone. A second call replaces the first.
        Returns a function that ends it.

        Args:
            callback: gets the `Detail` of each step that is due, from the communication thread, by
                the time backward returns. An exception in it is raised by backward, and ends
                communication on this rank for good.
            due: whether to look into the step with this number. That takes some passes over
                residual and gradient, and memory for one more gradient.
            sample: elements of each bucket whose staleness is followed in every step.
        """
        return self.reducer.inspect(callback, due, sample)

    def set_trainer(self, trainer: Any) -> None:
        """Append to the trainer's `sparsities`, `compression_ratios`, `communication_sizes`."""
        self.reducer.events.set_trainer(trainer)

    def check_replicas(self) -> None:
        """Raise ReplicaError, on all ranks, unless all have bitwise the same parameters."""
        self.start().peers.check_replicas(self._named_parameters())
