"""Memory: how much is left, and whether it ran out."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def left() -> int | None:
    """Bytes that processes of this machine, or of this container, can still get; None if nobody
    says. Swap counts."""
    found = []
    with contextlib.suppress(OSError):
        facts = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
        if "MemAvailable" in facts:
            found.append(1024 * (int(facts["MemAvailable"]) + int(facts.get("SwapFree", 0))))
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)


def machine() -> str:
    """The same for all processes that share this machine's memory, whatever hosts they think they
    are."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def shortage(error: BaseException) -> str:
    """What could not be had, if the error says that memory ran out; else nothing."""
    text = str(error)
    known = isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)
    if not known:
        return ""
    asked = re.search(r"allocate (\d+ bytes|[\d.]+ \wiB)", text)
    return f"memory ran out ({asked[1]} could not be had)" if asked else "memory ran out"
