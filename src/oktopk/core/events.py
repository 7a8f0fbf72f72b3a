"""Events: who is told what happened in a step, and the totals over all steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from .stats import StepStats, Totals


class Events:
    """Subscribers, a trainer's lists, and totals.

    The communication thread reports; any thread may subscribe.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        """Sums over all steps so far, as the communication thread goes on writing them."""
        self.busy = 0.0
        """Seconds that the communication thread worked."""
        self.waited = 0.0
        """Seconds that the training thread waited for it."""
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._leave_trainer: Callable[[], None] = lambda: None

    def report(self, stats: StepStats) -> None:
        """A step has ended, committed or skipped."""
        self.totals.add(stats)
        with self._lock:
            subscribers = list(self._subscribers)
        for tell in subscribers:
            tell(stats)

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        """Call back with the statistics of each step, in order, before its futures are done.

        The call comes from the communication thread, when the step has been committed. An
        exception in it is raised by backward, and ends communication on this rank for good.
        Returns a function that ends it.
        """
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    def set_trainer(self, trainer: Any) -> None:
        """Append to the trainer's `sparsities`, `compression_ratios`, `communication_sizes`.

        Each list gets one number a step from now on; missing lists are made. None ends it.
        """
        self._leave_trainer()
        self._leave_trainer = lambda: None
        if trainer is None:
            return
        for name in ("sparsities", "compression_ratios", "communication_sizes"):
            if not hasattr(trainer, name):
                setattr(trainer, name, [])

        def append(stats: StepStats) -> None:
            trainer.sparsities.append(stats.sparsity)
            trainer.compression_ratios.append(stats.compression_ratio)
            trainer.communication_sizes.append(stats.bytes_sent)

        self._leave_trainer = self.subscribe(append)
