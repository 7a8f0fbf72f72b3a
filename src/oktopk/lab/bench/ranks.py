"""The ranks of `oktopk bench` as their parent sees them: started once, given jobs, watched."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ...common.errors import UserError
from ..network.network import Hosts

_SECONDS_TO_END = 5.0
_SECONDS_TO_TELL = 1.0


class RanksError(Exception):
    """A rank failed, died or hung; says which, and what it said last."""


class Ranks:
    """One rank on each host. Use it as a context manager: nothing is left behind.

    Args:
        hosts: where they run.
        counts: whether a host's interface counts the bytes of its rank, and no others.
        timeout: seconds without a sign of life after which ranks have failed.
    """

    def __init__(self, hosts: Hosts, *, counts: bool, threads: int, timeout: float) -> None:
        self._timeout = timeout
        self._size = len(hosts.hosts)
        self._folder = tempfile.TemporaryDirectory(prefix="oktopk-bench-")
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank, host in enumerate(hosts.hosts):
                self._start(hosts, rank, host.interface, counts, threads)
            self._await("ready", lambda _: None)
        except BaseException:
            self.close()
            raise

    def run(
        self, job: Mapping[str, Any], progress: Callable[[Mapping[str, Any]], None]
    ) -> list[dict[str, Any]]:
        """Have all ranks do a job; their answers. `progress` hears of steps."""
        self._send(job)
        return self._await("done", progress)

    def close(self) -> None:
        """End them: at once those that do not end by themselves."""
        with contextlib.suppress(RanksError):
            self._send({})
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
        plan = {
            "rank": rank,
            "size": self._size,
            "folder": self._folder.name,
            "interface": interface,
            "counts": counts,
            "threads": threads,
            "timeout": self._timeout,
        }
        self._write(process, plan)

    def _listen(self, rank: int, answers: IO[str]) -> None:
        for line in answers:
            self._answers.put((rank, json.loads(line)))
        self._answers.put((rank, None))

    def _send(self, message: Mapping[str, Any]) -> None:
        for process in self._processes:
            self._write(process, message)

    @staticmethod
    def _write(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        # Whose end is closed has died, which the one who listens will hear.
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _await(self, what: str, progress: Callable[[Mapping[str, Any]], None]) -> list[Any]:
        """All ranks' answers of one kind."""
        found: dict[int, Any] = {}
        until = time.monotonic() + self._timeout
        while len(found) < self._size:
            try:
                rank, answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                silent = ", ".join(str(r) for r in range(self._size) if r not in found)
                raise RanksError(
                    f"rank {silent} gave no sign of life for {self._timeout:.0f} seconds: if the "
                    "links are that slow, give it more with --timeout"
                ) from None
            until = time.monotonic() + self._timeout
            if answer is not None and what in answer:
                found[rank] = answer[what]
            elif answer is not None and "step" in answer:
                progress(answer)
            elif answer is not None and "mistake" in answer:
                raise UserError(answer["mistake"])
            else:
                self._fail(rank, answer)
        return [found[rank] for rank in range(self._size)]

    def _fail(self, rank: int, answer: dict[str, Any] | None) -> None:
        """Tell what went wrong first: where one rank dies, the others fail soon after it."""
        failures = {rank: answer}
        until = time.monotonic() + _SECONDS_TO_TELL
        with contextlib.suppress(queue.Empty):
            while True:
                other, said = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                if said is None or "failed" in said:
                    failures.setdefault(other, said)
        for dead, said in failures.items():
            if said is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._processes[dead].wait(_SECONDS_TO_TELL)
                code = self._processes[dead].returncode
                log = _tail(self._log(dead))
                memory = " (if memory ran out, use fewer hosts or a smaller --numel)"
                raise RanksError(
                    f"rank {dead} died with exit code {code}{memory if code == -9 else ''}"
                    + (f"; it ended with\n{log}" if log else "")
                )
        text = str((answer or {}).get("failed", "")).rstrip()
        raise RanksError(f"rank {rank} failed\n{text}")

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


def _tail(path: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""
