"""Training losses as the laboratory shows them: means over a window of steps, and when they reach a
target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def window_of(steps_per_epoch: int, planned: int) -> int:
    """Steps that a mean covers: an epoch, or half of a run that is shorter than two.

    Losses of batches differ: long samples have larger ones than short ones.
    """
    return max(1, min(steps_per_epoch, planned // 2))


def running_means(losses: Sequence[float], window: int) -> list[float]:
    """After each step, the mean of the last `window` losses, or of all until then."""
    return [
        statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, 1 + len(losses))
    ]


def seconds_to(curve: Sequence[Sequence[float]], window: int, target: float | None) -> float | None:
    """When the mean loss of a whole window first reached the target.

    Args:
        curve: seconds and mean loss after each step.
        target: None is never reached.
    """
    if target is None:
        return None
    whole = curve[window - 1 :]
    return next((seconds for seconds, loss in whole if loss <= target), None)
