"""Inbox: gradients arrive on the communication thread, futures are done, and errors are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from .transaction import Arrival, Transaction
from .transport import NonFiniteGradientError
from .usage import Usage


class Inbox:
    """The arrivals of the step that is under way.

    Only the communication thread calls its methods.

    Args:
        stream: where that thread computes; None on a CPU.
    """

    def __init__(
        self,
        transaction: Transaction,
        usage: Usage,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.error: BaseException | None = None
        """The error of a step that failed, until `take_error`."""
        self._broken = False
        """Whether that error is for good."""
        self._transaction, self._usage, self._stream = transaction, usage, stream
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    @property
    def open(self) -> bool:
        """Whether a step is under way."""
        return bool(self._futures)

    def take(
        self,
        arrival: Arrival,
        result: Tensor,
        future: torch.futures.Future[Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Reduce what is complete. The future is done, with the result, when the step has ended.

        Args:
            ready: when the gradients are.
        """
        self._futures.append((future, result))
        try:
            with torch.cuda.stream(self._stream):  # does nothing where there is none
                if ready is not None:
                    ready.wait()
                self._take_or_fail(arrival)
                if arrival.last or self._broken:
                    self.clear()
        except BaseException as error:  # of the device, say: nobody may wait for ever
            self.fail(error)
            self._end_futures()

    def _take_or_fail(self, arrival: Arrival) -> None:
        if not self._broken:
            try:
                self._transaction.take(arrival)
            except NonFiniteGradientError as error:
                self.error = error
            except BaseException as error:
                self.fail(error)
        if self.error is not None:
            self._transaction.zero(arrival.gradients)
            # After an exception torch does not say that a step has ended.
            self._usage.stepping = False

    def fail(self, error: BaseException) -> None:
        """Communicate no more: nobody knows what the other ranks do after this."""
        self.error, self._broken = error, True

    def clear(self) -> None:
        """The step has ended, or will not be completed."""
        self._transaction.clear()
        self._end_futures()

    def _end_futures(self) -> None:
        futures, self._futures = self._futures, []
        for future, result in futures:
            future.set_result(result)

    def take_error(self) -> BaseException | None:
        """The error of the last step. It is not reported again, unless it is for good."""
        error = self.error
        if not self._broken:
            self.error = None
        return error
