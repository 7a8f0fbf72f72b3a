"""Detail: what an `Inspector` has seen in one step, and how long entries wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers."""

    edges: tuple[int, ...] = ()
    """Bin i counts numbers from edges[i] on and below edges[i + 1]."""
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Magnitudes:
    """Counts of magnitudes, in bins of half an octave. Zeros are not counted, nor NaN and Inf.

    Edges in the middle of an octave are 0.3 % too high.
    """

    lowest: int
    counts: tuple[int, ...]
    """Bin i counts magnitudes from 2**((lowest + i) / 2) on and below 2**((lowest + i + 1) / 2)."""


@dataclass(frozen=True)
class Staleness:
    """How many steps entries wait before they are applied: 0 if they are applied at once.

    Estimated from a fixed sample of the elements of each bucket, in steps with sparse averages. An
    element waits from the first gradient that this rank keeps in its residual until the element is
    applied, whichever rank offered it. Waits that began before the inspection are left out.
    """

    mean: float
    """Of the entries that were applied; 0 if there were none."""
    p99: int
    """99 % of them waited no longer."""
    max: int
    waiting_mean: float
    """Of the elements that wait now: steps so far. 0 if there are none."""
    waiting_p99: int
    histogram: Histogram
    """The waits of the entries that were applied; counts are estimates for all elements."""


@dataclass(frozen=True)
class BucketDetail:
    """One bucket in one step, as one rank saw it."""

    index: int
    numel: int
    k: int
    """Entries to apply; all elements in a dense step."""
    offered: int
    """Entries that this rank offered."""
    applied: int
    local_threshold: float
    """Magnitude that all offered entries reach; 0 in a dense step."""
    exact_threshold: float
    """The k-th largest magnitude of this rank; 0 in a dense step."""
    global_threshold: float
    """Magnitude that all applied sums reach; 0 where there is no such limit."""
    regions: tuple[int, ...]
    """Entries applied in each owner's region; empty if the algorithm has no regions."""
    magnitudes: Magnitudes
    """Of this rank's residual + gradient, before the reduction."""


@dataclass(frozen=True)
class MessageCount:
    """Messages of one size."""

    collective: str
    """allreduce, allgather, alltoall, broadcast, or message: from one rank to one other."""
    bytes: int
    """That this rank handed to torch.distributed, as `StepStats.bytes_sent` counts them."""
    count: int


@dataclass(frozen=True)
class Detail:
    """A step as an inspector saw it on one rank."""

    step: int
    """Number of the step, from 0."""
    phase: str
    """`dense` or `sparse`."""
    buckets: tuple[BucketDetail, ...]
    staleness: Staleness | None
    """Since the detail before; None in a dense step."""
    messages: tuple[MessageCount, ...]
    """Messages of this rank since the detail before."""
