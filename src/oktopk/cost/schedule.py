"""Schedule: the messages of an exchange, and the order in which each rank handles them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Messages between P ranks. Message m goes from sources[m] to targets[m]."""

    sources: Numbers
    targets: Numbers
    nbytes: Numbers
    programs: tuple[Numbers, ...]
    """What each rank does, in order. A number m starts message m, on the side of the sender or of
    the receiver. A number ~m, which is negative, waits until message m has arrived."""

    @property
    def size(self) -> int:
        """P."""
        return len(self.programs)

    def sent(self) -> Numbers:
        """The bytes that each rank sends."""
        totals = np.bincount(self.sources, weights=self.nbytes, minlength=self.size)
        return totals.astype(np.int64)

    def received(self) -> Numbers:
        """The bytes that each rank receives."""
        totals = np.bincount(self.targets, weights=self.nbytes, minlength=self.size)
        return totals.astype(np.int64)
