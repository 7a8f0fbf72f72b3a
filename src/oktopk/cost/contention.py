"""How long a schedule takes where messages share links.

A rank's link sends and receives at its rate, both at once. Messages that are on their way at the
same time share links in a max-min fair way: no message can be faster without slowing down one that
is not faster than it. So a rank to which many send at once receives each of them slowly (incast).

    seconds = finish(schedule, Network(size, Link(rate=125e6, latency=50e-6)))

With nodes, a message between ranks of a node takes their links inside the node. A message to
another node also takes the links of both nodes, which all their ranks share.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .machine import Link, Nodes
from .schedule import Numbers, Schedule

Floats = NDArray[np.float64]
_SAME = 1e-9
"""Rates and times that are closer than this, relative to themselves, are the same."""


@dataclass(frozen=True)
class Network:
    """P ranks and their links."""

    size: int
    """P."""
    link: Link
    """Of a rank; with nodes, of a node."""
    nodes: Nodes | None = None
    call: float = 0.0
    """Seconds that a rank needs to start a message that it sends."""
    grain: float = 0.01
    """A message arrives when no more than this share of it is left. It keeps the number of events
    low, and makes times too short by no more than this share."""

    def rates(self) -> Floats:
        """Of all links: of ranks, to send and then to receive; of nodes, the same; and at the end
        one that is never in the way."""
        if self.nodes is None:
            return np.array([self.link.rate] * (2 * self.size) + [np.inf])
        count = -(-self.size // self.nodes.ranks)
        inside = [self.nodes.inside.rate] * (2 * self.size)
        return np.array(inside + [self.link.rate] * (2 * count) + [np.inf])

    def path(self, sources: Numbers, targets: Numbers) -> Numbers:
        """The links that each message takes: four columns."""
        links = np.full((len(sources), 4), len(self.rates()) - 1)
        links[:, 0], links[:, 1] = sources, self.size + targets
        if self.nodes is not None:
            here, there = sources // self.nodes.ranks, targets // self.nodes.ranks
            away, first = here != there, 2 * self.size
            count = -(-self.size // self.nodes.ranks)
            links[away, 2], links[away, 3] = first + here[away], first + count + there[away]
        return links

    def latencies(self, sources: Numbers, targets: Numbers) -> Floats:
        """Of each message."""
        if self.nodes is None:
            return np.full(len(sources), self.link.latency)
        away = sources // self.nodes.ranks != targets // self.nodes.ranks
        return np.where(away, self.link.latency, self.nodes.inside.latency)


def fair(links: Numbers, rates: Floats) -> Floats:
    """The max-min fair rate of each message.

    A link is tight where each of its messages has no smaller share of another link. Messages of
    tight links get their share, and leave the rest to the others.

    Args:
        links: those that each message takes, a row for each.
        rates: of the links.
    """
    found = np.zeros(len(links))
    todo, left = np.arange(len(links)), rates.copy()
    while todo.size:
        on = links[todo]
        count = np.bincount(on.ravel(), minlength=len(rates))
        share = left / np.maximum(count, 1)
        mine = share[on].min(axis=1)
        smallest = np.full(len(rates), np.inf)
        np.minimum.at(smallest, on, mine[:, None])
        tight = (share <= smallest * (1 + _SAME)) & (count > 0)
        fixed = tight[on].any(axis=1)
        found[todo[fixed]] = mine[fixed]
        taken = np.repeat(mine[fixed], on.shape[1])
        left -= np.bincount(on[fixed].ravel(), weights=taken, minlength=len(rates))
        np.maximum(left, 0, out=left)
        todo = todo[~fixed]
    return found


def finish(schedule: Schedule, network: Network) -> Floats:
    """The second at which each rank has done all that the schedule asks of it.

    All begin at 0. A message is on its way when both sides have started it, and the latency has
    passed.
    """
    return _Run(schedule, network).finish()


class _Run:
    """From event to event: messages set out, and messages arrive."""

    def __init__(self, schedule: Schedule, network: Network) -> None:
        if schedule.size != network.size:
            raise ValueError(
                f"{schedule.size} ranks in the schedule, {network.size} in the network"
            )
        ends = schedule.sources, schedule.targets
        self._links, self._latencies = network.path(*ends), network.latencies(*ends).tolist()
        self._network, self._rates = network, network.rates()
        self._nbytes = schedule.nbytes.astype(np.float64)
        self._sources = schedule.sources.tolist()
        self._programs = [program.tolist() for program in schedule.programs]
        self._next = [0] * network.size
        """Where each rank is in its program."""
        self._clock = [0.0] * network.size
        self._begun: dict[int, float] = {}
        """When the first side of a message was ready."""
        self._arrived = bytearray(len(self._sources))
        self._sleepers: dict[int, list[int]] = {}
        """Ranks that wait for a message."""
        self._setting_out: list[tuple[float, int]] = []
        """A heap of messages that are not on their way yet."""

    def finish(self) -> Floats:
        for rank in range(len(self._programs)):
            self._go_on(rank, 0.0)
        self._travel()
        if self._sleepers:
            raise ValueError("the schedule never ends: ranks wait for messages that nobody sends")
        return np.array(self._clock)

    def _go_on(self, rank: int, now: float) -> None:
        """Follow a rank's program until it must wait."""
        program, sources, arrived = self._programs[rank], self._sources, self._arrived
        at, clock = self._next[rank], max(self._clock[rank], now)
        while at < len(program):
            number = program[at]
            if number >= 0:
                if sources[number] == rank:
                    clock += self._network.call
                other = self._begun.pop(number, None)
                if other is None:
                    self._begun[number] = clock
                else:
                    start = max(clock, other) + self._latencies[number]
                    heapq.heappush(self._setting_out, (start, number))
            elif not arrived[~number]:
                self._sleepers.setdefault(~number, []).append(rank)
                break
            at += 1
        self._next[rank], self._clock[rank] = at, clock

    def _travel(self) -> None:
        """Move messages until none is left."""
        now, waiting = 0.0, self._setting_out
        numbers = np.empty(0, np.int64)
        left = np.empty(0)
        while waiting or numbers.size:
            new: list[int] = []
            while waiting and (waiting[0][0] <= now * (1 + _SAME) or not (numbers.size or new)):
                start, number = heapq.heappop(waiting)
                now = max(now, start)
                new.append(number)
            if new:
                numbers = np.concatenate([numbers, new])
                left = np.concatenate([left, self._nbytes[new]])
            speeds = fair(self._links[numbers], self._rates)
            span = float((left / speeds).min())
            if waiting:
                span = min(span, waiting[0][0] - now)
            now, left = now + span, left - span * speeds
            over = left <= (self._network.grain + _SAME) * self._nbytes[numbers]
            arriving, numbers, left = numbers[over], numbers[~over], left[~over]
            self._arrive(arriving.tolist(), now)

    def _arrive(self, numbers: list[int], now: float) -> None:
        awake: list[int] = []
        for number in numbers:
            self._arrived[number] = 1
            awake += self._sleepers.pop(number, ())
        for rank in awake:
            self._go_on(rank, now)
