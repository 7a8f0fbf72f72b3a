"""From a configuration to workers that train it, and from their end to an exit code.

1. A process that torchrun, mpirun or srun started is a worker: it joins the others.
2. Any other starts its workers itself, on this machine, with torch's elastic launcher.
3. A worker meets the others in a store, takes a device and its share of the cores, and trains.
4. Of what goes wrong, one worker tells: a mistake of the user in one line, exit code 2; anything
   else with its traceback, exit code 1. The first to fail tells, as what the others see after
   that is only that a peer is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from datetime import timedelta
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ...common.errors import USER_ERROR, UserError, mistake
from ..config.config import Config, flag
from .place import LOCAL, Place, address, meeting_file, place

__all__ = ["Place", "place", "report", "run", "worker"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MOST_WORKERS = 256
_SECONDS_TO_END = 10
_SECONDS_TO_MEET = 600


def run(config: Config, explicit: Collection[str] = ()) -> int:
    """Train, here or in workers of our own; the exit code.

    Args:
        explicit: fields that the user gave a value, rather than a recipe.
    """
    here = place()
    if here is not None:
        return worker(config, here, explicit)
    size = config.nworkers or 2
    if size == 1:
        return worker(config, Place(0, 1, 0, 1, LOCAL))
    if size > _MOST_WORKERS:
        raise UserError(
            f"--nworkers is {size}, but at most {_MOST_WORKERS} are started on one machine: start "
            "more with torchrun, mpirun or srun"
        )
    return _start(config, size)


def worker(config: Config, place: Place, explicit: Collection[str] = ()) -> int:
    """Train as one of the workers; 0, or the process ends with another code."""
    _obey_signals(place)
    if place.launcher == "mpirun":
        # Open MPI gives workers a terminal even where its own output goes to a file. This variable
        # has rich print plain lines; 1 instead of 0 gets the live view back.
        os.environ.setdefault("TTY_COMPATIBLE", "0")
    store = None
    try:
        store = _meet(place, _SECONDS_TO_MEET)
        _check(config, place, explicit)
        device = choose_device(config.device, place)
        torch.set_num_threads(config.threads or _share_of_cores(place, store))
        _join(place, store, device)
        from ..trainer import Trainer

        Trainer(config, device, place.local_rank).run()
        dist.destroy_process_group()
        return 0
    except _Interrupted as interruption:
        if place.launcher != LOCAL or place.size == 1:
            print(_INTERRUPTED, file=sys.stderr)
        _exit(128 + interruption.signal)
    except Exception as error:
        if message := mistake(error):
            _tell(f"oktopk: error: {message}", place, store)
            _exit(USER_ERROR)
        _tell(
            f"oktopk: worker {place.rank} failed\n{traceback.format_exc().rstrip()}", place, store
        )
        _exit(1)


def choose_device(wanted: str, place: Place) -> torch.device:
    """A GPU for each worker of the machine, or for all of them the CPU."""
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if count >= place.local_size:
        return torch.device("cuda", place.local_rank)
    if count == 1 and place.launcher == "srun":  # which may show each task only its own
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise UserError(
            f"--device cuda, but for {place.local_size} workers this machine has {count} GPUs that "
            "torch can use: start fewer workers, or use --device cpu"
        )
    return torch.device("cpu")


def report(message: str, here: Place) -> None:
    """Print a line, on one worker only where a launcher started several with the same mistake."""
    store = None
    with contextlib.suppress(UserError):
        store = _meet(here, _SECONDS_TO_END)
    _tell(message, here, store)


# Starting workers.


def _start(config: Config, size: int) -> int:
    """Workers on this machine; they, and this process, end together."""
    # Here, not above: only this process needs them.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    choose_device(config.device, Place(0, size, 0, size, LOCAL))
    for name in (
        "torch.distributed.elastic",
        "torch.distributed.launcher",
        "torch.multiprocessing",
    ):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_END))
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
            print(_INTERRUPTED, file=sys.stderr)
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
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


# Being a worker.


class _Interrupted(KeyboardInterrupt):
    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


_INTERRUPTED = (
    "oktopk: interrupted; the same command with --resume auto goes on from the last checkpoint"
)


def _obey_signals(place: Place) -> None:
    """Rank 0 cleans up, since it may be showing progress; the others end at once, which frees
    rank 0 if it waits for them."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt if place.rank == 0 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # The parent passes on what the terminal may have sent us already.
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    signal.alarm(_SECONDS_TO_END)  # ends the process, should cleaning up not end
    raise _Interrupted(number)


def _meet(place: Place, seconds: float) -> Store:
    """The store in which workers find each other, and through which they speak before there is a
    process group, and when there is none any more."""
    if place.launcher == LOCAL and place.size == 1:
        return HashStore()
    where = address(place)
    timeout = timedelta(seconds=seconds)
    if where is None:
        # Rank 0 takes a port that the system chooses, and leaves it in the file, which is removed
        # when all have been there.
        file = FileStore(str(meeting_file(place)), place.size)
        file.set_timeout(timeout)
        host = "127.0.0.1"
        if place.rank == 0:
            served = TCPStore(host, 0, place.size, True, timeout, wait_for_workers=False)
            file.set("port", str(served.port))
            return served
        try:
            return TCPStore(host, int(file.get("port")), place.size, False, timeout)
        except RuntimeError as error:
            raise UserError(
                f"worker {place.rank} could not meet the others: {str(error).splitlines()[0]}"
            ) from None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = where
    try:
        meeting = rendezvous("env://", place.rank, place.size, timeout=timeout)
        store: Store = next(iter(meeting))[0]
        return store
    except (dist.DistError, ValueError, TypeError) as error:
        raise UserError(
            f"worker {place.rank} could not meet the others at {':'.join(where)} "
            f"(MASTER_ADDR and MASTER_PORT): {str(error).splitlines()[0]}"
        ) from None


def _check(config: Config, place: Place, explicit: Collection[str]) -> None:
    """What the user asked for must be what the launcher did."""
    if "nworkers" in explicit and config.nworkers != place.size:
        raise UserError(
            f"{flag('nworkers')} is {config.nworkers}, but {place.launcher} started {place.size} "
            "workers: leave it out, or start as many"
        )
    if "nwpernode" in explicit and config.nwpernode != place.local_size:
        raise UserError(
            f"{flag('nwpernode')} is {config.nwpernode}, but {place.launcher} started "
            f"{place.local_size} workers on this machine: leave it out, or start as many"
        )


def _share_of_cores(place: Place, store: Store) -> int:
    """Cores for this worker: each core is shared by those that may run on it.

    mpirun and srun may bind each worker to cores of its own, or all to the same ones.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    host = socket.gethostname()
    store.set(f"oktopk/cores/{place.rank}", json.dumps([host, cores]))
    others = [json.loads(store.get(f"oktopk/cores/{rank}")) for rank in range(place.size)]
    users = Counter(core for where, theirs in others if where == host for core in theirs)
    return max(1, int(sum(1 / users[core] for core in cores) + 1e-6))


def _join(place: Place, store: Store, device: torch.device) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}
    if place.local_size == place.size:
        # By default Gloo looks up the machine's name, which not every network knows.
        loopback = interfaces & {"lo", "lo0"}
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise UserError(
                f"GLOO_SOCKET_IFNAME is {name}, but this machine has no such interface; it has "
                f"{', '.join(sorted(interfaces))}"
            )
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)


def _tell(message: str, place: Place, store: Store | None) -> None:
    """Print, if no other worker has.

    Launchers end all workers when the first one ends. So nobody ends before it is printed; and
    rank 0, which may be the store's host, not before all have asked, or a few seconds have passed.
    """
    if store is None:
        print(message, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(dist.DistError):  # the host is gone, and it has told
        if store.add("oktopk/failed", 1) == 1:
            print(message, file=sys.stderr, flush=True)
            store.set("oktopk/told", "yes")
        store.wait(["oktopk/told"], timedelta(seconds=_SECONDS_TO_END))
        until = time.monotonic() + 3
        while place.rank == 0 and time.monotonic() < until:
            if store.add("oktopk/failed", 0) >= place.size:
                break
            time.sleep(0.05)


def _exit(code: int) -> NoReturn:
    """End, even if threads wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
