"""Real ranks for tests: processes joined by real Gloo groups, started once, sent functions.

A test sends a function to the first P processes of the pool. The function takes a `Rank` first,
and pickle must find it, so define it at the top of a test module. The processes come from the
fork server (`launch.Warm`). Each of them runs this file.
"""

from __future__ import annotations

import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from launch import Warm


@dataclass
class Rank:
    """Where a function runs: its rank in `group`, the first `size` processes of the pool."""

    rank: int
    size: int
    group: dist.ProcessGroup
    own_group: dist.ProcessGroup
    """A second group of the same processes, for the communication thread."""
    odd_group: Any = None
    """The group of processes 1 and 3, as torch.distributed gives it to members and others."""


class RankError(Exception):
    """One or more ranks failed; holds their tracebacks."""


class Ranks:
    """A pool of processes that runs functions on its first P ranks, any P in `sizes`."""

    def __init__(
        self, warm: Warm, sizes: tuple[int, ...], timeout: float = 60.0, backend: str = "gloo"
    ) -> None:
        self._warm = warm
        self.sizes = sizes
        self.timeout = timeout
        self.backend = backend
        self._processes: list[int] = []
        self._pipes: list[Connection] = []

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(Rank, *args) on ranks 0 to size - 1; their results, or all their errors."""
        answers = self.outcomes(size, function, *args)
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error]
        if errors:
            self.stop()  # the others may be in the middle of a collective: start afresh
            raise RankError("\n".join(errors))
        return [result for result, _ in answers]

    def outcomes(
        self, size: int, function: Callable[..., Any], *args: Any
    ) -> list[tuple[Any, str | None]]:
        """The same, but each rank's result and error, for tests in which ranks fail."""
        if not self._processes:
            self._start()
        for pipe in self._pipes[:size]:
            _send(pipe, (size, function, args))
        deadline = time.monotonic() + 2 * self.timeout
        return [self._answer(rank, deadline) for rank in range(size)]

    def _answer(self, rank: int, deadline: float) -> tuple[Any, str | None]:
        try:
            if self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                answer: tuple[Any, str | None] = _receive(self._pipes[rank])
                return answer
            return None, "no answer in time"
        except (EOFError, ConnectionError):
            return None, "the process died"

    def _start(self) -> None:
        """Fork the processes. Ranks are numbered as they connect."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        out, err, address = folder / "out", folder / "err", folder / "address"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(address))
            listening.listen(max(self.sizes))
            listening.settimeout(self.timeout)
            for _ in range(max(self.sizes)):
                self._processes.append(self._warm.start(Path(__file__), address, out=out, err=err))
            try:
                for _ in self._processes:
                    self._pipes.append(Connection(listening.accept()[0].detach()))
            except TimeoutError:
                said = err.read_text()
                self.stop()
                raise RankError(f"not all ranks have started\n{said}") from None
        for rank, pipe in enumerate(self._pipes):
            _send(pipe, (rank, self.sizes, str(folder / "store"), self.timeout, self.backend))

    def stop(self) -> None:
        if not self._processes:
            return
        self._warm.wait(*self._processes, timeout=0)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
        self._processes, self._pipes = [], []


def _send(pipe: Connection, message: Any) -> None:
    # Plain pickle: tensors go by value. Connection.send would share their memory.
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def serve(address: str) -> None:
    """What a process of the pool does: join the groups, then run functions until nobody asks."""
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(address)
        pipe = Connection(connecting.detach())
    rank, sizes, store, timeout, backend = _receive(pipe)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=timeout)
    world = max(sizes)
    dist.init_process_group(
        backend, store=FileStore(store, world), rank=rank, world_size=world, timeout=limit
    )
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    own_groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    odd_group = dist.new_group([1, 3], timeout=limit) if world > 3 else None
    while True:
        try:
            size, function, args = _receive(pipe)
        except EOFError:
            return
        try:
            where = Rank(rank, size, groups[size], own_groups[size], odd_group)
            _send(pipe, (function(where, *args), None))
        except BaseException:
            _send(pipe, (None, traceback.format_exc()))


if __name__ == "__main__":
    # Not the `serve` of this file: pickle looks for `Rank` in the module `ranks`, not `__main__`.
    from ranks import serve as serve_ranks

    serve_ranks(sys.argv[1])
