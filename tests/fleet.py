"""All ranks of a fixed-size step in one process: exchanges are copies. It compares kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from oktopk.kernels import numbers
from oktopk.kernels.plan import (
    LOCAL,
    REGIONS,
    TOTAL,
    Plan,
    Vectors,
    rooms,
)
from oktopk.kernels.reference.step import Step
from oktopk.wire.codecs import CODECS


def plan_of(
    numel: int,
    size: int,
    rank: int,
    k: int,
    span: int,
    parts: tuple[int, ...],
    wire: str = "int8",
    dtype: torch.dtype = torch.float32,
    capacity: float = 1.15,
    rider: int = 0,
) -> Plan:
    """A plan as Ok-Topk makes it."""
    share, everything = k / size, k == numel
    most = math.ceil(min(span, capacity * share + 2 * math.sqrt(share)))
    most = max(1, span if everything else most)
    codec = CODECS[wire](dtype)
    code, values_at, positions_at, room = rooms(
        codec, most, max(1, span), numbers.index_dtype(numel).itemsize
    )
    wanted = min(numel, math.ceil(k * 1.1))
    return Plan(
        numel, size, rank, k, min(numel, math.ceil(1.2 * k)), wanted, most,
        math.ceil(0.9 * share), math.ceil(wanted / size), max(1, span), code, values_at,
        positions_at, room, room + rider, parts, codec,
    )  # fmt: skip


@dataclass
class Fleet:
    """P ranks, and their state from step to step.

    Args:
        kind: the kernels' Step, or that of each rank.
        gradient_dtype: of gradients and averages.
        rider: bytes that travel with each message.
    """

    kind: type[Step] | Sequence[type[Step]]
    numel: int
    size: int
    k: int
    parts: tuple[int, ...]
    wire: str = "int8"
    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype | None = None
    momentum: float = 0.0
    capacity: float = 1.15
    boundaries: list[int] = field(default_factory=list)
    device: str = "cpu"
    rider: int = 0

    def __post_init__(self) -> None:
        self.gradient_dtype = self.gradient_dtype or self.dtype
        self.boundaries = self.boundaries or [
            self.numel * j // self.size for j in range(self.size + 1)
        ]
        infinity = numbers.infinity(self.dtype)
        thresholds = [infinity, 0, infinity, 0]
        self.states = [[*thresholds, *self.boundaries] for _ in range(self.size)]
        self.residuals = [
            torch.zeros(self.numel, dtype=self.dtype, device=self.device) for _ in range(self.size)
        ]
        self.velocities = [
            torch.zeros(self.numel, dtype=self.dtype, device=self.device) for _ in range(self.size)
        ]
        self.steps: list[Step] = []

    def begin(
        self,
        gradients: Sequence[Tensor],
        factor: float = 1.0,
        scale: float = 1.0,
        least: int | None = None,
    ) -> None:
        """Phase 1 of all ranks, and the first exchange."""
        self.scale = scale
        boundaries = self.states[0][4:]
        span = max(b - a for a, b in pairwise(boundaries))
        self.steps, self.vectors = [], []
        for rank, gradient in enumerate(gradients):
            plan = plan_of(
                self.numel, self.size, rank, self.k, span, self.parts, self.wire, self.dtype,
                self.capacity, self.rider,
            )  # fmt: skip
            kind = self.kind if isinstance(self.kind, type) else self.kind[rank]
            step = kind(plan, self.dtype, torch.device(self.device))
            step.before[LOCAL : REGIONS + self.size + 1] = torch.tensor(self.states[rank])
            flat = gradient.to(self.device, self.gradient_dtype)
            with_momentum = self.momentum > 0
            vectors = Vectors(
                list(flat.split(list(self.parts))),
                list(torch.full_like(flat, 7.0).split(list(self.parts))),
                self.residuals[rank],
                torch.full_like(self.residuals[rank], 5.0),
                factor,
                scale,
                self.momentum,
                self.velocities[rank] if with_momentum else None,
                torch.empty_like(self.residuals[rank]) if with_momentum else None,
            )
            least_now = math.ceil(0.9 * self.k) if least is None else least
            step.prepare(vectors, least_now, 1000)
            self.steps.append(step)
            self.vectors.append(vectors)
        for rank, step in enumerate(self.steps):
            for source, other in enumerate(self.steps):
                step.received[source] = other.send[rank]

    def combine(self) -> None:
        """Phase 2 of all ranks, and the second exchange."""
        for step in self.steps:
            step.combine()
        for step in self.steps:
            for source, other in enumerate(self.steps):
                step.gathered[source] = other.reply

    def apply(self) -> list[Tensor]:
        """Phase 3 of all ranks. Returns each rank's averages, and keeps the state."""
        for rank, (step, vectors) in enumerate(zip(self.steps, self.vectors, strict=True)):
            step.apply(vectors)
            self.residuals[rank] = vectors.values
            if vectors.velocity_after is not None:
                self.velocities[rank] = vectors.velocity_after
            self.states[rank] = step.after.tolist()[LOCAL : REGIONS + self.size + 1]
        return [torch.cat(list(vectors.out)) for vectors in self.vectors]

    def run(self, gradients: Sequence[Tensor], factor: float = 1.0, scale: float = 1.0,
            least: int | None = None) -> list[Tensor]:  # fmt: skip
        """A whole step."""
        self.begin(gradients, factor, scale, least)
        self.combine()
        return self.apply()

    def records(self) -> list[list[int]]:
        return [step.after.tolist() for step in self.steps]


__all__ = ["TOTAL", "Fleet", "plan_of"]
