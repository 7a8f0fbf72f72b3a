"""The phases of a fixed-size step as chains of Triton kernels; `reference/step.py` specifies them.

Grids depend on the plan alone, and all memory is there before the first launch. Nothing here waits
for the device or copies from it.
"""

from __future__ import annotations

import torch

from ..plan import REGIONS, Vectors
from . import launching
from .launching import blocks
from .loops import dense, reading, recording
from .passes import Passes

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of gradients that have kernels."""


class GpuStep(Passes):
    """Residuals are float32 and wires int8 or int4. For others the reference's phases run."""

    def prepare(self, vectors: Vectors, least: int, point: int) -> None:
        if not self._supports(vectors):
            return super().prepare(vectors, least, point)
        with self._on_device():
            plan, rank = self.plan, self.plan.rank
            self._shared.zero_()
            self._accumulate(vectors)
            self._run(
                recording.begin_offer, self.before, self._shared, self._state, plan.numel, plan.k,
                least, EVERYTHING=plan.everything,
            )  # fmt: skip
            self._select(
                vectors.values, None, self._state, plan.numel, plan.aim, self._chosen,
                self._chosen_values, plan.k,
            )  # fmt: skip
            self._run(
                recording.begin_rows, self._state, self._rows, self._chosen, self._boundaries(),
                plan.size, plan.most, RANKS=self._ranks, STEPS=self._steps,
            )  # fmt: skip
            self._indices.zero_()
            self._select(
                self._chosen_values, self._chosen, self._rows, self._row_most, 0, self._indices,
                self._exact, plan.most,
            )  # fmt: skip
            # What is not written stays zero.
            self.send[:rank, : plan.room].zero_()
            self.send[rank + 1 :, : plan.room].zero_()
            self._run(
                recording.record_offer, self.before, self.after, self._shared, self._state,
                self._rows, self._counts, self.send.view(torch.int64), plan.what, point, plan.aim,
                rank, plan.size, plan.stride // 8, RANKS=self._ranks,
            )  # fmt: skip
            self._write(
                self.send, plan.size, self._indices, self._counts, self._sent, self._boundaries(),
                rank, errors=False,
            )  # fmt: skip

    def combine(self) -> None:
        if not self._width:
            return super().combine()
        with self._on_device():
            plan, rank, size = self.plan, self.plan.rank, self.plan.size
            region = self._boundaries()[rank:]
            self._read_messages(self.received, region, 0)
            self._run(
                recording.judge_offers, self.after, self.received.view(torch.int64), self._checks,
                self._bits, self._faults, self._counts, self._there, plan.what, plan.most, rank,
                size, plan.stride // 8, RANKS=self._ranks,
            )  # fmt: skip
            self._sums.zero_()
            for source in range(size):
                own = source == rank
                self._blocks(
                    dense.add_entries, plan.most, 1,
                    (self._indices if own else self._read)[source],
                    (self._sent if own else self._read_values)[source],
                    self._there[source:], region, self._sums, plan.most, plan.span,
                )  # fmt: skip
            self._blocks(
                dense.measure, plan.span, 1, self._sums, self.before, self._shared, plan.span,
                EVERYTHING=plan.everything,
            )  # fmt: skip
            self._run(
                recording.begin_sums, self.before, self.after, self._shared, self._state, region,
                plan.span, plan.most, min(plan.share, plan.most), plan.fewest,
                EVERYTHING=plan.everything,
            )  # fmt: skip
            self._mine.copy_(region[0])
            self._select(
                self._sums, None, self._state, plan.span, 0, self._mine, self._exact[0], plan.most
            )
            self.reply[: plan.room].zero_()
            reply = self.reply[None]
            self._run(
                recording.record_sums, self.after, self._shared, self._state, self._counts,
                reply.view(torch.int64), plan.what, rank, size,
            )  # fmt: skip
            self._write(
                reply, 1, self._mine, self._counts[size:], self._errors, region, -1, errors=True
            )

    def apply(self, vectors: Vectors) -> None:
        if not self._supports(vectors):
            return super().apply(vectors)
        with self._on_device():
            plan, size, applied = self.plan, self.plan.size, self._chosen
            self._read_messages(self.gathered, self._boundaries(), 1)
            self._run(
                recording.judge_replies, self.after, self._shared, self._state,
                self.gathered.view(torch.int64), self._checks, self._bits, self._faults,
                self._there, plan.what, plan.most, plan.k, plan.rank, size, plan.stride // 8,
                RANKS=self._ranks,
            )  # fmt: skip
            self._blocks(
                reading.settle, plan.most, size, self._read_values, self._there, self._shared,
                plan.most,
            )  # fmt: skip
            self._select(
                self._read_values, self._read, self._state, size * plan.most, plan.wanted, applied,
                self._chosen_values, plan.k,
            )  # fmt: skip
            self._run(
                recording.record_totals, self.before, self.after, self._shared, self._state,
                applied, plan.k, plan.wanted, size, RANKS=self._ranks, EVERYTHING=plan.everything,
            )  # fmt: skip
            launching.launch(
                recording.cut_parts, (blocks(len(plan.parts) + 1, 128),), applied, self._state,
                self._stops, self._bounds, self.after[REGIONS + 1 + 2 * size :], len(plan.parts),
                STEPS=self._steps, BLOCK=128,
            )  # fmt: skip
            self._leave(vectors)
            self._deliver(vectors)

    def _supports(self, vectors: Vectors) -> bool:
        """Whether there are kernels for these vectors."""
        kinds = {part.dtype for part in (*vectors.gradient, *vectors.out)}
        flat = all(part.is_contiguous() for part in (*vectors.gradient, *vectors.out))
        both = (vectors.velocity is None) == (vectors.velocity_after is None)
        return self._width > 0 and kinds <= set(KINDS) and flat and both

    def _accumulate(self, vectors: Vectors) -> None:
        """values = residual + gradient, part by part."""
        if not self._supports(vectors):
            return super()._accumulate(vectors)
        start, values, velocity = 0, vectors.values, vectors.velocity
        after = vectors.velocity_after
        for part, count in zip(vectors.gradient, self.plan.parts, strict=True):
            if count > 0:
                self._blocks(
                    dense.accumulate, count, 1, part, vectors.residual, values,
                    values if velocity is None else velocity, values if after is None else after,
                    self.before, self._shared, start, count, float(vectors.factor),
                    float(vectors.momentum), EVERYTHING=self.plan.everything,
                    MOMENTUM=velocity is not None,
                )  # fmt: skip
            start += count

    def _leave(self, vectors: Vectors) -> None:
        """What is applied leaves the residual, and errors stay there."""
        plan, values, velocity = self.plan, vectors.values, vectors.velocity_after
        for rows, index, amounts, counts, ends in (
            (plan.size, self._indices, self._sent, self._counts, velocity is not None),
            (1, self._mine, self._errors, self._counts[plan.size :], False),
        ):
            self._blocks(
                dense.clear_entries, plan.most, rows, values,
                values if velocity is None else velocity, index, amounts, counts, self._chosen,
                self._state, plan.most, MOMENTUM=ends, STEPS=self._steps,
            )  # fmt: skip
        kind, scale = vectors.out[0].dtype, float(vectors.scale)
        # float32 has no errors to keep, and then a scale of zero is fine.
        undone = 1.0 if kind == torch.float32 else float(plan.size / scale)
        self._blocks(
            dense.average, plan.k, 1, values, self._chosen, self._chosen_values, self._averages,
            self._state, plan.k, float(plan.size), scale, undone, float(torch.finfo(kind).max),
            plan.rank, plan.size, ROUNDED=kind != torch.float32, BFLOAT=kind == torch.bfloat16,
            SCALED=scale != 1.0,
        )  # fmt: skip

    def _deliver(self, vectors: Vectors) -> None:
        """Averages are written, part by part."""
        start = 0
        for number, (part, count) in enumerate(zip(vectors.out, self.plan.parts, strict=True)):
            if count > 0:
                self._blocks(dense.blank, count, 1, part, self.after, count)
                self._blocks(
                    dense.scatter, min(count, self.plan.k), 1, part, self._chosen, self._averages,
                    self._bounds[number:], self.after, start, count,
                )  # fmt: skip
            start += count
