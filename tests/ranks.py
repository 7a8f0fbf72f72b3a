"""Real ranks for tests: processes joined by real Gloo groups, started once, sent functions.

A function that is sent takes a `Rank` first; it must be importable (defined in a test module).
Processes are forked from one that has imported `IMPORTS`, since importing takes seconds for each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import FileStore  # type: ignore[attr-defined]

IMPORTS = ["torch._dynamo", "torch.distributed.checkpoint", "pytest", "heated"]


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
        self, sizes: tuple[int, ...], timeout: float = 60.0, backend: str = "gloo"
    ) -> None:
        self.sizes = sizes
        self.timeout = timeout
        self.backend = backend
        self._processes: list[Any] = []
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
            pipe.send((size, function, args))
        deadline = time.monotonic() + 2 * self.timeout
        return [self._answer(rank, deadline) for rank in range(size)]

    def _answer(self, rank: int, deadline: float) -> tuple[Any, str | None]:
        try:
            if self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                answer: tuple[Any, str | None] = self._pipes[rank].recv()
                return answer
            return None, "no answer in time"
        except EOFError:
            return None, "the process died"

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        folders = [os.path.dirname(__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, folders))):
            forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(max(self.sizes)):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.sizes, self._folder.name, self.timeout, self.backend, there),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def _serve(
    rank: int,
    sizes: tuple[int, ...],
    folder: str,
    timeout: float,
    backend: str,
    pipe: Connection,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=timeout)
    store = FileStore(os.path.join(folder, "store"), max(sizes))
    dist.init_process_group(backend, store=store, rank=rank, world_size=max(sizes), timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    own_groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes}
    odd_group = dist.new_group([1, 3], timeout=limit) if max(sizes) > 3 else None
    while True:
        try:
            size, function, args = pipe.recv()
        except EOFError:
            return
        try:
            where = Rank(rank, size, groups[size], own_groups[size], odd_group)
            pipe.send((function(where, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
