"""The store in which workers find each other, and through which they agree who reports an error."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ...common.errors import UserError
from .place import LOCAL, Place, address, meeting_file

SECONDS_TO_END = 10
SECONDS_TO_MEET = 600


def meet(place: Place, seconds: float) -> Store:
    """The store in which workers find each other. They speak through it before the process group
    exists, and after it has failed."""
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


def tell(message: str, place: Place, store: Store | None) -> None:
    """Print, if no other worker has.

    Launchers end all workers when the first one ends, so no worker ends before the message is
    printed. Rank 0 may host the store: it waits until all know of the message, or a few seconds.
    A worker whose host is gone in the middle of a question has torch print a stack trace.
    """
    if store is None:
        print(message, file=sys.stderr, flush=True)
        return
    with contextlib.suppress(dist.DistError):  # the host is gone, and it has printed
        if store.add("oktopk/failed", 1) == 1:
            print(message, file=sys.stderr, flush=True)
            store.set("oktopk/told", "yes")
        store.wait(["oktopk/told"], timedelta(seconds=SECONDS_TO_END))
        know = store.add("oktopk/know", 1)
        until = time.monotonic() + 3
        while place.rank == 0 and know < place.size and time.monotonic() < until:
            time.sleep(0.05)
            know = store.add("oktopk/know", 0)


def report(message: str, here: Place) -> None:
    """Print a line, on one worker only where a launcher started several with the same mistake."""
    store = None
    with contextlib.suppress(UserError):
        store = meet(here, SECONDS_TO_END)
    tell(message, here, store)
