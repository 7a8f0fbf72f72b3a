"""Ok-Topk: a sparse allreduce whose volume does not grow with the number of ranks.

Messages have a fixed size here, so a step is two exchanges. `OkTopkVariable` is the published form,
in which ranks exchange sizes first.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import sub

from ..core.accumulator import Accumulator
from ..core.comm import Comm
from ..core.select import NO_THRESHOLD, TOLERANCE, Carried, aim, is_due
from ..kernels import numbers, plan
from ..kernels.plan import Plan
from ..wire.message import Wire
from .base import Algorithm, Reduced, State, Written
from .offer import offer
from .regions import agree_on_regions

_AIM = 0.7
"""Share of the room beyond k that the global threshold aims to fill."""
_SPANS = 16
"""Lengths of regions are rounded up to one of so many in an octave, so that sizes seldom change."""


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

    No step asks for sizes, so a step is two exchanges, and three calls of kernels: `prepare` does
    1 to 3, `combine` 4, and `apply` 6. See kernels/reference/step.py. It never applies more than
    k entries, and may apply fewer in single steps.
    """

    fixed_size = True
    threshold_interval: int = 32
    """Sparse steps between exact local thresholds (tau' in the paper)."""
    capacity: float = 1.08
    """Room of each message, in multiples of k/P."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.capacity, int | float) and 1 <= self.capacity < math.inf):
            raise ValueError(
                f"capacity is {self.capacity!r}, but must be at least 1, such as 1.08: a message "
                "has room for capacity * k / P entries. OkTopkVariable exchanges sizes instead"
            )

    def init(self) -> OkTopkState:
        return OkTopkState()

    def reduce(
        self, state: OkTopkState, acc: Accumulator, comm: Comm
    ) -> tuple[Reduced | Written, OkTopkState]:
        exact = is_due(state.steps, self.threshold_interval)
        if comm.size == 1:
            return self._alone(state, acc, comm, exact)
        regions = self._regions(state, acc, comm)
        step, lap = acc.step(self._plan(acc, comm, regions)), comm.time.lap
        step.begin([*state.local.bits(step.dtype), *state.total.bits(step.dtype), *regions])
        least = acc.k if exact else math.ceil((1 - TOLERANCE) * acc.k)
        step.prepare(acc.vectors, least, comm.point)
        lap("accumulate")
        comm.transport.all_to_all(step.send, step.received, comm.rider)
        lap("exchange")
        step.combine()
        lap("reduce")
        comm.transport.all_gather_rows(step.reply, step.gathered, step.send, comm.rider)
        lap("gather")
        step.apply(acc.vectors)
        record = step.read()
        lap("apply")
        comm.check_record(record)
        offered_from, applied_from, local, total = numbers.reals(
            step.dtype, record.local_limit, record.total_limit, record.local[0], record.total[0]
        )
        octave = numbers.OCTAVE[step.dtype]
        after = OkTopkState(
            state.steps + 1,
            Carried(local, record.local[1] / octave),
            Carried(total, record.total[1] / octave),
            record.regions,
        )
        written = Written(
            record.applied, record.offered, offered_from, applied_from, record.overflow, regions
        )
        return written, after

    def _alone(
        self, state: OkTopkState, acc: Accumulator, comm: Comm, exact: bool
    ) -> tuple[Reduced, OkTopkState]:
        """One rank applies its own offer."""
        offered = offer(acc, comm, state.local, exact)
        applied, reach = offered.entries, offered.threshold
        acc.clear(applied, applied)
        after = OkTopkState(state.steps + 1, offered.carried, state.total)
        return Reduced(applied, acc.values, len(applied), reach, reach), after

    def _regions(self, state: OkTopkState, acc: Accumulator, comm: Comm) -> tuple[int, ...]:
        """Step 2. The first sparse step takes a second pass, to see where entries are."""
        if acc.k == acc.numel:
            return tuple(acc.numel * j // comm.size for j in range(comm.size + 1))
        if state.boundaries:
            return state.boundaries
        offered = offer(acc, comm, state.local, exact=True)
        return agree_on_regions(comm, offered.entries)

    def _plan(self, acc: Accumulator, comm: Comm, regions: tuple[int, ...]) -> Plan:
        span = max(1, *map(sub, regions[1:], regions))
        if acc.k < acc.numel:
            unit = max(1, (1 << span.bit_length()) // (2 * _SPANS))
            span = min(acc.numel, -(-span // unit) * unit)
        rider = 0 if comm.rider is None else comm.rider.nbytes
        return _plan(
            self.capacity, acc.k, acc.numel, comm.size, comm.rank, span, acc.sizes, comm.wire, rider
        )

    def words(self, numel: int, size: int) -> float:
        """6k(P-1)/P: the bound of the published form; two exchanges of at most `capacity * k`."""
        return 6 * self.target(numel) * (size - 1) / size


@functools.lru_cache(maxsize=1 << 14)
def _plan(
    capacity: float,
    k: int,
    numel: int,
    size: int,
    rank: int,
    span: int,
    parts: tuple[int, ...],
    wire: Wire,
    rider: int,
) -> Plan:
    """Sizes that all ranks know before a step.

    Args:
        span: no region is longer.
        rider: bytes that travel with each message.
    """
    share = k / size
    # Counts scatter by about the square root of the expected count. At density 1 everything has
    # room.
    most = span if k == numel else math.ceil(min(span, capacity * share + 2 * math.sqrt(share)))
    wanted = min(numel, math.ceil(k * (1 + min(1.0, capacity - 1) * _AIM)))
    code, values_at, positions_at, room = plan.rooms(
        wire.codec, most, span, wire.index_dtype.itemsize
    )
    return Plan(
        numel=numel,
        size=size,
        rank=rank,
        k=k,
        aim=aim(k, numel),
        wanted=wanted,
        most=most,
        fewest=math.ceil((1 - TOLERANCE) * share),
        share=math.ceil(wanted / size),
        span=span,
        code=code,
        values_at=values_at,
        positions_at=positions_at,
        room=room,
        stride=room + rider,
        parts=parts,
        codec=wire.codec,
    )
