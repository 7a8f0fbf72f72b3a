"""The patterns of communication: what each costs, for P ranks that all take part.

L is the latency of a link and R its rate. A rank sends and receives at the same time. While bytes
travel, a core is busy with them for `copy` seconds a byte. So no transfer is faster than its bytes
times copy times the ranks that share a core.

With nodes, r ranks of a node share the node's link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .machine import Cost, Link, Machine, Nodes

IN_FLIGHT = 4
"""Rounds of messages that travel together; `ROUNDS_IN_FLIGHT` of algorithms/exchange.py."""


@dataclass(frozen=True)
class Ranks:
    """P ranks with their links and machines."""

    size: int
    link: Link
    """Of a rank; with nodes, of a node."""
    machine: Machine
    nodes: Nodes | None = None

    @property
    def here(self) -> int:
        """Ranks of a node; 1 without nodes."""
        return min(self.size, self.nodes.ranks) if self.nodes else 1

    @property
    def inside(self) -> Link:
        """Between ranks of a node."""
        return self.nodes.inside if self.nodes else self.link

    @property
    def crosses(self) -> bool:
        """Whether there is more than one node."""
        return self.size > self.here

    @property
    def latency(self) -> float:
        """Of the slowest link on the way."""
        return max(self.inside.latency, self.link.latency) if self.crosses else self.inside.latency

    def copying(self, nbytes: float, active: float | None = None) -> float:
        """Seconds in which a core is busy with bytes that travel.

        Args:
            active: ranks that send or receive at the same time; all unless given.
        """
        ranks = self.size if active is None else active
        return nbytes * self.machine.copy * self.machine.shared_by(ranks, self.size)

    def all_to_all(self, nbytes: float) -> Cost:
        """Every rank sends a message of m bytes to every other, all in one collective.

        transfer: (P-1) m / R; with nodes the larger of (r-1) m / R inside, and r (P-r) m / R
        latency: L + wait
        compute: a call for each message, and one more

        Where messages of a pair follow each other (no `duplex`), one of P-1 pairs of a rank has
        nothing to overlap with: the transfer takes 1 + 1/(P-1) times as long, which is twice with
        two ranks. With many, it takes `crowd` times as long.
        """
        others = self.size - 1
        if not others:
            return Cost()
        leaving = self.here * (self.size - self.here) * nbytes
        transfer = max(
            self.copying(others * nbytes),
            (self.here - 1) * nbytes / self.inside.rate,
            leaving / self.link.rate,
        )
        crowd = 1.0 if others == 1 else self.machine.crowd
        slower = max(crowd, 1.0 if self.machine.duplex else 1 + 1 / others)
        return Cost(
            compute=self.calls(1 + others),
            transfer=transfer * slower,
            latency=self.latency + self.machine.wait(self.size, self.size),
            bytes_sent=others * nbytes,
            messages=1,
        )

    def rounds(self, nbytes: float) -> Cost:
        """As `all_to_all`, but in P-1 rounds, of which `IN_FLIGHT` travel together.

        latency: (L + wait) ceil((P-1) / IN_FLIGHT)
        """
        cost = self.all_to_all(nbytes)
        others = self.size - 1
        waits = math.ceil(others / IN_FLIGHT)
        return Cost(cost.compute, cost.transfer, waits * cost.latency, cost.bytes_sent, others)

    def numbers(self, words: int) -> Cost:
        """A few 64-bit numbers for each rank, in one all-to-all: `Transport.trade_numbers`."""
        return self.all_to_all(8 * words)

    def ring(self, nbytes: float) -> Cost:
        """An allreduce of m bytes in a ring: P-1 steps that sum, and P-1 that hand out.

        transfer: 2 m (P-1)/P / R. A node's link carries one stream, whatever r is.
        latency: 2 (P-1) L
        """
        if self.size == 1:
            return Cost()
        steps, sent = 2 * (self.size - 1), 2 * nbytes * (self.size - 1) / self.size
        slowest = min(self.inside.rate, self.link.rate) if self.crosses else self.inside.rate
        return Cost(
            transfer=max(self.copying(sent), sent / slowest),
            latency=steps * self.latency,
            bytes_sent=math.ceil(sent),
            messages=1,
        )

    def levels(self) -> list[tuple[Link, int]]:
        """Of a binary tree from its leaves: the link of each level, and the pairs that use it."""
        found = []
        for level in range(math.ceil(math.log2(self.size))):
            distance = 2**level
            same = self.nodes is not None and self.here % (2 * distance) == 0
            link = self.inside if same or not self.crosses else self.link
            found.append((link, len(range(distance, self.size, 2 * distance))))
        return found

    def calls(self, count: float, active: float | None = None) -> float:
        """Seconds of computing for the calls of messages."""
        ranks = self.size if active is None else active
        return count * self.machine.message * self.machine.shared_by(ranks, self.size)
