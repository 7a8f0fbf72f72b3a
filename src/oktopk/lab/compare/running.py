"""One cell in processes of its own: `oktopk train`, once for each rank.

The ranks run on hosts of `lab.network`, also on loopback, so nothing outlives this process, even if
it is killed. They find each other as under torchrun. A cell that was begun goes on from its
checkpoint.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...common import files
from ...common.format import toml
from ...common.values import parse
from ...train.config.config import Config
from ...train.folders import CHECKPOINT
from ...train.metrics_file import METRICS
from ...train.run_folder import settings
from ..network import Hosts
from ..network.ranks import environment
from .setting import Links
from .trained import is_complete

CONSOLE = "console.log"
_INTERVAL = 0.1
_SECONDS_ALONE = 3.0
"""For ranks to end by themselves, and to say why, after one has failed."""
_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl that hold its last step."""


class CellError(Exception):
    """A cell could not be trained; says why, in one line."""


@dataclass(frozen=True)
class Step:
    """How far a cell is."""

    done: int
    planned: int | None
    """Steps of the whole run; None as long as nobody knows."""
    loss: float


@dataclass(frozen=True)
class Run:
    """One cell, to be trained."""

    config: Config
    folder: Path
    links: Links
    timeout: float
    """Seconds without a step after which it has failed."""

    def train(self, tell: Callable[[Step], None]) -> None:
        """Train it to its end, or go on with it. CellError if that fails.

        Args:
            tell: hears of steps, some times a second.
        """
        try:
            try:
                self._attempt(tell)
            except CellError as error:
                if not str(error).startswith("--resume"):
                    raise
                shutil.rmtree(self.folder)  # its checkpoint cannot be used
                self._attempt(tell)
        except OSError as error:
            where = error.filename or self.folder
            raise CellError(
                f"{where}: {error.strerror or error}: make room, or move it away"
            ) from error

    def _attempt(self, tell: Callable[[Step], None]) -> None:
        folder, log = self.folder, self.folder / CONSOLE
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "config.toml", toml(settings(self.config)).encode())
        begin = log.stat().st_size if log.exists() else 0
        with self.links.hosts() as hosts:
            ranks = _start(hosts, self.links, folder)
            failed = _wait(ranks, folder, tell, self.timeout)
        if failed is not None:
            raise CellError(reason(log, begin, *failed))
        if not is_complete(folder):
            raise CellError(f"it ended without a summary; {log} may say why")


def _start(hosts: Hosts, links: Links, folder: Path) -> list[subprocess.Popen[bytes]]:
    meeting = hosts.meeting
    command = [sys.executable, "-m", "oktopk", "train", "--config", str(folder / "config.toml")]
    command += ["--run-dir", str(folder), "--resume", "auto"]
    ranks = []
    with open(folder / CONSOLE, "ab") as log:
        for rank in range(links.workers):
            environ = environment(hosts, links.ranks_per_host, rank, meeting)
            host = rank // links.ranks_per_host
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            ranks.append(hosts.start(host, command, environ, **pipes))
    return ranks


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    tell: Callable[[Step], None],
    timeout: float,
) -> tuple[int, int | None] | None:
    """Wait until all ranks have ended. None, or the first that failed, with its exit code; None
    instead of a code if no step came for too long."""
    failed: tuple[int, int] | None = None
    watch = _Watch(folder)
    until = time.monotonic() + timeout
    while True:
        codes = [rank.poll() for rank in ranks]
        if step := watch.look():
            tell(step)
            until = time.monotonic() + timeout
        if failed is None and any(codes):
            failed = next((rank, code) for rank, code in enumerate(codes) if code)
            until = min(until, time.monotonic() + _SECONDS_ALONE)
        if None not in codes:
            return failed
        if time.monotonic() > until:
            return failed or (codes.index(None), None)
        time.sleep(_INTERVAL)


class _Watch:
    """Reads how far a run is from its folder, which it need not know of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.time()
        self._planned: int | None = None
        self._seen: tuple[int, int] | None = None

    def look(self) -> Step | None:
        """The last step; None if there is no new one."""
        try:
            facts = (self._folder / METRICS).stat()
        except OSError:
            return None
        if self._seen == (facts.st_ino, facts.st_size):
            return None
        self._seen = (facts.st_ino, facts.st_size)
        if self._planned is None:
            self._planned = self._plan()
        with suppress(OSError, ValueError, KeyError):
            return self._last()
        return None

    def _last(self) -> Step | None:
        with open(self._folder / METRICS, "rb") as file:
            file.seek(max(0, self._seen[1] - _TAIL) if self._seen else 0)
            lines = file.read().splitlines()
        for line in reversed(lines):
            if line.startswith(b'{"kind": "step"') and line.endswith(b"}"):
                record = json.loads(line)
                return Step(record["step"] + 1, self._planned, record["loss"])
        return None

    def _plan(self) -> int | None:
        """The planned steps, once this run has begun: an earlier one's file may be there."""
        path = self._folder / "environment.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            if path.stat().st_mtime >= self._began - 1:
                return int(parse(path.read_bytes())["steps"])
        return None


def reason(log: Path, begin: int, rank: int, code: int | None) -> str:
    """One line that says why a rank failed.

    Args:
        begin: where this attempt begins in the log.
        code: its exit code; None if no step came for too long.
    """
    with open(log, "rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    mistake = "oktopk: error: "
    for line in lines:  # one rank tells; the others may die of its end in any way
        if line.startswith(mistake):
            return line.removeprefix(mistake)
    if code is None:
        return f"no step came for too long; --timeout gives more time, {log} may say more"
    if code < 0:
        name = signal.Signals(-code).name
        more = ": if memory ran out, a smaller batch_size helps" if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name}{more} ({log} may say more)"
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"rank {rank} failed: {last or f'exit code {code}'} ({log} has all)"


def drop_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a finished cell."""
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
