"""What is measured in a run: sums over steps, the parts of a step, memory."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch

from ..core.stats import StepStats
from .records import StepRecord

PARTS = ("data", "forward", "backward", "synchronise", "update", "total")


@dataclass
class Sums:
    """What has been added up over steps. Saved, so that a resumed run reports all of itself."""

    steps: int = 0
    sparse_steps: int = 0
    loss: float = 0.0
    sparsity: float = 0.0
    sparse_sparsity: float = 0.0
    """Of the sparse steps only."""
    elements: int = 0
    applied: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    data: float = 0.0
    """Seconds of waiting for batches."""

    def add(self, record: StepRecord, stats: StepStats) -> None:
        sparse = record.phase == "sparse"
        self.steps += 1
        self.sparse_steps += sparse
        self.loss += record.loss
        self.sparsity += record.sparsity
        self.sparse_sparsity += record.sparsity if sparse else 0.0
        self.elements += stats.numel
        self.applied += stats.selected_global
        self.bytes_sent += record.bytes_sent
        self.seconds += record.seconds["total"]
        self.data += record.seconds["data"]

    @property
    def compression_ratio(self) -> float:
        return self.elements / max(1, self.applied)


class Watch:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def lap(self, part: str) -> float:
        """The time since the last lap belongs to this part; returns the time now."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self.seconds["total"] += now - self._since
        self._since = now
        return now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Some of what was counted as one part belongs to another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def memory(device: torch.device) -> dict[str, float]:
    """Megabytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    megabytes = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6}
    if device.type == "cuda":
        megabytes["allocated"] = torch.cuda.memory_allocated(device) / 1e6
        megabytes["max_allocated"] = torch.cuda.max_memory_allocated(device) / 1e6
        megabytes["cached"] = torch.cuda.memory_reserved(device) / 1e6
    return megabytes
