"""What is known of links and machines, and what a step costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_PAYLOAD = 1448 / 1514


@dataclass(frozen=True)
class Link:
    """A rank's way to the other ranks, or a node's."""

    rate: float
    """Bytes a second that can be sent, and at the same time received."""
    latency: float
    """Seconds from the call of a send until a small message has arrived."""

    @classmethod
    def of(cls, bits: float, latency: float) -> Link:
        """A link of so many bits a second, as its maker counts them.

        Of 1514 bytes of an Ethernet frame, TCP carries 1448 of the caller's.
        """
        return cls(bits / 8 * _PAYLOAD, latency)

    @property
    def bits(self) -> float:
        """The reverse of `of`: bits a second, as a maker counts them."""
        return self.rate * 8 / _PAYLOAD

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate is {self.rate!r}, but must be above 0 bytes a second")
        if not self.latency >= 0:
            raise ValueError(f"latency is {self.latency!r}, but must be at least 0 seconds")

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """messages * latency + bytes / rate"""
        return messages * self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Nodes:
    """Nodes of several ranks. The link between nodes is shared by all ranks of a node."""

    ranks: int
    """On a node. Ranks of a node have consecutive numbers."""
    inside: Link
    """Between two ranks of a node."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a node has {self.ranks} ranks, but must have at least 1")


@dataclass(frozen=True)
class Machine:
    """How fast a rank computes with one thread, in seconds. `oktopk plan --measure` finds these.

    The defaults are rounded from measurements on a virtual machine with two cores (AMD EPYC, 2026).
    """

    element: float = 0.33e-9
    """An element: add the gradient to the residual, and compare with the threshold."""
    scan: float = 0.03e-9
    """An element of a region: look whether its sum is to be selected."""
    clear: float = 0.07e-9
    """An element of the average: set to zero."""
    pick: float = 6e-9
    """An entry: pick it as one of the k largest candidates."""
    encode: float = 3e-9
    """An entry: write it to a message."""
    decode: float = 2.7e-9
    """An entry: read it from a message."""
    reduce: float = 7.5e-9
    """An entry: add it to a sum."""
    apply: float = 7e-9
    """An entry: write its average, and clear it from the residual."""
    merge: float = 42e-9
    """An entry of two lists: merge them, and keep the k largest (gTopk)."""
    dense: float = 0.06e-9
    """A byte: sum two vectors of float32."""
    copy: float = 0.6e-9
    """A byte: hand it to the network, and take another one from it."""
    step: float = 0.5e-3
    """A step: everything that does not grow with the gradient."""
    message: float = 75e-6
    """A message to one rank: its call."""
    turn: float = 1.5e-3
    """Where ranks share a core: how long a message waits for it, for each rank beyond one."""
    crowd: float = 1.5
    """How many times as long as its bytes an all-to-all takes between many ranks: streams that meet
    at a link do not share it evenly, and the last one ends late."""
    again: float = 1.1e-9
    """An element: look for the exact threshold, where the carried one finds too few entries."""
    duplex: bool = False
    """Whether the two messages of a pair of ranks travel at the same time, as on NCCL. On Gloo they
    follow each other: a rank's word that it is ready to receive waits behind what it sends."""
    ranks_a_core: float = 1.0
    """Ranks that share a core: above 1 they wait for each other's computing."""

    def __post_init__(self) -> None:
        for knob in dataclasses.fields(self):
            value = getattr(self, knob.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{knob.name} is {value!r}, but must be a number of at least 0")

    def shared_by(self, ranks: float, size: int) -> float:
        """How many times as long computing takes while `ranks` of `size` ranks compute."""
        return max(1.0, self.ranks_a_core * ranks / size)

    def wait(self, ranks: float, size: int) -> float:
        """Seconds that a message waits for a core: turn * (ranks that share a core - 1)"""
        return self.turn * (self.shared_by(ranks, size) - 1)


@dataclass(frozen=True)
class Cost:
    """What one step of one rank costs."""

    compute: float = 0.0
    """Seconds of computing, compression and summation."""
    transfer: float = 0.0
    """Seconds in which bytes travel."""
    latency: float = 0.0
    """Seconds of waiting that do not depend on bytes."""
    bytes_sent: float = 0.0
    """Bytes that a rank sends, the mean over ranks, as `StepStats.bytes_sent` counts them."""
    messages: float = 0.0
    """Messages to one rank and collectives, the most of any rank."""

    @property
    def seconds(self) -> float:
        """Of the step: compute + transfer + latency."""
        return self.compute + self.communication

    @property
    def communication(self) -> float:
        """Seconds that are not computing."""
        return self.transfer + self.latency

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            *(
                getattr(self, each.name) + getattr(other, each.name)
                for each in dataclasses.fields(self)
            )
        )
