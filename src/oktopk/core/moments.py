"""How large the gradients of compressed parameters are, element by element.

Their sparse average does not tell: an element of it is zero for many steps, and then a sum over
all of them. So every rank sums the squares of its own gradients, before compression, and in each
step one slice of the elements, 1/interval of them, is averaged over ranks and begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import schema
from .buckets import Bucket, Slot
from .transport import Transport

MOMENTS = schema.record(
    {
        "interval": schema.whole(1),
        "steps": schema.whole(),
        "turns": schema.whole(),
        "used": schema.entries(schema.whole()),
        "totals": schema.entries(schema.number(0)),
        "discards": schema.flag,
    }
)
"""What `Moments.state_dict` returns."""


@dataclass(frozen=True)
class Squares:
    """Mean squares of a part of a parameter, bitwise the same on all ranks."""

    name: str
    start: int
    """Where the part begins, in the order in which the parameter's elements lie in memory."""
    values: Tensor
    """Of each element, the mean over ranks and steps."""
    steps: float
    """How many steps with a gradient this is a mean of."""


class Moments:
    """Sums of squares of one rank, and whose turn it is to be averaged over ranks.

    The first round of `interval` steps ends with `totals`, to compare all that follows with;
    slices have their turns from the second round on. After a step that was not taken, with an
    overflow, say, all sums begin anew: nobody knows what is in them. So they do when a step is
    discarded for the first time. From then on the sums before each step are kept, too, and a
    step can be taken back exactly.
    """

    def __init__(self, buckets: Sequence[Bucket], interval: int, transport: Transport) -> None:
        self.interval = interval
        self.totals: dict[str, float] = {}
        """For each parameter, the sum of its elements' mean squares in the first round."""
        self._buckets = [bucket for bucket in buckets if not bucket.dense]
        self._transport = transport
        self._sums: list[Tensor] = []
        self._spare: list[Tensor] = []
        """The sums before the last step, once a step has been discarded."""
        self._before: dict[str, Any] = {}
        """The counters before the last step."""
        self._steps = 0
        """Steps that are in the sums, if their turn has not come since."""
        self._turns = 0
        """Steps since the first round."""
        self._used = {slot.name: 0 for bucket in self._buckets for slot in bucket.slots}
        """Of the steps in the sums, those in which some rank had a gradient."""
        self._pending = False

    @property
    def begun(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._sums)

    def observe(self, bucket: Bucket, factor: float) -> None:
        """Add the squares of a bucket's gradients, times `factor` each, before they are reduced."""
        if not self._sums:
            self._sums = self._zeros()
        self._pending = True
        number = self._buckets.index(bucket)
        after = (self._spare or self._sums)[number].split([slot.numel for slot in bucket.slots])
        for (slot, sums), out in zip(bucket.flat_pieces(self._sums[number]), after, strict=True):
            gradient = bucket.gradients[slot.name].float()
            torch.addcmul(sums, gradient, gradient, value=factor * factor, out=out)

    def _zeros(self) -> list[Tensor]:
        device = self._transport.device
        return [torch.zeros(bucket.reduce.numel, device=device) for bucket in self._buckets]

    def advance(self, unused: Collection[str]) -> list[Squares]:
        """The step was taken, collective: what is known anew.

        Args:
            unused: parameters that had no gradient on any rank.
        """
        self._before = self.state_dict()
        if self._spare:
            self._sums, self._spare = self._spare, self._sums
        self._pending = False
        self._steps += 1
        for name in self._used:
            self._used[name] += name not in unused
        if self.totals:
            self._turns += 1
            return self._average(self._turns - 1)
        if self._steps == self.interval:
            self._share_totals()
        return []

    def settle(self) -> None:
        """The step has ended; if it was not taken, begin anew."""
        if self._pending and not self._spare:
            self._begin_anew()
        self._pending = False

    def rewind(self) -> None:
        """Change places with what was there before the last step. Doing it twice changes nothing.

        Where the sums before it were not kept, they are zeros.
        """
        if not self._spare:
            self._spare = self._zeros()
            self._before |= {"steps": 0, "used": dict.fromkeys(self._used, 0)}
        before, self._before = self._before, self.state_dict()
        self._set(before)
        self._sums, self._spare = self._spare, self._sums

    def _begin_anew(self) -> None:
        self._steps = 0
        self._used = dict.fromkeys(self._used, 0)
        for sums in self._sums:
            sums.zero_()

    def _set(self, counters: Mapping[str, Any]) -> None:
        self._steps, self._turns = counters["steps"], counters["turns"]
        self._used, self.totals = dict(counters["used"]), dict(counters["totals"])

    def _share_totals(self) -> None:
        parts = list(self._parts())
        means = torch.stack([part.sum(dtype=torch.float64) for _, part in parts])
        means /= self._transport.size
        self._transport.all_reduce(means)
        for (slot, _), mean in zip(parts, means.tolist(), strict=True):
            # Squares of gradients above 1e19 are infinite in float32: then nothing is known.
            known = mean / max(1, self._used[slot.name])
            self.totals[slot.name] = known if math.isfinite(known) else 0.0

    def _average(self, turn: int) -> list[Squares]:
        """The mean squares of one slice; its sums begin anew."""
        in_sums = self._steps if turn < self.interval else min(self._steps, self.interval)
        parts = list(self._slice(turn % self.interval))
        if not parts:  # fewer elements than steps in a round
            return []
        means = torch.cat([part for _, _, part in parts]) / self._transport.size
        self._transport.all_reduce(means)
        sizes = [part.numel() for _, _, part in parts]
        found = []
        for (slot, start, part), values in zip(parts, means.split(sizes), strict=True):
            part.zero_()
            steps = in_sums * self._used[slot.name] / self._steps
            if steps:
                found.append(Squares(slot.name, start, values / steps, steps))
        return found

    def _parts(self) -> Iterator[tuple[Slot, Tensor]]:
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            yield from bucket.flat_pieces(sums)

    def _slice(self, turn: int) -> Iterator[tuple[Slot, int, Tensor]]:
        """The sums whose turn it is: parameter, where in it they begin, and they."""
        total = sum(sums.numel() for sums in self._sums)
        begin, end = (total * i // self.interval for i in (turn, turn + 1))
        for slot, part in self._parts():
            start, stop = max(begin, 0), min(end, slot.numel)
            if start < stop:
                yield slot, start, part[start:stop]
            begin, end = begin - slot.numel, end - slot.numel

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the sums are in `squares`."""
        return {
            "interval": self.interval,
            "steps": self._steps,
            "turns": self._turns,
            "used": dict(self._used),
            "totals": dict(self.totals),
            "discards": bool(self._spare),
        }

    def squares(self) -> dict[str, Tensor]:
        """This rank's sums by parameter, in their shapes."""
        if not self._sums:
            return {}
        kept = ((slot, part.nan_to_num(posinf=0.0)) for slot, part in self._parts())
        return {slot.name: slot.shaped(part) for slot, part in kept}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], squares: Mapping[str, Tensor]) -> None:
        """Continue where a state was taken: once, before anything else.

        A state of other parameters, or of other shapes, is of no use: all begins anew.
        """
        parameters = {slot.name: slot.size for bucket in self._buckets for slot in bucket.slots}
        shapes = {name: kept.shape for name, kept in squares.items()}
        if saved["used"].keys() != parameters.keys() or shapes not in ({}, parameters):
            return
        self._set(saved)
        if saved["discards"]:
            self._spare = self._zeros()
        if squares:
            self._sums = self._zeros()
            for slot, part in self._parts():
                slot.shaped(part).copy_(squares[slot.name])
