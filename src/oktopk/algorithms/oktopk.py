"""Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks.

Messages have a fixed size here, so a step is two exchanges. `OkTopkVariable` is the published form,
in which ranks exchange sizes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import NO_THRESHOLD, TOLERANCE, Carried, is_due, keep_from, keep_largest
from ..wire.message import Entries, concatenate
from .base import Algorithm, Reduced, State
from .exchange import Region, ends_of
from .offer import offer
from .regions import agree_on_regions, equal_cuts

_AIM = 0.7
"""Share of the room beyond k that the global threshold aims to fill."""


@dataclass(frozen=True)
class OkTopkState(State):
    """Thresholds and regions, carried from step to step."""

    steps: int = 0
    """Sparse steps so far."""
    local: Carried = NO_THRESHOLD
    """Threshold of this rank's own values."""
    total: Carried = NO_THRESHOLD
    """Threshold of the sums over ranks."""
    boundaries: tuple[int, ...] = ()
    """Region j is boundaries[j] to boundaries[j + 1]; empty before the first sparse step."""


@dataclass(frozen=True)
class _Plan:
    """Sizes that all ranks know before a step."""

    share: float
    """Sums that each owner should contribute: k / P."""
    most: int
    """Entries that a message has room for."""
    wanted: int
    """Sums that the global threshold aims at, over all owners."""
    room: int
    """Bytes of a message with entries of this rank's region."""
    own: list[int]
    """Bytes of the messages with entries of this rank's region: none from and for itself."""
    others: list[int]
    """Bytes of messages with entries of each other region."""


@dataclass(frozen=True)
class OkTopk(Algorithm[OkTopkState]):
    """Owners sum their regions, and only the k largest sums go back to everyone.

    1. Offer: accumulate, and select the k largest entries of this rank, by a threshold carried
       from step to step. Every `threshold_interval` sparse steps the selection is exact.
    2. Regions: in the first sparse step each rank cuts its offer into P parts of equal count, and
       the cuts are averaged over ranks. Region j belongs to rank j.
    3. Split: each rank sends the offered entries of region j to its owner. A message has room for
       `capacity * k / P` entries. The smallest entries beyond that stay in the residual. A flag
       for finite values and the sender's program point travel along.
    4. Reduce: each owner sums its region, and selects sums by a second carried threshold, which
       aims at somewhat more than k over all owners. If it selects less than 0.9 of the owner's
       share, the threshold is wrong, and the owner takes its share of the largest sums instead.
    5. Gather: every rank receives every owner's selection.
    6. Apply the k largest of them. Clear the applied entries from the residual of each rank that
       offered them. Their indices, cut into parts of equal count, are the next regions.

    No step asks for sizes, so a step is two exchanges. It never applies more than k entries, and
    may apply fewer in single steps.
    """

    threshold_interval: int = 32
    """Sparse steps between exact local thresholds (tau' in the paper)."""
    capacity: float = 1.15
    """Room of each message, in multiples of k/P."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.capacity, int | float) and 1 <= self.capacity < math.inf):
            raise ValueError(
                f"capacity is {self.capacity!r}, but must be at least 1, such as 1.2: a message "
                "has room for capacity * k / P entries. OkTopkVariable exchanges sizes instead"
            )

    def init(self) -> OkTopkState:
        return OkTopkState()

    def reduce(
        self, state: OkTopkState, acc: Accumulator, comm: Comm
    ) -> tuple[Reduced, OkTopkState]:
        offered = offer(acc, comm, state.local, is_due(state.steps, self.threshold_interval))
        if comm.size == 1:
            applied, reach = offered.entries, offered.threshold
            acc.clear(applied, applied)
            after = OkTopkState(state.steps + 1, offered.carried, state.total)
            return Reduced(applied, acc.values, len(applied), reach, reach), after
        with comm.time("exchange"):
            regions = state.boundaries or agree_on_regions(comm, offered.entries)
            plan = self._plan(acc, comm, regions)
            sent, region, overflow = _split(comm, offered.entries, regions, plan)
        threshold = 0.0 if acc.k == acc.numel else state.total.value
        with comm.time("reduce"):
            mine, wrong = _select_sums(comm, region, threshold, plan)
        with comm.time("gather"):
            gathered, rounded, anyone_wrong = _gather(comm, mine, wrong, regions, plan)
        total = state.total
        if anyone_wrong:
            # An owner did not select by the threshold, so begin anew.
            threshold = float(gathered.values.abs().min()) if len(gathered) else 0.0
            total = NO_THRESHOLD
        with comm.time("select"):
            applied, global_threshold, right = keep_from(gathered, threshold, acc.k, plan.wanted)
        acc.clear(sent, applied)
        acc.keep_rounding(mine, rounded, applied)
        if len(applied):
            regions = (0, *equal_cuts(comm, applied), acc.numel)
        reduced = Reduced(
            applied,
            acc.values,
            len(offered.entries),
            offered.threshold,
            global_threshold,
            overflow,
        )
        return reduced, OkTopkState(state.steps + 1, offered.carried, total.after(right), regions)

    def _plan(self, acc: Accumulator, comm: Comm, regions: tuple[int, ...]) -> _Plan:
        k, numel, share = acc.k, acc.numel, acc.k / comm.size
        # Counts scatter by about the square root of the expected count. At density 1 everything
        # has room, though regions may be of any size after a step with many zeros.
        room = self.capacity * share + 2 * math.sqrt(share)
        most = numel if k == numel else math.ceil(min(numel, room))
        wanted = min(numel, math.ceil(k * (1 + min(1.0, self.capacity - 1) * _AIM)))
        spans = [high - low for low, high in pairwise(regions)]
        others = [comm.wire.room(min(most, span), span, added=2) for span in spans]
        room, others[comm.rank] = others[comm.rank], 0
        own = [room] * comm.size
        own[comm.rank] = 0
        return _Plan(share, most, wanted, room, own, others)

    def words(self, numel: int, size: int) -> float:
        """6k(P-1)/P: the bound of the published form; two exchanges of at most `capacity * k`."""
        return 6 * self.target(numel) * (size - 1) / size


def _split(
    comm: Comm, offered: Entries, regions: tuple[int, ...], plan: _Plan
) -> tuple[Entries, Region, int]:
    """Step 3. Returns the entries sent, this rank's region, and how many entries had no room."""
    rank, low, high = comm.rank, regions[comm.rank], regions[comm.rank + 1]
    kept, ends = _hold_back(comm, offered, ends_of(offered, regions), plan.most)
    point = -1 if comm.transport.point is None else comm.transport.point
    added = [int(comm.finite), point]
    messages, sent = comm.wire.encode_all(kept, ends, rank, added, plan.others)
    received = comm.transport.all_to_all(messages, plan.others, plan.own)
    own = kept[ends[rank - 1] if rank else 0 : ends[rank]]
    entries, stops, notes = comm.decode_all(received, plan.own, [(low, high)] * comm.size, own, 2)
    notes[rank] = added
    comm.finite = all(finite for finite, _ in notes)
    if comm.transport.point is not None:
        comm.transport.check_points([point for _, point in notes])
    region = Region(entries, stops, low, high)
    return Entries(kept.indices, sent), region, len(offered) - len(kept)


def _hold_back(
    comm: Comm, offered: Entries, ends: list[int], most: int
) -> tuple[Entries, list[int]]:
    """The `most` largest entries for each other owner, all for this rank, and where each ends."""
    spans = list(pairwise([0, *ends]))
    if max([end - start for start, end in spans]) <= most:
        return offered, ends
    parts = [offered[start:end] for start, end in spans]
    for owner, part in enumerate(parts):
        if owner != comm.rank and len(part) > most:
            parts[owner] = keep_largest(part, most)[0]
    return concatenate(parts), list(accumulate(map(len, parts)))


def _select_sums(comm: Comm, region: Region, threshold: float, plan: _Plan) -> tuple[Entries, bool]:
    """Step 4. Returns this owner's selection, and whether the threshold was wrong."""
    mine, limit = region.select(comm, threshold), plan.most
    wrong = len(mine) < (1 - TOLERANCE) * plan.share and threshold > 0
    if wrong:
        mine, limit = region.select(comm, 0.0), math.ceil(plan.wanted / comm.size)
    mine = keep_largest(mine, limit)[0] if len(mine) > limit else mine
    comm.check(mine)
    return mine, wrong


def _gather(
    comm: Comm, mine: Entries, wrong: bool, regions: tuple[int, ...], plan: _Plan
) -> tuple[Entries, Tensor, bool]:
    """Step 5. Returns the selections of all owners, this one's values as all ranks read them, and
    whether any owner found the threshold wrong."""
    added = [int(comm.finite), int(wrong)]
    message, rounded = comm.wire.encode_all(mine, [len(mine)], -1, added, [plan.room])
    messages = message.repeat(comm.size - 1)
    received = comm.transport.all_to_all(messages, plan.own, plan.others)
    own, bounds = Entries(mine.indices, rounded), list(pairwise(regions))
    entries, _, notes = comm.decode_all(received, plan.others, bounds, own, 2)
    notes[comm.rank] = added
    comm.finite = all(finite for finite, _ in notes)
    return entries, rounded, any(wrong for _, wrong in notes)
