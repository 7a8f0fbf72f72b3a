"""How much of a reduction backward hides."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Cost

BACKWARD = 2 / 3
"""Share of a step's computing that is backward: twice as much as forward."""


@dataclass(frozen=True)
class Step:
    """A training step."""

    compute: float
    """Seconds of forward, backward and optimizer."""
    reduction: float
    """Seconds of the reduction."""
    hidden: float
    """Seconds of its communication that pass while backward computes."""

    @property
    def seconds(self) -> float:
        """compute + reduction - hidden"""
        return self.compute + self.reduction - self.hidden

    @property
    def share(self) -> float:
        """The share of the step that waits for the reduction."""
        return (self.reduction - self.hidden) / self.seconds if self.seconds else 0.0


def step_time(compute: float, cost: Cost, buckets: int = 1, backward: float = BACKWARD) -> Step:
    """A step = compute + the reduction - the communication that backward hides.

    With B buckets, each but the last travels while backward computes the next: at most (B-1)/B of
    the communication, and of backward, overlap. Compressing takes its time in any case.

        hidden = (B-1)/B * min(transfer + latency, backward * compute)

    Args:
        compute: seconds of forward, backward and optimizer.
        cost: of all buckets together.
        buckets: parts in which the gradient is reduced. With one, nothing is hidden.
        backward: its share of compute.
    """
    hidden = (buckets - 1) / buckets * min(cost.communication, backward * compute)
    return Step(compute, cost.seconds, hidden)
