"""How large the gradients of compressed parameters are, element by element.

Their sparse average does not tell: an element of it is zero for many steps, and then a sum over
all of them. So every rank sums the squares of its own gradients, before compression, and in each
step one slice of the elements, 1/interval of them, is averaged over ranks and begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket, Slot
from .transport import Transport


@dataclass(frozen=True)
class Squares:
    """Mean squares of a part of a parameter, bitwise the same on all ranks."""

    name: str
    start: int
    """Where the part begins, in the order in which the parameter's elements lie in memory."""
    values: Tensor
    """Of each element, the mean over ranks and steps; NaN or Inf where a gradient was."""
    steps: int
    """How many steps this is a mean of."""


class Moments:
    """Sums of squares of one rank, and whose turn it is to be averaged over ranks.

    The first round of `interval` steps ends with `totals`, to compare all that follows with;
    slices have their turns from the second round on.
    """

    def __init__(self, buckets: Sequence[Bucket], interval: int, transport: Transport) -> None:
        self.interval = interval
        self._transport = transport
        self._sums = {
            bucket: torch.zeros(bucket.reduce.numel, device=transport.device)
            for bucket in buckets
            if not bucket.dense
        }
        self._steps = 0
        self.factor = 1.0
        """What gradients are multiplied by besides: what clipping after the average does to it."""
        self.totals: dict[str, float] = {}
        """For each parameter, the sum of its elements' mean squares in the first round."""

    def observe(self, bucket: Bucket, factor: float) -> None:
        """Add the squares of a bucket's gradients, times `factor` each, before they are reduced.

        A NaN or Inf stays in the sums until their next turn. The step that had it is skipped.
        """
        for slot, sums in bucket.flat_pieces(self._sums[bucket]):
            gradient = bucket.gradients[slot.name].float()
            sums.addcmul_(gradient, gradient, value=(self.factor * factor) ** 2)

    def advance(self) -> list[Squares]:
        """The end of a sparse step, collective: what is known anew."""
        self._steps += 1
        turn = self._steps - self.interval
        if turn == 0:
            self._share_totals()
        return self._average(turn - 1) if turn > 0 else []

    def _share_totals(self) -> None:
        names, totals = [], []
        for bucket, sums in self._sums.items():
            for slot, part in bucket.flat_pieces(sums):
                names.append(slot.name)
                totals.append(part[torch.isfinite(part)].sum(dtype=torch.float64))
        means = torch.stack(totals) / (self.interval * self._transport.size)
        self._transport.all_reduce(means)
        self.totals = dict(zip(names, means.tolist(), strict=True))

    def _average(self, turn: int) -> list[Squares]:
        """The mean squares of one slice; its sums begin anew."""
        steps = self.interval if turn >= self.interval else self.interval + turn + 1
        parts = list(self._slice(turn % self.interval))
        if not parts:  # fewer elements than steps in a round
            return []
        means = torch.cat([part for _, _, part in parts]) / (steps * self._transport.size)
        self._transport.all_reduce(means)
        found = []
        for (slot, start, part), values in zip(
            parts, means.split([part.numel() for _, _, part in parts]), strict=True
        ):
            part.zero_()
            found.append(Squares(slot.name, start, values, steps))
        return found

    def _slice(self, turn: int) -> Iterator[tuple[Slot, int, Tensor]]:
        """The sums whose turn it is: parameter, where in it they begin, and they."""
        total = sum(sums.numel() for sums in self._sums.values())
        begin, end = (total * i // self.interval for i in (turn, turn + 1))
        for bucket, sums in self._sums.items():
            for slot, part in bucket.flat_pieces(sums):
                start, stop = max(begin, 0), min(end, slot.numel)
                if start < stop:
                    yield slot, start, part[start:stop]
                begin, end = begin - slot.numel, end - slot.numel

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the sums are in `squares`."""
        return {
            "interval": self.interval,
            "steps": self._steps,
            "factor": self.factor,
            "totals": dict(self.totals),
        }

    def squares(self) -> dict[str, Tensor]:
        """This rank's sums by parameter, in their shapes."""
        pairs = (pair for bucket, sums in self._sums.items() for pair in bucket.pieces(sums))
        return {slot.name: part.clone() for slot, part in pairs}

    def load(self, saved: Mapping[str, Any], squares: Mapping[str, Tensor]) -> None:
        """Continue where a state was taken: once, before anything else."""
        self._steps, self.factor = saved["steps"], saved["factor"]
        self.totals = dict(saved["totals"])
        for bucket, sums in self._sums.items():
            for slot, part in bucket.pieces(sums):
                kept = squares.get(slot.name)
                if kept is not None and kept.shape == part.shape:
                    part.copy_(kept)
