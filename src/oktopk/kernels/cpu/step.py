"""A fixed-size step on a CPU: one compiled loop for each phase."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import numbers
from ..plan import Plan, Vectors
from ..reference.step import Step
from .arrays import as_bits
from .compiling import steps_compiled
from .form import AS_BFLOAT16, AS_FLOAT16, AS_RESIDUAL, WIRES, form_of
from .threads import parallel

_NO_PIECES = np.empty((0, 3), np.int64)
_Scratch = tuple[Any, Any, Any]
"""Indices, values, and the bits of values."""


class _Room(threading.local):
    """Scratch memory of a thread. Pages that were never written to never become real memory."""

    def __init__(self) -> None:
        self.arrays: dict[Any, _Scratch] = {}


_room = _Room()


class CpuStep(Step):
    """The reference documents it. Its methods run where loops do not know the codec or the types
    of the vectors; both use the same memory."""

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(plan, dtype, device)
        self._known = plan.codec.number in WIRES
        if not self._known:
            return
        kind = numbers.index_dtype(plan.numel)
        self._kind, self._loops = (dtype, kind), steps_compiled[dtype, kind]
        self._form = form_of(plan, dtype)
        self._scratch_size = self._form.scratch
        self._wide = plan.size * plan.most + plan.k > plan.numel // 2
        """Whether sums and averages take much scratch memory."""
        self._records = self.before.numpy(), self.after.numpy()
        self._offered = self._indices.numpy(), self._sent.numpy(), self._counts.numpy()
        self._messages = self.send.numpy(), self.received.numpy(), self.gathered.numpy()
        self._own = self.reply.numpy(), self._mine.numpy(), self._errors.numpy()
        self._ends = self._stops[1:].numpy()
        self._kinds = {
            torch.bfloat16: AS_BFLOAT16,
            torch.float16: AS_FLOAT16,
            dtype: AS_RESIDUAL,
        }

    def prepare(self, vectors: Vectors, least: int, point: int) -> None:
        at = self._addresses(vectors, vectors.gradient)
        if at is None:
            super().prepare(vectors, least, point)
            return
        form, records, scratch = self._form, self._records, self._scratch()
        how = at, self._ends, self._kinds[vectors.gradient[0].dtype], float(vectors.factor)
        momentum, pieces = float(vectors.momentum), _NO_PIECES
        if torch.get_num_threads() > 1:
            find, before = self._loops["find"], records[0]
            found = parallel(
                lambda low, high: find(form, before, *how, momentum, low, high, *scratch),
                form.numel,
            )
            pieces = np.array(found, np.int64)
        used = self._loops["prepare"](
            form, *records, *how, momentum, least, point, pieces,
            *self._offered, self._messages[0], *scratch,
        )  # fmt: skip
        if used > form.numel // 4:
            self._let_go()

    def combine(self) -> None:
        if not self._known:
            super().combine()
            return
        self._loops["combine"](
            self._form, *self._records, *self._offered, self._messages[1], *self._own,
            *self._scratch(),
        )  # fmt: skip

    def apply(self, vectors: Vectors) -> None:
        at = self._addresses(vectors, vectors.out)
        if at is None:
            super().apply(vectors)
            return
        form, scratch, loops = self._form, self._scratch(), self._loops
        kind, ends = self._kinds[vectors.out[0].dtype], self._ends
        alone = torch.get_num_threads() == 1
        count = loops["apply"](
            form, *self._records, at, ends, kind, float(vectors.scale), int(alone),
            *self._offered, self._messages[2], *self._own[1:], *scratch,
        )  # fmt: skip
        if count >= 0 and not alone:
            write = loops["write_parts"]
            parallel(
                lambda low, high: write(form, at, ends, kind, low, high, count, *scratch),
                form.numel,
            )
        if self._wide:
            self._let_go()

    def _let_go(self) -> None:
        """Much of the scratch memory has become real, so free it."""
        _room.arrays.pop(self._kind, None)

    def _addresses(self, vectors: Vectors, parts: Sequence[Tensor]) -> Any:
        """Where vectors and parts are; None if loops do not know such ones."""
        if not self._known:
            return None
        whole, none = [vectors.residual, vectors.values], [0, 0]
        if vectors.velocity is not None and vectors.velocity_after is not None:
            whole, none = [*whole, vectors.velocity, vectors.velocity_after], []
        elif vectors.velocity is not vectors.velocity_after:
            return None
        kind, shapes = parts[0].dtype, [part.shape for part in parts]
        fits = (
            kind in self._kinds
            and {part.dtype for part in parts} == {kind}
            and {vector.dtype for vector in whole} == {self.dtype}
            and {vector.shape for vector in whole} == {(self.plan.numel,)}
            and shapes == [(size,) for size in self.plan.parts]
            and all(map(Tensor.is_contiguous, [*whole, *parts]))
        )
        if not fits:
            return None
        addresses = list(map(Tensor.data_ptr, whole))
        return np.array([*addresses, *none, *map(Tensor.data_ptr, parts)], np.int64)

    def _scratch(self) -> _Scratch:
        """It is free again when a phase ends."""
        arrays = _room.arrays.get(self._kind)
        if arrays is None or arrays[0].size < self._scratch_size:
            dtype, kind = self._kind
            size = self._scratch_size
            indices = torch.empty(size, dtype=kind, device="cpu").numpy()
            values = torch.empty(size, dtype=dtype, device="cpu").numpy()
            arrays = _room.arrays[self._kind] = indices, values, as_bits(values)
        return arrays
