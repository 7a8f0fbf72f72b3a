"""One worker: it meets the others, takes a device and its share of the cores, and trains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Collection
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ...common.errors import USER_ERROR, UserError, mistake
from ...common.host import cores as available_cores
from ..config.config import Config
from .meeting import SECONDS_TO_END, SECONDS_TO_MEET, meet, tell
from .place import LOCAL, Place

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def worker(config: Config, place: Place, explicit: Collection[str] = ()) -> int:
    """Train as one of the workers; 0, or the process ends with another code."""
    _obey_signals(place)
    if place.launcher == "mpirun":
        # Open MPI gives workers a terminal even where its own output goes to a file. This variable
        # has rich print plain lines; 1 instead of 0 gets the live view back.
        os.environ.setdefault("TTY_COMPATIBLE", "0")
    store = None
    try:
        store = meet(place, SECONDS_TO_MEET)
        _check(config, place, explicit)
        device = choose_device(config.launch.device, place)
        torch.set_num_threads(config.launch.threads or _share_of_cores(place, store))
        join(place, store, device)
        from ..trainer import Trainer

        Trainer(config, device, place.local_rank).run()
        dist.destroy_process_group()
        return 0
    except _Interrupted as interruption:
        if place.launcher != LOCAL or place.size == 1:
            print(INTERRUPTED, file=sys.stderr)
        _exit(128 + interruption.signal)
    except Exception as error:
        _ignore_signals()  # launchers send them as soon as one worker ends, and rank 0 may end last
        if message := mistake(error):
            tell(f"oktopk: error: {message}", place, store)
            _exit(USER_ERROR)
        tell(f"oktopk: worker {place.rank} failed\n{traceback.format_exc().rstrip()}", place, store)
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


class _Interrupted(KeyboardInterrupt):
    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


INTERRUPTED = (
    "oktopk: interrupted; the same command with --resume auto goes on from the last checkpoint"
)


def _obey_signals(place: Place) -> None:
    """Rank 0 cleans up, since it may be showing progress; the others end at once, which frees
    rank 0 if it waits for them."""
    for number in SIGNALS:
        signal.signal(number, _interrupt if place.rank == 0 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _ignore_signals()  # the terminal may have sent it already, and the parent passes it on again
    signal.alarm(SECONDS_TO_END)  # ends the process, should cleaning up not end
    raise _Interrupted(number)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _check(config: Config, place: Place, explicit: Collection[str]) -> None:
    """The launcher must have done as the user asked."""
    if "nworkers" in explicit and config.launch.nworkers != place.size:
        raise UserError(
            f"--nworkers is {config.launch.nworkers}, but {place.launcher} started {place.size} "
            "workers: leave it out, or start as many"
        )
    if "nwpernode" in explicit and config.launch.nwpernode != place.local_size:
        raise UserError(
            f"--nwpernode is {config.launch.nwpernode}, but {place.launcher} started "
            f"{place.local_size} workers on this machine: leave it out, or start as many"
        )


def _share_of_cores(place: Place, store: Store) -> int:
    """Cores for this worker: each core is shared by those that may run on it.

    mpirun and srun may bind each worker to cores of its own, or all to the same ones.
    """
    cores, host = available_cores(), socket.gethostname()
    store.set(f"oktopk/cores/{place.rank}", json.dumps([host, cores]))
    others = [json.loads(store.get(f"oktopk/cores/{rank}")) for rank in range(place.size)]
    users = Counter(core for where, theirs in others if where == host for core in theirs)
    return max(1, int(sum(1 / users[core] for core in cores) + 1e-6))


def join(place: Place, store: Store, device: torch.device) -> None:
    """Join the process group of all workers."""
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


def _exit(code: int) -> NoReturn:
    """End, even if threads wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code)
