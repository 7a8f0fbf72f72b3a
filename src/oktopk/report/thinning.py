"""Fewer points of a curve, with its peaks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def thin(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """The places of at most `most` values that look like all of them.

    The values are cut into bins of one length. Of each bin the smallest and the largest value stay,
    so that no peak is lost. The first and the last value stay as well.

    Args:
        values: finite.
        most: at least 4.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(1, count - 1, (most - 2) // 2 + 1).astype(int)
    kept = [0, count - 1]
    for begin, end in pairwise(edges):
        bin = values[begin:end]
        kept += [begin + int(bin.argmin()), begin + int(bin.argmax())]
    return np.unique(kept)


def smooth(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of each value and up to `width - 1` values before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))
