"""World: all ranks in one process. Each is a thread, and they run in turns.

One rank runs until it must wait for another. Then it hands the turn to the next rank that can go
on. So a run is the same every time, and memory needs no further locks. A message is a copy from the
sender's memory to the receiver's. As with Gloo, it is made when both sides are ready for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from .recorder import Recorder

T = TypeVar("T")


class StuckError(RuntimeError):
    """The ranks wait for each other, or do not do the same. Real ranks would wait for ever."""


class _Ended(BaseException):
    """Another rank has failed. No code that ranks run should catch it."""


class World:
    """P ranks.

    Args:
        size: P.
        recorder: is told of every message.
    """

    def __init__(self, size: int, recorder: Recorder) -> None:
        self.size, self.recorder = size, recorder
        self._turns = [threading.Lock() for _ in range(size)]
        for turn in self._turns:
            turn.acquire()  # whoever releases it lets the rank run
        self._ready: deque[int] = deque()
        self._left = size
        """Ranks that have not ended."""
        self._error: BaseException | None = None
        self._posted: dict[tuple[int, int], deque[Message]] = {}
        """Messages, by sender and receiver, of which only one side is ready."""
        self._meeting: dict[int, Any] = {}
        """By rank, what those have brought that are in the collective that is under way."""
        self._agenda: tuple[object, ...] = ()

    def run(self, task: Callable[[int], T]) -> list[T]:
        """task(rank) on every rank; the results. An error of one rank ends all, and is raised."""
        results: dict[int, T] = {}

        def live(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._error is None:
                    results[rank] = task(rank)
                self._left -= 1
                self._pass_on()
            except _Ended:
                pass
            except BaseException as error:
                self.fail(error)

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        begun = []
        try:
            for thread in threads:
                thread.start()
                begun.append(thread)
            self._ready.extend(range(self.size))
            self._pass_on()
            for thread in begun:
                thread.join()
        except BaseException as error:  # an interruption, say
            self.fail(error)
            raise
        finally:
            for thread in begun:
                thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.size)]

    def fail(self, error: BaseException) -> None:
        """End all ranks, each as soon as it waits."""
        if self._error is None:
            self._error = error
        for turn in self._turns:
            with contextlib.suppress(RuntimeError):  # it has been released already
                turn.release()

    def _pass_on(self) -> None:
        """Give the turn to the next rank that can run."""
        if self._ready:
            self._turns[self._ready.popleft()].release()
        elif self._left:
            self.fail(StuckError(self._riddle()))

    def _sleep(self, rank: int) -> None:
        """Let others run until somebody has put this rank on the list of those that are ready."""
        self._pass_on()
        self._turns[rank].acquire()
        if self._error is not None:
            raise _Ended

    def _riddle(self) -> str:
        waiting = [f"{len(self._meeting)} in {self._agenda[0]}"] if self._meeting else []
        for (source, target), messages in self._posted.items():
            here, there = (source, target) if messages and messages[0].sending else (target, source)
            waiting += [f"rank {here} for rank {there}"] * bool(messages)
        shown = ", ".join(waiting[:8]) + (", ..." if len(waiting) > 8 else "")
        return f"{self._left} of {self.size} simulated ranks wait for ever ({shown})"

    def meet(
        self, rank: int, agenda: tuple[object, ...], item: T, act: Callable[[list[T]], None]
    ) -> None:
        """A collective: the last rank to come does everything, act(items), for all.

        Args:
            agenda: what is done, and with how many bytes; the same on all ranks.
            item: what this rank brings.
        """
        if self._meeting and agenda != self._agenda:
            raise StuckError(
                f"simulated ranks do not do the same: rank {rank} {agenda}, others {self._agenda}"
            )
        self._agenda, self._meeting[rank] = agenda, item
        if len(self._meeting) < self.size:
            self._sleep(rank)
            return
        items = [self._meeting[each] for each in range(self.size)]
        self._meeting = {}
        act(items)
        self._ready.extend(each for each in range(self.size) if each != rank)

    def send(self, source: int, target: int, content: Tensor) -> Message:
        """A message from one rank to another; see `wait`."""
        message = self._match(source, target, content, sending=True)
        self.recorder.start(source, message.number)
        return message

    def receive(self, target: int, source: int, room: Tensor) -> Message:
        """Memory for a message. Those of one rank to another arrive in the order they are sent."""
        message = self._match(source, target, room, sending=False)
        self.recorder.start(target, message.number)
        return message

    def _match(self, source: int, target: int, content: Tensor, sending: bool) -> Message:
        """The oldest message of this pair of which only the other side is ready, or a new one."""
        posted = self._posted.setdefault((source, target), deque())
        if not posted or posted[0].sending == sending:
            here = source if sending else target
            number = self.recorder.message(here, source, target, content.nbytes)
            posted.append(Message(number, content, sending))
            return posted[-1]
        message = posted.popleft()
        if message.content.nbytes != content.nbytes:
            raise StuckError(
                f"simulated ranks do not do the same: of a message from rank {source} to rank "
                f"{target}, one has {message.content.nbytes} bytes, the other {content.nbytes}"
            )
        sent, room = (content, message.content) if sending else (message.content, content)
        room.copy_(sent)
        message.done = True
        self._ready.extend(message.sleepers)
        return message

    def wait(self, rank: int, message: Message) -> None:
        """Until a message has arrived."""
        self.recorder.wait(rank, message.number)
        if not message.done:
            message.sleepers.append(rank)
            self._sleep(rank)


@dataclass
class Message:
    """A message from one rank to another."""

    number: int
    """In the record."""
    content: Tensor
    """What is sent, or the memory for it, of the side that was ready first."""
    sending: bool
    """Whether that was the sender."""
    done: bool = False
    sleepers: list[int] = field(default_factory=list)
    """Ranks that wait for it."""
