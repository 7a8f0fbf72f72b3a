"""One line on a terminal that says what is being measured; without a terminal, nothing."""

from __future__ import annotations

import shutil
import sys
import time

_SECONDS_BETWEEN = 0.1


class Status:
    """A line on stderr that results replace. Use it as a context manager."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._done = self._expected = 0
        self._last = 0.0
        self._since = time.monotonic()

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def expect(self, jobs: int) -> None:
        """How many contenders there are in all settings together."""
        self._expected = jobs

    def finished(self) -> None:
        """One more contender is done."""
        self._done += 1
        self._last = 0.0

    def show(self, text: str) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < _SECONDS_BETWEEN:
            return
        self._last = now
        spent = now - self._since
        line = f"[{self._done}/{self._expected} {int(spent) // 60}:{int(spent) % 60:02}] {text}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for something else."""
        self._last = 0.0
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
