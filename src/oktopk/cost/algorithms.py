"""The equations: what one step of each algorithm costs. The words are those of the glossary.

n elements, k entries, P ranks; m(e, s) bytes of a message of e entries among s elements, see
`sizes.message`. Other names are fields of `Machine`. Computing is the same on all ranks and at the
same time, so it is multiplied by the ranks that share a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .machine import Cost, Link, Machine, Nodes
from .patterns import Ranks
from .sizes import message, room

AIM = 1.2
"""Sums that `OkTopkVariable` gathers, in multiples of k; `AIM` of core/select.py."""
RETRIED = 0.3
"""Share of the steps in which a carried threshold finds fewer than k entries."""
CAPACITY = 1.08
"""Room of a message of `OkTopk`, in multiples of k/P."""


@dataclass(frozen=True)
class Case:
    """One reduction: what is reduced, how entries travel, and who takes part."""

    numel: int
    k: int
    wire: str
    ranks: Ranks

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def union(self) -> float:
        """Elements that at least one of P ranks selects, if ranks select independently.

        n (1 - (1 - k/n)^P): nearly kP where that is far below n. It is the most that can be
        expected: ranks whose gradients are alike select the same.
        """
        return self.numel * -math.expm1(self.size * _log1p(-self.k / self.numel))

    def compute(self, seconds: float, active: float | None = None) -> Cost:
        """Computing that `active` ranks do at the same time; all unless given."""
        shared = self.ranks.machine.shared_by(self.size if active is None else active, self.size)
        return Cost(compute=seconds * shared)

    def offer(self, exact: bool = False) -> Cost:
        """Accumulate, find candidates, and pick the k largest: step + n element + k pick

        Where exactly k are needed, and not 0.9 k, some steps need a second pass: + RETRIED n again
        """
        m = self.ranks.machine
        retried = self.numel * RETRIED * m.again if exact else 0.0
        return self.compute(m.step + self.numel * m.element + self.k * m.pick + retried)

    def write(self, offered: float, applied: float) -> Cost:
        """Write averages, and clear offered entries from the residual:
        n clear + (offered + applied) apply / 2"""
        m = self.ranks.machine
        return self.compute(self.numel * m.clear + (offered + applied) * m.apply / 2)

    def code(self, encoded: float = 0, decoded: float = 0, active: float | None = None) -> Cost:
        """Write and read messages: encoded * encode + decoded * decode"""
        m = self.ranks.machine
        return self.compute(encoded * m.encode + decoded * m.decode, active)

    def sum(self, entries: float, span: float) -> Cost:
        """Sum entries, and select among the sums of `span` elements: entries reduce + span scan"""
        m = self.ranks.machine
        return self.compute(entries * m.reduce + span * m.scan)


def dense(case: Case) -> Cost:
    """Allreduce of all elements in a ring, as Gloo does it, and NCCL for large vectors.

    bytes: 8n(P-1)/P
    seconds: 8n(P-1)/P / R + 2(P-1) L; sums: 4n(P-1)/P dense, while other bytes travel
    """
    return _allreduce(case, nbytes=4 * case.numel, sums=4 * case.numel)


def half(case: Case) -> Cost:
    """Allreduce of 16 bits an element, as DDP's fp16 and bf16 hooks do it: half the bytes.

    compute: two conversions, taken as 4n dense each
    """
    m = case.ranks.machine
    convert = case.compute(2 * 4 * case.numel * m.dense)
    return convert + _allreduce(case, nbytes=2 * case.numel, sums=4 * case.numel)


def _allreduce(case: Case, nbytes: float, sums: float) -> Cost:
    """A ring. Summing hides behind bytes that travel, or the other way round."""
    ring, m = case.ranks.ring(nbytes), case.ranks.machine
    share = (case.size - 1) / case.size
    summing = case.compute(sums * share * m.dense).compute
    hidden = min(summing, ring.transfer)
    return ring + case.compute(m.message) + Cost(compute=summing - hidden)


def topka(case: Case) -> Cost:
    """Allgather of all offers, which every rank sums.

    bytes: (P-1) m(k, n)
    seconds: offer + k encode + (P-1) m / R + (P-1) k decode + Pk reduce + n scan + write
    """
    return _allgather(case, case.offer(exact=True))


def _allgather(case: Case, offer: Cost) -> Cost:
    """Of offers, with their sums on every rank."""
    k, size = case.k, case.size
    if size == 1:
        return offer + case.write(k, k)
    ranks = case.ranks
    gather = ranks.numbers(3) + ranks.rounds(message(case.wire, k, case.numel))
    return (
        offer
        + case.code(encoded=k)
        + gather
        + case.code(decoded=(size - 1) * k)
        + case.sum(size * k, case.numel)
        + case.write(k, case.union)
    )


def gaussiank(case: Case) -> Cost:
    """As TopkA, but the threshold is guessed: step + n element + three passes of 4n dense.

    Between 2k/3 and 4k/3 entries are selected; k are counted here.
    """
    m = case.ranks.machine
    guess = case.compute(m.step + case.numel * (m.element + 3 * 4 * m.dense))
    return _allgather(case, guess)


def topkdsa(case: Case) -> Cost:
    """Owners sum their regions, and send all sums to everyone, as entries or whole.

    bytes: (P-1) (m(k/P, n/P) + the least of m(u/P, n/P) and 4n/P), u the union of P offers
    """
    k, size, ranks, span = case.k, case.size, case.ranks, case.numel / case.size
    if size == 1:
        return case.offer(exact=True) + case.write(k, k)
    sums = case.union / size
    whole = 40 + 4 * round(span)
    reply = min(message(case.wire, sums, span), whole)
    return (
        _split(case, exact=True)
        + case.sum(k, span)
        + case.code(encoded=sums)
        + ranks.numbers(3)
        + ranks.rounds(reply)
        + case.code(decoded=(size - 1) * sums)
        + case.write(k, case.union)
    )


def gtopk(case: Case) -> Cost:
    """A tree of pairwise merges, and back.

    bytes: 2 (P-1)/P m(k, n), the mean over ranks; the busiest rank sends and receives
        2 log2(P) m
    seconds: offer + 2 log2(P) (m / R + 2 L + wait + k decode)
        + log2(P) (k encode + k/2 apply + 2k merge) + write

    A message follows right behind its size, so both wait for a core once. Rounding errors are
    applied to the residual.
    """
    k, size, ranks, m = case.k, case.size, case.ranks, case.ranks.machine
    nbytes = message(case.wire, k, case.numel, added=1) + 8  # a size goes ahead
    total = case.offer(exact=True) + case.write(k, k)
    for link, pairs in ranks.levels():
        joined = case.compute(k * m.apply / 2 + 2 * k * m.merge, pairs)
        up = case.code(encoded=k, decoded=k, active=pairs) + joined
        down = case.code(decoded=k, active=pairs)
        hop = Cost(
            compute=ranks.calls(2, pairs),
            transfer=max(ranks.copying(nbytes, 2 * pairs), nbytes / link.rate),
            latency=2 * link.latency + m.wait(2 * pairs, size),
            bytes_sent=nbytes * pairs / size,
            messages=2,
        )
        total = total + up + hop + down + hop
    return total if size == 1 else total + case.code(encoded=k, active=1)


def oktopk(case: Case) -> Cost:
    """Owners sum their regions, and send the largest sums to everyone: two fixed-size exchanges.

    bytes: 2 (P-1) room, with room for e = 1.08 k/P + 2 sqrt(k/P) entries among n/P elements
    seconds: offer + k encode + (P-1) room / R + L + k decode + k reduce + n/P scan
        + k/P encode + (P-1) room / R + L + k (decode + pick) + write
    """
    k, size, ranks = case.k, case.size, case.ranks
    if size == 1:
        return case.offer() + case.write(k, k)
    span = math.ceil(case.numel / size)
    exchange = ranks.all_to_all(fixed_room(case.numel, k, size, case.wire))
    others = k * (size - 1) / size
    return (
        case.offer()
        + case.code(encoded=others)
        + exchange
        + case.code(decoded=others)
        + case.sum(k, span)
        + case.code(encoded=k / size)
        + exchange
        + case.code(decoded=others)
        + case.compute(k * ranks.machine.pick)
        + case.write(k, k)
    )


def fixed_room(numel: int, k: int, size: int, wire: str) -> int:
    """Bytes of a message of `OkTopk`, if regions are equally long."""
    span = -(-numel // size)
    if k == numel:
        return room("float32", span, span)
    unit = max(1, (1 << span.bit_length()) // 32)
    span = min(numel, -(-span // unit) * unit)
    share = k / size
    return room(wire, math.ceil(min(span, CAPACITY * share + 2 * math.sqrt(share))), span)


def oktopk_variable(case: Case) -> Cost:
    """Ok-Topk as published: sizes travel first, and 1.2 k sums are gathered.

    bytes: (P-1) (m(k/P, n/P) + m(1.2 k/P, n/P))
    """
    k, size, ranks, span = case.k, case.size, case.ranks, case.numel / case.size
    if size == 1:
        return case.offer() + case.write(k, k)
    sums = min(AIM * k, case.union) / size
    return (
        _split(case)
        + case.sum(k, span)
        + case.code(encoded=sums)
        + ranks.numbers(3)
        + ranks.rounds(message(case.wire, sums, span))
        + case.code(decoded=(size - 1) * sums)
        + case.compute(k * ranks.machine.pick)
        + case.write(k, k)
    )


def _split(case: Case, exact: bool = False) -> Cost:
    """Offer, and send each region's entries to its owner, after an exchange of sizes."""
    k, size, ranks = case.k, case.size, case.ranks
    nbytes = message(case.wire, k / size, case.numel / size)
    others = k * (size - 1) / size
    coded = case.code(encoded=others, decoded=others)
    return case.offer(exact) + coded + ranks.numbers(2) + ranks.rounds(nbytes)


ALGORITHMS: dict[str, Callable[[Case], Cost]] = {
    "dense": dense,
    "fp16": half,
    "bf16": half,
    "topka": topka,
    "topkdsa": topkdsa,
    "gtopk": gtopk,
    "gaussiank": gaussiank,
    "oktopk": oktopk,
    "oktopk-variable": oktopk_variable,
}
"""The equation of each algorithm, by the library's name, and of two of DDP's hooks."""
WITHOUT_WIRE = ("dense", "fp16", "bf16")
"""Those that have no wire format, and no density."""


def predict(
    algorithm: str,
    numel: int,
    k: int,
    size: int,
    wire: str,
    link: Link,
    machine: Machine,
    nodes: Nodes | None = None,
) -> Cost:
    """What one step costs a rank.

    Args:
        algorithm: one of `ALGORITHMS`.
        numel: elements of the gradient, n.
        k: entries that a step applies, 1 to n; dense ones do not look at it.
        size: ranks, P.
        wire: one of `WIRES`. At k = n entries travel as float32, whatever it is.
        link: of a rank; with nodes, of a node.
        machine: how fast a rank computes.
        nodes: ranks that share a node; None: each rank has a link of its own.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, but must be one of {', '.join(ALGORITHMS)}")
    if numel < 1 or size < 1:
        raise ValueError(f"there must be an element and a rank, not {numel} and {size}")
    if not 1 <= k <= numel:
        raise ValueError(f"k is {k}, but must be 1 to {numel}, the number of elements")
    form = "float32" if k == numel else wire
    return ALGORITHMS[algorithm](Case(numel, k, form, Ranks(size, link, machine, nodes)))


def _log1p(x: float) -> float:
    return math.log1p(x) if x > -1 else -math.inf
