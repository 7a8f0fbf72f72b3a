"""What happened in one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("accumulate", "select", "exchange", "reduce", "gather", "apply")


@dataclass(frozen=True)
class StepStats:
    """One step as one rank saw it. All numbers are finite, on dense and skipped steps too."""

    step: int
    """Number of this step, from 0."""
    phase: str
    """`dense` (warm-up, or the dense algorithm) or `sparse`."""
    numel: int
    """Elements of the gradient."""
    target: int
    """k, the number of entries asked for."""
    selected_local: int
    """Entries this rank offered."""
    selected_global: int
    """Entries applied, the same on every rank."""
    bytes_sent: int
    """Bytes this rank handed to torch.distributed, all of them; see transport.py."""
    bytes_received: int
    messages: int
    seconds: dict[str, float]
    """Seconds of each stage. Where one pass accumulates and selects, it counts as accumulate."""
    local_threshold: float
    """Magnitude that all entries this rank offered reach; 0 on dense steps."""
    global_threshold: float
    """Magnitude that all applied sums over ranks reach; 0 where there is no such limit."""
    skipped: bool = False
    """True if some rank had a NaN or Inf and the step was skipped (`nonfinite="skip"`)."""

    @property
    def density(self) -> float:
        """Share of elements applied."""
        return self.selected_global / self.numel

    @property
    def sparsity(self) -> float:
        return 1.0 - self.density

    @property
    def compression_ratio(self) -> float:
        """Elements per applied entry; the number of elements where none was applied."""
        return self.numel / max(1, self.selected_global)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        derived = ("density", "sparsity", "compression_ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class Stopwatch:
    """Seconds of each stage; a stage entered inside another is not counted twice."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stage: str | None = None
        self._since = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer = self._stage
        self._switch(stage)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, stage: str | None) -> None:
        now = time.perf_counter()
        if self._stage is not None:
            self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now
