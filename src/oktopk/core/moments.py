"""Second moments for optimizers: how large the gradients of compressed parameters are.

The sparse average does not show it: an element is zero for many steps, and then a sum over all of
them. So every rank sums the squares of its own gradients, before compression. In each step one
slice of the elements, 1/interval of them, is averaged over ranks and begins anew.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import schema
from .buckets import Bucket, Slot
from .transport import Transport

_COUNTERS = schema.record(
    {
        "interval": schema.whole(1),
        "steps": schema.whole(),
        "turns": schema.whole(),
        "used": schema.entries(schema.whole()),
        "totals": schema.entries(schema.number(0)),
        "discards": schema.flag,
    }
)
SAVED = schema.record(
    {
        "counters": schema.empty_or(_COUNTERS),
        "steps": schema.entries(schema.whole(-(2**53))),
        "ratio": schema.entries(schema.number(0, finite=False)),
        "clipping": schema.empty_list_or(schema.several(schema.number(0), length=2)),
    }
)
"""Check of the result of `SecondMoments.state_dict`."""


@dataclass(frozen=True)
class Squares:
    """Mean squares of a part of a parameter, bitwise the same on all ranks."""

    name: str
    start: int
    """Where the part begins, in the order in which the parameter's elements lie in memory."""
    values: Tensor
    """The mean over ranks and steps, for each element."""
    steps: float
    """How many steps with a gradient this is a mean of."""


class SquareSums:
    """Sums of squares of one rank, and whose turn it is to be averaged over ranks.

    The first round of `interval` steps ends with `totals`, to compare all that follows with;
    slices have their turns from the second round on. After a step that was not taken, because of an
    overflow, say, all sums begin anew: their content is unknown. They also begin anew when a step
    is discarded for the first time. From then on the sums before each step are kept, too, so a step
    can be taken back exactly.
    """

    def __init__(self, buckets: Sequence[Bucket], interval: int, transport: Transport) -> None:
        self.interval = interval
        self.totals: dict[str, float] = {}
        """For each parameter, the sum of its elements' mean squares in the first round."""
        self._buckets = [bucket for bucket in buckets if not bucket.small]
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
        """By parameter, the steps in the sums in which some rank had a gradient."""
        self._pending = False

    @property
    def begun(self) -> bool:
        """Whether any squares were summed."""
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
        return [torch.zeros(bucket.reduction.numel, device=device) for bucket in self._buckets]

    def advance(self, unused: Collection[str]) -> list[Squares]:
        """The step was taken. Collective; returns the squares that are now known.

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
        """Exchange the present with the sums before the last step. Twice changes nothing.

        If those were not kept, they are zeros.
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
        """The sums whose turn it is: their parameter, their start in it, and the sums."""
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

        A state of other parameters or shapes is of no use. The sums begin anew then.
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


@dataclass(frozen=True)
class Probe:
    """A parameter and a copy of its average in the last step, to compare with the applied one."""

    name: str
    average: Tensor


class SecondMoments:
    """Answers a reducer's optimizers, and keeps their notes of sparse steps.

    A front end opts in by giving its reducer one. Without it, optimizers take averages as they are.

    Args:
        run: runs a task on the communication thread, and waits for it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        transport: Transport,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self.steps: dict[str, int] = {}
        """By parameter, the number of its optimizer's steps; negative if sparse averages are in its
        second moment."""
        self.ratios: dict[str, float] = {}
        """By parameter, its second moment over the mean square of the ranks' own gradients."""
        self.clipping: list[float] = []
        """Moving averages of the probe's square as it was applied, and as it was averaged."""
        self._buckets, self._transport, self._run = buckets, transport, run
        self._asked: weakref.WeakKeyDictionary[object, int | None] = weakref.WeakKeyDictionary()
        """The interval that each optimizer asked for."""
        self._sums: SquareSums | None = None
        self._found: dict[tuple[str, int], Squares] = {}
        self._before: tuple[SquareSums | None, dict[tuple[str, int], Squares]] = None, {}
        """Sums and squares before the last step, for `rewind`."""
        self._probe: Probe | None = None

    # Called by the training thread.

    @property
    def interval(self) -> int | None:
        """The number of steps in which `take` yields every element once; None: never."""
        return None if self._sums is None else self._sums.interval

    def track(self, interval: int | None, owner: object) -> None:
        """Set `interval`. All ranks must do it between the same steps.

        An optimizer calls it in each step, with None if it needs no squares. Only this owner's own
        earlier wish is looked at, since the moment when others are deleted differs between ranks.
        """
        before = self._asked.get(owner, 0)
        self._asked[owner] = interval
        now = self.interval
        if interval == now or interval is before is None:  # others may still need squares
            return
        if interval == before and now is not None:
            raise ValueError(
                f"two optimizers of one model have a refresh_interval of {interval} and of {now}: "
                "give them the same"
            )
        self._run(lambda: self._begin(interval))

    @property
    def totals(self) -> Mapping[str, float]:
        """See `SquareSums.totals`; empty before the first round is over."""
        return {} if self._sums is None else self._sums.totals

    @property
    def probe(self) -> Probe | None:
        """The probe of the last step; None without an `interval`."""
        if self._probe is not None:
            keep_for_this_stream(self._probe.average)
        return self._probe

    def take(self, names: Collection[str]) -> list[Squares]:
        """The squares of these parameters that have become known since the last call."""
        keys = [key for key in self._found if key[0] in names]
        found = [self._found.pop(key) for key in keys]
        for part in found:
            keep_for_this_stream(part.values)
        return found

    # Called by the communication thread.

    def observe(self, bucket: Bucket, factor: float) -> None:
        """A bucket's gradients are about to be reduced."""
        if self._sums is not None and not bucket.reduction.dense:
            self._sums.observe(bucket, factor)

    def advance(self, sparse: Collection[str], unused: Collection[str], scale: float) -> None:
        """The step was committed. Collective if it was sparse.

        Args:
            sparse: parameters whose average was sparse.
            unused: parameters that had no gradient on any rank.
            scale: of the averages.
        """
        self._before = self._sums, dict(self._found)
        if self._sums is None or self._buckets[0].small:
            return
        if sparse:
            known = self._sums.advance(unused)
            self._found |= {(part.name, part.start): part for part in known}
        elif self._sums.begun:  # dense again
            self._begin(self._sums.interval)
        compressed = [
            (slot.numel, slot.name, bucket)
            for bucket in self._buckets
            if not bucket.small
            for slot in bucket.slots
        ]
        _, name, bucket = min(compressed, key=lambda found: found[0])
        self._probe = Probe(name, bucket.gradients[name] / scale)

    def forget_probe(self) -> None:
        """A new step ends; its averages may not come."""
        self._probe = None

    def settle(self) -> None:
        """The step has ended, committed or not."""
        if self._sums is not None:
            self._sums.settle()

    def rewind(self, sparse: Collection[str]) -> None:
        """Exchange the present with the state before the last step. Twice changes nothing."""
        now = self._sums, self._found
        (self._sums, self._found), self._before = self._before, now
        if self._sums is not None and sparse:
            self._sums.rewind()

    def close(self) -> None:
        """Let go of all tensors."""
        self._sums, self._probe, self._before = None, None, (None, {})
        self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the sums are in `squares`."""
        return {
            "counters": {} if self._sums is None else self._sums.state_dict(),
            "steps": dict(self.steps),
            "ratio": dict(self.ratios),
            "clipping": list(self.clipping),
        }

    def squares(self) -> dict[str, Tensor]:
        """This rank's sums by parameter, in their shapes."""
        return {} if self._sums is None else self._sums.squares()

    def load(self, saved: Mapping[str, Any], squares: Mapping[str, Tensor]) -> None:
        """Continue where a state was taken."""
        self.steps, self.ratios = dict(saved["steps"]), dict(saved["ratio"])
        self.clipping, self._probe = list(saved["clipping"]), None
        self._found.clear()
        theirs = saved["counters"].get("interval")
        self._begin(self.interval or theirs)
        if self._sums is not None and self._sums.interval == theirs:
            self._sums.load(saved["counters"], squares)

    def _begin(self, interval: int | None) -> None:
        self._sums = (interval and SquareSums(self._buckets, interval, self._transport)) or None


NOTHING: dict[str, Any] = {"counters": {}, "steps": {}, "ratio": {}, "clipping": []}
"""The saved state of a reducer without second moments."""


def keep_for_this_stream(tensor: Tensor) -> None:
    """The communication thread's stream must not reuse the memory before this one is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
