"""The ranks of `oktopk bench` as their parent sees them: started, given jobs, and watched.

The messages are in `messages`; the ranks' own program is `measure`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from ...common.errors import UserError
from ..network import Hosts
from .messages import (
    Answer,
    End,
    Failed,
    FromRank,
    Job,
    Mistake,
    Progress,
    Ready,
    Start,
    ToRank,
    decode,
    encode,
)

M = TypeVar("M", Ready, Answer)

_SECONDS_TO_END = 5.0
_SECONDS_TO_TELL = 1.0


class RanksError(Exception):
    """A rank failed, died or hung; says which, and what it said last."""


class Ranks:
    """One rank on each host. Use it as a context manager: nothing is left behind.

    Args:
        hosts: where they run.
        counts: whether a host's interface counts the bytes of its rank, and no others.
        timeout: seconds of silence after which ranks have failed.
    """

    def __init__(self, hosts: Hosts, *, counts: bool, threads: int, timeout: float) -> None:
        self._timeout = timeout
        self._size = len(hosts.hosts)
        self._folder = tempfile.TemporaryDirectory(prefix="oktopk-bench-")
        # A rank's messages; None is its end.
        self._inbox: queue.SimpleQueue[tuple[int, FromRank | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank, host in enumerate(hosts.hosts):
                self._start(hosts, rank, host.interface, counts, threads)
            self._await(Ready, lambda _: None)
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, progress: Callable[[Progress], None]) -> list[Answer]:
        """Have all ranks do a job; their answers. `progress` hears of every step."""
        self._send(job)
        return self._await(Answer, progress)

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        self._send(End())
        until = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # they may be in the middle of something
            self._kill()
        self.close()

    def _start(self, hosts: Hosts, rank: int, interface: str, counts: bool, threads: int) -> None:
        with open(self._log(rank), "w") as log:
            process = hosts.start(
                rank,
                [sys.executable, "-m", "oktopk.lab.bench.measure"],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    # torch speaks to the elastic launcher's store if it finds its variables.
                    "TORCHELASTIC_USE_AGENT_STORE": "False",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        assert process.stdout is not None
        threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True).start()
        start = Start(
            rank, self._size, self._folder.name, interface, counts, threads, self._timeout
        )
        _write(process, start)

    def _listen(self, rank: int, lines: IO[str]) -> None:
        """Pass on what a rank says, until it ends."""
        for line in lines:
            try:
                said: FromRank = decode(line, FromRank)
            except ValueError as error:
                said = Failed(f"its message cannot be read: {error}")
            self._inbox.put((rank, said))
        self._inbox.put((rank, None))

    def _send(self, message: Job | End) -> None:
        for process in self._processes:
            _write(process, message)

    def _await(self, kind: type[M], progress: Callable[[Progress], None]) -> list[M]:
        """One message of this kind from every rank."""
        found: dict[int, M] = {}
        until = time.monotonic() + self._timeout
        while len(found) < self._size:
            try:
                rank, said = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                silent = ", ".join(str(r) for r in range(self._size) if r not in found)
                raise RanksError(
                    f"rank {silent} gave no sign of life for {self._timeout:.0f} seconds: if the "
                    "links are that slow, give it more with --timeout"
                ) from None
            until = time.monotonic() + self._timeout
            if isinstance(said, kind):
                found[rank] = said
            elif isinstance(said, Progress):
                progress(said)
            elif isinstance(said, Mistake):
                raise UserError(said.text)
            else:
                raise self._failure(rank, said)
        return [found[rank] for rank in range(self._size)]

    def _failure(self, rank: int, said: FromRank | None) -> RanksError:
        """What went wrong first: where one rank dies, the others fail soon after it."""
        failures = {rank: said}
        until = time.monotonic() + _SECONDS_TO_TELL
        with contextlib.suppress(queue.Empty):
            while True:
                other, later = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
                if later is None or isinstance(later, Failed):
                    failures.setdefault(other, later)
        for dead, last in failures.items():
            if last is None:
                return self._death(dead)
        text = said.text.rstrip() if isinstance(said, Failed) else f"it said {type(said).__name__}"
        return RanksError(f"rank {rank} failed\n{text}")

    def _death(self, rank: int) -> RanksError:
        process, log = self._processes[rank], _tail(self._log(rank))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_TELL)
        killed = process.returncode == -signal.SIGKILL
        memory = " (if memory ran out, use fewer hosts or a smaller --numel)" if killed else ""
        said = f"; it ended with\n{log}" if log else ""
        return RanksError(f"rank {rank} died with exit code {process.returncode}{memory}{said}")

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"


def _write(process: subprocess.Popen[str], message: ToRank) -> None:
    assert process.stdin is not None
    line = encode(message)
    # A rank that has died reads nothing; `_listen` notices its end.
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(line)
        process.stdin.flush()


def _tail(path: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""
