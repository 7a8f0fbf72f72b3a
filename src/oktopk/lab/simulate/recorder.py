"""Recorder: the messages of simulated ranks, and the order in which each rank handles them."""

from __future__ import annotations

from array import array

import numpy as np

from ...cost.schedule import Numbers, Schedule

OFF = -1
"""The number of a message that is not recorded."""


class Recorder:
    """Makes a `Schedule`.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.on = [True] * size
        """Whether a rank is in a part of its program that is recorded. All ranks must begin and end
        it at the same place."""
        self._sources, self._targets, self._nbytes = array("q"), array("q"), array("q")
        self._programs = [array("q") for _ in range(size)]

    def message(self, rank: int, source: int, target: int, nbytes: int) -> int:
        """A new message; its number.

        Args:
            rank: the sender or the receiver, whichever is ready first.
        """
        if not self.on[rank]:
            return OFF
        self._sources.append(source)
        self._targets.append(target)
        self._nbytes.append(nbytes)
        return len(self._sources) - 1

    def start(self, rank: int, number: int) -> None:
        """A rank is ready to send or receive a message, and goes on."""
        if number != OFF:
            self._programs[rank].append(number)

    def wait(self, rank: int, number: int) -> None:
        """A rank waits until a message has arrived."""
        if number != OFF:
            self._programs[rank].append(~number)

    def collective(self, part: Schedule) -> None:
        """All messages of a collective."""
        if not self.on[0]:
            return
        base = len(self._sources)
        self._sources.frombytes(part.sources.tobytes())
        self._targets.frombytes(part.targets.tobytes())
        self._nbytes.frombytes(part.nbytes.tobytes())
        for program, more in zip(self._programs, part.programs, strict=True):
            program.frombytes(np.where(more >= 0, more + base, more - base).tobytes())

    def schedule(self) -> Schedule:
        """Everything that was recorded."""
        return Schedule(
            _copy(self._sources),
            _copy(self._targets),
            _copy(self._nbytes),
            tuple(_copy(program) for program in self._programs),
        )


def _copy(numbers: array[int]) -> Numbers:
    return np.array(numbers, np.int64)
