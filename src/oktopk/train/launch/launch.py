"""From a configuration to workers that train it, and from their end to an exit code.

1. A process that torchrun, mpirun or srun started is a worker: it joins the others.
2. Any other starts its workers itself, on this machine, with torch's elastic launcher.
3. A worker meets the others in a store, takes a device and its share of the cores, and trains.
4. If something goes wrong, one worker reports it: a mistake of the user in one line, exit code 2;
   anything else with its traceback, exit code 1. The first to fail reports, since the others see
   only that a peer is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterator
from multiprocessing import resource_tracker

from ...common.errors import USER_ERROR, UserError
from ..config.config import Config
from ..folders import find_folder
from .meeting import SECONDS_TO_END
from .place import LOCAL, Place, place
from .worker import INTERRUPTED, SIGNALS, choose_device, worker

_MOST_WORKERS = 256
_interruptions: list[BaseException] = []
"""Kept until the process ends. The traceback of one holds torch's rendezvous, whose thread would
complain if it were the last to let go of it."""


def run(config: Config, explicit: Collection[str] = ()) -> int:
    """Train, here or in workers of our own; the exit code.

    Args:
        explicit: fields that the user gave a value, rather than a recipe.
    """
    here = place()
    if here is not None:
        return worker(config, here, explicit)
    find_folder(config.run)  # a mistake here need not wait for workers
    size = config.launch.nworkers or 2
    if size == 1:
        return worker(config, Place(0, 1, 0, 1, LOCAL))
    if size > _MOST_WORKERS:
        raise UserError(
            f"--nworkers is {size}, but at most {_MOST_WORKERS} are started on one machine: start "
            "more with torchrun, mpirun or srun"
        )
    return _start(config, size)


def _start(config: Config, size: int) -> int:
    """Workers on this machine; they, and this process, end together."""
    # Here, not above: only this process needs them.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    choose_device(config.launch.device, Place(0, size, 0, size, LOCAL))
    for name in (
        "torch.distributed.elastic",
        "torch.distributed.launcher",
        "torch.multiprocessing",
    ):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_END))
    with tempfile.TemporaryDirectory(prefix="oktopk-") as folder, _signals_kept_from_children():
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(launch, _started)(config, os.getpid())
            return 0
        except SignalException as interruption:
            _interruptions.append(interruption)
            print(INTERRUPTED, file=sys.stderr)
            return 128 + int(interruption.sigval)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                print(
                    f"oktopk: error: worker {rank} was ended by {failure.signal_name()}; if memory "
                    "ran out, use fewer workers or a smaller --batch-size",
                    file=sys.stderr,
                )
            return USER_ERROR if failure.exitcode == USER_ERROR else 1


@contextlib.contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """Children begin with signals blocked, until they are ready for them (`_obey_signals`).

    Ctrl-C reaches all processes of a terminal. Those that are still importing would answer with
    tracebacks. Blocked signals are inherited, so the main thread, which starts the children, blocks
    them; another thread takes them for this process, and Python hands them to the main thread.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(config: Config, parent: int) -> int:
    """The main function of a worker that we started."""
    here = place()
    # torch has the system send a signal when the parent dies; unless it was dead before.
    if here is None or os.getppid() != parent:
        os._exit(1)
    return worker(config, dataclasses.replace(here, launcher=LOCAL))
