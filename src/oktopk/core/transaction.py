"""Transaction: one step of all buckets, committed whole or not at all.

Gradients arrive in any number of pieces. A bucket is reduced as soon as it is complete. When the
last gradient has come, the rest is reduced, and then all buckets are committed, or all skipped, or
nothing has changed and all ranks raise.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .buckets import Bucket, Options
from .chooser import Chooser
from .events import Events
from .inspector import Inspector
from .moments import SecondMoments
from .reduction import Attempt
from .stats import StepStats, together
from .transport import Operation, Rider, Transport, point_of
from .usage import Usage

log = logging.getLogger("oktopk")

_LEFT_OUT = 1 << 16
"""Counts a rank on which a tensor was left out, in a sum that counts those that have it."""
_MOST_RIDING = 1 << 20
"""Bytes of small parameters that ride along. More of them would be copied and kept several times,
to save one message that takes long anyway."""


@dataclass(frozen=True)
class Arrival:
    """Gradients that a front end has submitted; see `AllReducer.submit`."""

    gradients: Mapping[str, Tensor]
    last: bool
    absent: Collection[str] | None
    has_data: bool | None


class Transaction:
    """The step that is under way, and facts about the last one.

    Only the communication thread calls its methods.

    Args:
        buckets: of all slots; the small ones come last.
        transport: for messages that belong to no bucket.
        name: of the reducer, the same on all ranks.
        may_be_unused: see `AllReducer`.
        may_be_left_out: see `AllReducer`.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        transport: Transport,
        name: str,
        options: Options,
        events: Events,
        usage: Usage,
        *,
        may_be_unused: bool,
        may_be_left_out: bool,
    ) -> None:
        self.skipped = False
        """Whether the last step was skipped because of a NaN or Inf."""
        self.unused: frozenset[str] = frozenset()
        """Tensors without a gradient on any rank in the last step (with `may_be_unused`)."""
        self.sparse: frozenset[str] = frozenset()
        """Tensors whose average was sparse in the last step."""
        self.moments: SecondMoments | None = None
        self.inspector: Inspector | None = None
        """Looks into steps, if somebody asked for it."""
        self.chooser: Chooser | None = None
        """Decides what large buckets run, with an `Auto`."""
        self.bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
        self._numel = {slot.name: slot.numel for bucket in buckets for slot in bucket.slots}
        self._buckets, self._transport, self._name = buckets, transport, name
        self._options, self._events, self._usage = options, events, usage
        self._scaler = options.scaler
        self._may_be_unused = may_be_unused or may_be_left_out
        self._may_be_left_out = may_be_left_out
        self._used: dict[str, int] = {}
        self._open = False
        """Whether gradients of this step have come."""
        self._since = 0.0
        """When the first of them came, by time.perf_counter."""
        self._has_data: bool | None = None
        self._weight = 1.0
        """Turns an average over all ranks into one over those that have data."""

    def clear(self) -> None:
        """The step has ended, or will not be completed."""
        if self.moments is not None:
            self.moments.settle()
        self._open = False
        for bucket in self._buckets:
            bucket.gradients, bucket.attempt = {}, None

    def undecided(self) -> bool:
        """Whether nobody has used the last averages yet, and their step can be taken back."""
        return not self._usage.stepped and all(
            bucket.reduction.can_rewind for bucket in self._buckets
        )

    def rewind(self) -> None:
        """Exchange the present with the state before the last step."""
        for bucket in self._buckets:
            bucket.reduction.rewind()
        if self.moments is not None:
            self.moments.rewind(self.sparse)
        if self.inspector is not None:
            self.inspector.rewind()
        if self.chooser is not None:
            self.chooser.rewind()

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._buckets[0].reduction.steps

    def zero(self, gradients: Mapping[str, Tensor]) -> None:
        """After an error: gradients are neither averages nor equal on all ranks, so nobody may
        step with them by mistake. These, and those that came before them in the step."""
        for parts in (gradients, *(bucket.gradients for bucket in self._buckets)):
            for gradient in parts.values():
                gradient.zero_()

    def take(self, arrival: Arrival) -> None:
        """Gradients have come. Complete buckets are reduced at once."""
        self._has_data, absent = arrival.has_data, arrival.absent
        if not self._open:
            self._meet()
        overlap = self._options.norm_clip is None
        for name, gradient in arrival.gradients.items():
            if gradient.numel() == 0:
                continue
            if name not in self.bucket_of:
                raise ValueError(
                    f"a gradient came for {name}, which could not be trained when compression was "
                    "attached: attach it after setting requires_grad"
                )
            if gradient.shape != (self._numel[name],):
                raise ValueError(
                    f"the gradient of {name} has the shape {tuple(gradient.shape)}, but must be "
                    f"flat, with {self._numel[name]} elements"
                )
            bucket = self.bucket_of[name]
            bucket.gradients[name] = gradient
            if self._may_be_unused:
                self._used[name] = bool(gradient.any()) if absent is None else name not in absent
            if overlap and bucket.complete and not bucket.small and bucket is not self._carrier():
                self._begin(bucket, self._factor())
        if arrival.last:
            self._finish()

    def _factor(self) -> float:
        """The factor of a gradient when it enters."""
        return 1.0 / self._scale()

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _clipping_factor(self) -> float:
        """At most 1: brings the norm of this rank's gradient down to `norm_clip`."""
        limit = self._options.norm_clip
        if limit is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            for bucket in self._buckets
            for gradient in bucket.gradients.values()
        ]
        norm = float(torch.stack(norms).norm()) / self._scale()
        # A NaN or Inf is for the reduction to find, on all ranks at once.
        return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def _meet(self) -> None:
        """The first gradients have come. All ranks must be at the same point: sizes of messages
        depend on it. They compare this now, while backward goes on, and not at its end."""
        self._open, self._since = True, time.perf_counter()
        self._transport.reset()
        self._transport.point = self._point(None)
        self._transport.meet()
        if self.chooser is not None:
            running = self.chooser.begin(self._buckets[0].reduction.taken, self._transport)
            for bucket in self._buckets:
                if not bucket.small:
                    bucket.reduction.run(running)
        self._weight = 1.0
        if self._has_data is not None:
            rows = self._transport.trade_numbers([[self._has_data]] * self._transport.size)
            self._weight = self._transport.size / sum(row[0] for row in rows)
        self._transport.point = None

    def _point(self, bucket: Bucket | None) -> int:
        interval = None if self.moments is None else self.moments.interval
        number = -1 if bucket is None else self._buckets.index(bucket)
        return point_of(Operation.STEP, self.step, (self._name, number, interval))

    def _carrier(self) -> Bucket | None:
        """The last large bucket: the small parameters ride along in its messages, so it begins when
        they have come. None if there are none, of several types, or too many."""
        left = [bucket for bucket in self._buckets if bucket.attempt is None]
        large, small = ([b for b in left if b.small is kind] for kind in (False, True))
        if not len(large) == len(small) == 1:
            return None
        return large[0] if small[0].reduction.residual.nbytes <= _MOST_RIDING else None

    def _begin(self, bucket: Bucket, factor: float, rider: Rider | None = None) -> None:
        self._usage.stepped = True  # the step before can no longer be taken back
        if self.moments is not None:
            self.moments.observe(bucket, factor)
        parts = [bucket.gradients[slot.name] for slot in bucket.slots]
        if self.inspector is not None:
            self.inspector.before(bucket, parts, factor)
        scale = self._scale() * self._weight
        bucket.attempt = bucket.reduction.attempt(
            parts, parts, factor, scale, self._point(bucket), rider
        )

    def _begin_small(self, bucket: Bucket, carrier: Bucket, factor: float) -> None:
        """Begin the last large bucket, and in its messages the small parameters."""
        if self.moments is not None:
            self.moments.observe(bucket, factor)
        parts = [bucket.gradients[slot.name] for slot in bucket.slots]
        if self.inspector is not None:
            self.inspector.before(bucket, parts, factor)
        scale = self._scale() * self._weight
        bucket.attempt = bucket.reduction.attempt_on_the_way(
            parts, factor, scale, self._point(bucket), partial(self._begin, carrier, factor)
        )

    def _finish(self) -> None:
        """End the step: reduce the remaining buckets, then commit all or nothing."""
        self.unused = frozenset()
        if self.moments is not None:
            self.moments.forget_probe()
        self._put_zeros()
        factor = self._factor() * self._clipping_factor()
        while left := [bucket for bucket in self._buckets if bucket.attempt is None]:
            carrier = self._carrier()
            if carrier is left[0]:
                self._begin_small(left[1], carrier, factor)
            else:
                self._begin(left[0], factor)
        attempts = [(b, b.attempt) for b in self._buckets if b.attempt is not None]
        sparse = [bucket for bucket, attempt in attempts if attempt.sparse]
        self.sparse = frozenset(slot.name for bucket in sparse for slot in bucket.slots)
        self.skipped = not all(attempt.finite for _, attempt in attempts)
        self._usage.leave_out = False
        if not self.skipped:
            self._commit(attempts)
        elif self._scaler is not None or self._options.nonfinite == "skip":
            self._skip(attempts)
        else:
            self._blame(attempts)
        stats = self._report()
        if self.chooser is not None and not self.skipped:
            self.chooser.note(time.perf_counter() - self._since, stats)

    def _commit(self, attempts: Sequence[tuple[Bucket, Attempt]]) -> None:
        self._find_unused()
        for bucket, attempt in attempts:
            bucket.reduction.commit(attempt)
            bucket.applied = [a + b for a, b in zip(bucket.applied, attempt.applied, strict=True)]
            if not self.sparse:
                bucket.dense_steps += 1
        self._give_back_unused(attempts)
        if self.moments is not None:
            self.moments.advance(self.sparse, self.unused, self._scale())
        self._usage.stepped = self._usage.stepping

    def _skip(self, attempts: Sequence[tuple[Bucket, Attempt]]) -> None:
        """A NaN or Inf somewhere: all ranks leave the step out."""
        for bucket, attempt in attempts:
            bucket.reduction.skip(attempt, 0.0 if self._scaler is None else math.nan)
        self._usage.leave_out = self._scaler is None
        skipped = self._events.totals.skipped_steps + 1
        if self._scaler is None and skipped & (skipped - 1) == 0 and self._transport.rank == 0:
            log.warning(
                "step %d is skipped, a gradient has a NaN or Inf; so far %d of %d steps were",
                self.step - 1,
                skipped,
                self._events.totals.steps + 1,
            )

    def _put_zeros(self) -> None:
        """Take zeros for tensors that have not come."""
        missing = [s for b in self._buckets for s in b.slots if s.name not in b.gradients]
        if missing and not self._may_be_left_out:
            raise ValueError(
                f"no gradient came for {', '.join(slot.name for slot in missing[:5])}: was "
                "requires_grad changed between DistributedDataParallel() and attach()? Attach "
                "right after"
            )
        for slot in missing:
            zeros = torch.zeros(slot.numel, dtype=slot.dtype, device=slot.device)
            self.bucket_of[slot.name].gradients[slot.name] = zeros
            self._used[slot.name] = _LEFT_OUT

    def _find_unused(self) -> None:
        """Agree on the parameters that no rank had a gradient for."""
        if not self._may_be_unused:
            return
        names = list(self.bucket_of)
        used = torch.tensor(
            [self._used[name] for name in names],
            dtype=torch.int32,
            device=self._transport.device,
        )
        self._transport.all_reduce(used)
        flags = dict(zip(names, used.tolist(), strict=True))
        torn = [name for name, flag in flags.items() if flag > _LEFT_OUT and flag % _LEFT_OUT]
        if torn:
            raise ValueError(
                f"DDP has left out {', '.join(torn[:5])} on some ranks, but others have a gradient "
                "for it, so replicas would drift apart: skip_all_reduce_unused_params=True needs "
                "the same unused parameters on all ranks; build DDP without it"
            )
        self.unused = frozenset(name for name, flag in flags.items() if not flag % _LEFT_OUT)

    def _give_back_unused(self, attempts: Sequence[tuple[Bucket, Attempt]]) -> None:
        """Nobody applies the average of an unused tensor, so it goes back to the residual."""
        scale = self._scale() * self._weight
        for bucket, attempt in attempts:
            for index, slot in enumerate(bucket.slots):
                if slot.name in self.unused:
                    bucket.reduction.give_back(attempt, index, scale)

    def _blame(self, attempts: Sequence[tuple[Bucket, Attempt]]) -> None:
        """Raise, on all ranks, with where the NaN or Inf came from."""
        bad = [(b, attempt.acc.nonfinite_parts()) for b, attempt in attempts if not attempt.finite]
        names = [bucket.slots[index].name for bucket, parts in bad for index in parts or ()]
        known = all(parts is not None for _, parts in bad)
        guilty = bool(names) if names or known else None
        self._transport.blame(self.step, guilty, ", ".join(names[:5]))

    def _report(self) -> StepStats:
        lasts = []
        for bucket in self._buckets:
            assert bucket.reduction.last is not None
            bucket.totals.add(bucket.reduction.last)
            lasts.append(bucket.reduction.last)
        stats = together(lasts)
        stats = dataclasses.replace(
            stats,
            bytes_sent=stats.bytes_sent + self._transport.bytes_sent,
            bytes_received=stats.bytes_received + self._transport.bytes_received,
            messages=stats.messages + self._transport.messages,
        )
        if self.inspector is not None and not self.skipped:
            self.inspector.after()  # first: a subscriber may take the step back
        self._events.report(stats)
        return stats
