"""The communication thread: tasks in, answers out, first in, first out.

All ranks must run their collectives in the same order. One thread that takes tasks from one
queue gives that order. A process group of its own keeps its messages apart from those of the
training thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .transport import Operation, Transport, device_of, settle

T = TypeVar("T")
log = logging.getLogger("oktopk")
Task = tuple[Callable[[], Any], "Future[Any]"]

_PATIENCE = 2.0
"""Seconds that the end of a process waits for a task that is still under way. It may wait for a
rank that is gone, so this must end."""
LATE = 10.0
"""Seconds after which a rank logs the operation that it waits in; see `Worker.run`."""
_of_all_ranks: weakref.WeakKeyDictionary[Any, Worker] = weakref.WeakKeyDictionary()
"""By the default group. It is kept, since to make another is a collective."""
_of_group: weakref.WeakValueDictionary[int, Worker] = weakref.WeakValueDictionary()
"""By the id of a group that somebody gave; gone when its last user is."""
_alone: list[Worker] = []
_moving = threading.Lock()


class Worker:
    """A thread, its queue, and the process group that only this thread uses."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._begin()

    def _begin(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # A daemon, and without a reference to the worker: neither keeps the other alive.
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks,), name="oktopk", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._tasks, self._thread, self.group)
        self._pid = os.getpid()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run a task after all that were submitted before."""
        if self._pid != os.getpid():
            self._move()
        answer: Future[T] = Future()
        self._tasks.put((task, answer))
        return answer

    def run(self, task: Callable[[], T], what: str = "", patience: float | None = None) -> T:
        """Submit a task and wait for its answer or its exception.

        A task of this thread, such as a subscriber, may call it, too. Its task runs at once.

        Args:
            what: the operation that all ranks must join. It is logged once if the task takes long.
            patience: how long that is, in seconds; None: `LATE`.
        """
        if self.is_current:
            return task()
        answer = self.submit(task)
        patience = LATE if patience is None else patience
        try:
            return answer.result(patience if what else None)
        except futures.TimeoutError:  # perhaps the task's own, which is then raised again below
            if not answer.done():
                log.warning(
                    "%s has waited for %.0f seconds in %s. All ranks must come to it: one is late, "
                    "or does something else",
                    _who(self.group),
                    patience,
                    what,
                )
        return answer.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this worker's thread."""
        return threading.current_thread() is self._thread

    def _move(self) -> None:
        """Begin anew in a forked child, which has none of its parent's threads."""
        if self.group is not None:
            raise RuntimeError(
                f"this compression, or its process group, was made in another process (pid "
                f"{self._pid}), and cannot communicate in this one, which was forked from it: "
                "attach it in the process that trains, after init_process_group"
            )
        with _moving:
            if self._pid != os.getpid():
                self._begin()


def worker(group: dist.ProcessGroup | None) -> Worker:
    """The worker of this process for a group; one for all that ask for the same.

    Args:
        group: used by the worker alone from now on. None: a new group of all ranks, which the
            first call makes: a collective that all ranks must join.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if not _alone:
            _alone.append(Worker(None))
        return _alone[0]
    if group is not None:
        given = _of_group.get(id(group)) or Worker(group)
        _of_group[id(group)] = given
        return given
    default = dist.group.WORLD
    if default not in _of_all_ranks:
        group = Worker(None).run(_group_like_default, Operation.BEGIN.value)
        _of_all_ranks[default] = Worker(group)
    return _of_all_ranks[default]


@contextlib.contextmanager
def raised_by_all(group: dist.ProcessGroup | None, device: torch.device | None) -> Iterator[None]:
    """If one rank raises in this block, all ranks raise. Otherwise the others would wait for it.

    Collective, at the end of the block.

    Args:
        group: as for `worker`.
        device: of the model, if known.
    """
    mistake: Exception | None = None
    problem = None
    try:
        yield
    except Exception as error:
        mistake, kind = error, type(error).__name__
        problem = str(error) if isinstance(error, ValueError) else f"{kind}: {error}"
    telling = f", where it tells of a mistake of its own: {problem}" if problem else ""

    def tell() -> None:
        transport = Transport(here.group, where)
        with transport.together(Operation.BEGIN):
            transport.agree(problem, "no mistake", "correct it")

    try:
        here = worker(group)
        where = device_of(here.group)
        if where.type == "cuda" and device is not None and device.type == "cuda":
            where = device  # NCCL needs this rank's own GPU
        here.run(tell, Operation.BEGIN.value + telling)
    except Exception:
        if mistake is None:
            raise
    if mistake is not None:
        raise mistake


def _group_like_default() -> Any:
    """A second group of all ranks, with the timeout that the user gave the first."""
    default = dist.group.WORLD
    assert default is not None
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    try:
        timeout = default._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend has options
        timeout = None
    return dist.new_group(timeout=timeout)


def _who(group: dist.ProcessGroup | None) -> str:
    if not (dist.is_available() and dist.is_initialized()):
        return "this process"
    return f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (entry := tasks.get()) is not None:
        task, answer = entry
        try:
            answer.set_result(task())
        except BaseException as error:
            answer.set_exception(error)
        del entry, task, answer  # or the thread would keep them until the next one comes


def _stop(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread, group: Any) -> None:
    tasks.put(None)
    if thread is threading.current_thread():
        return
    thread.join(_PATIENCE)
    ending = not threading.main_thread().is_alive()
    if ending and thread.is_alive() and group is not None and group.name() == "gloo":
        _abort(group)
        thread.join(_PATIENCE)
        settle()


def _abort(group: Any) -> None:
    """Make all fail that is under way in a Gloo group, where the interpreter is about to end.

    A thread that comes back to an interpreter that has ended aborts the process. Gloo has no call
    for this, but it closes all connections when a message is late.
    """
    with contextlib.suppress(Exception):
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, 0).wait(timedelta(milliseconds=1))
