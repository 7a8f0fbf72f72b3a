"""How long a job of `oktopk bench` may take, and how ranks agree on its last step."""

from __future__ import annotations

import time
from pathlib import Path

from ...common.files import replacing
from .messages import RawJob

STOP, SKIP, MEASURE = 0, 1, 2


class Budget:
    """The steps of a raw job: as many as asked for, but fewer where links are slow.

    Rank 0 decides for all.
    """

    def __init__(self, job: RawJob) -> None:
        self._job = job
        self._counts = {SKIP: 0, MEASURE: 0}
        self._start = time.perf_counter()
        self._since: float | None = None

    def phase(self) -> int:
        """Of the next step."""
        job, now = self._job, time.perf_counter()
        skipped, measured = self._counts[SKIP], self._counts[MEASURE]
        # Skipping more than `settle` steps only makes results better, so it must leave some time.
        in_time = skipped < job.settle or now - self._start < job.seconds / 2
        if not measured and skipped < job.skip and in_time:
            return SKIP
        if self._since is None:
            self._since = now
        late = measured >= job.least and now - self._since > job.seconds
        return STOP if late or measured >= job.steps else MEASURE

    def taken(self, phase: int) -> None:
        self._counts[phase] += 1


class StopFile:
    """Tells all ranks which step is the last, without a message: rank 0 writes it to a file.

    It writes the file before it begins that step. No other rank can be past the step by then, as
    every step needs all ranks.
    """

    def __init__(self, path: Path, rank: int, seconds: float) -> None:
        self._path, self._rank = path, rank
        self._until = time.perf_counter() + seconds
        self._last: int | None = None

    def reached(self, done: int) -> bool:
        """Whether the last step is done."""
        if self._last is None and self._rank == 0 and time.perf_counter() > self._until:
            self._last = done + 1
            with replacing(self._path) as part:
                part.write_text(str(self._last))
        elif self._last is None and self._path.exists():
            self._last = int(self._path.read_text())
        return self._last is not None and done >= self._last
