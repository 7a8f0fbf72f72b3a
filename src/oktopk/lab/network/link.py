"""The shape of a link, and the words of tc for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...common.errors import UserError

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_FACTORS |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgt", 1)}
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6}

_PACKET = 1514
_LARGEST_PACKET = 65536
_LARGEST_NUMBER = 4_000_000_000  # of 32 bits, in which tc keeps sizes and microseconds


@dataclass(frozen=True)
class Link:
    """The shape of every host's link."""

    rate: str | None = None
    """As tc writes it, "1gbit" or "100mbit", in each direction; None: not limited."""
    delay: str | None = None
    """One way, from host to host: "0.2ms"."""
    loss: float = 0.0
    """Per cent of the packets."""

    def __post_init__(self) -> None:
        if not self.bits >= 8000:
            raise UserError(
                f"a rate of {self.rate} lets next to nothing through: take 8kbit or more, or leave "
                "it out for links that are not shaped"
            )
        if not 0 <= self.seconds <= 60:
            raise UserError(f"a delay of {self.delay} is too long: take at most 60s")
        if not 0 <= self.loss < 100:
            raise UserError(f"a loss of {self.loss:g} is no percentage: take 0 or more, below 100")

    @property
    def bits(self) -> float:
        """The rate in bits a second; infinite if the link is not shaped."""
        if self.rate is None:
            return float("inf")
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(|[kmgt]i?)(bit|bps)", self.rate.lower())
        if not match:
            raise UserError(
                f"{self.rate!r} is no rate: write 1gbit, 100mbit, or 12.5mbps for bytes a second"
            )
        return float(match[1]) * _FACTORS[match[2]] * (8 if match[3] == "bps" else 1)

    @property
    def seconds(self) -> float:
        """The delay, one way."""
        if self.delay is None:
            return 0.0
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]*)", self.delay.lower())
        if match and not match[2] and float(match[1]) == 0:
            return 0.0
        if not match or match[2] not in _SECONDS:
            raise UserError(f"{self.delay!r} is no delay: write 0.2ms, 200us or 0.01s")
        return float(match[1]) * _SECONDS[match[2]]

    @property
    def shaped(self) -> bool:
        """Whether there is a rate."""
        return self.rate is not None

    @property
    def far(self) -> bool:
        """Whether there is a delay or loss."""
        return self.seconds > 0 or self.loss > 0

    @property
    def largest_packet(self) -> int:
        """Bytes of the largest packet that a host may send, as if its network card cut it.

        It is half of a burst, so that the next one may go even when a timer is late. On links that
        lose packets it is a single packet, as on a wire, instead of 64 kB together.
        """
        if self.loss > 0:
            return _PACKET
        return int(max(_PACKET, min(_LARGEST_PACKET, self._burst / 2)))

    @property
    def bucket(self) -> str:
        """The rate, as a queueing discipline: the kernel's token bucket. Its queue drops packets
        only when it is full, as a plain switch does."""
        return f"tbf rate {self.bits:.0f}bit burst {self._burst:.0f} limit {self._queue:.0f}"

    @property
    def netem(self) -> str:
        """Delay and loss, as a queueing discipline. Its queue holds the packets on their way and
        those that wait. A queue that is too short would lose packets by itself."""
        packets = 100_000.0
        if self.shaped:
            packets = 1000 + (self.bits / 8 * self.seconds + self._queue) / 1000
        return f"netem delay {self.seconds * 1e6:.0f}us loss {self.loss:g}% limit {packets:.0f}"

    @property
    def _burst(self) -> float:
        """Bytes that may pass at once after silence: a millisecond's worth, or two packets."""
        return min(max(self.bits / 8 * 0.001, 2 * _PACKET), _LARGEST_NUMBER)

    @property
    def _queue(self) -> float:
        """Bytes that may wait in a host, or at a port of the switch: 20 ms' worth, or 1 MB. So no
        packets are lost when several hosts send to one at the same time."""
        return min(max(self.bits / 8 * 0.020, 1e6), _LARGEST_NUMBER)
