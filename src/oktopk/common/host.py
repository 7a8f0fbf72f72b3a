"""This machine: its cores, its processor, and its memory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
from pathlib import Path

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processor() -> str:
    """The processor's name, as it is sold."""
    with contextlib.suppress(OSError):
        if found := re.search(r"(?m)^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text()):
            return found[1].strip()
    return platform.processor() or platform.machine()


def left() -> int | None:
    """Bytes of memory, swap included, that this machine or container has left; None if unknown."""
    found = []
    with contextlib.suppress(OSError):
        facts = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
        if "MemAvailable" in facts:
            found.append(1024 * (int(facts["MemAvailable"]) + int(facts.get("SwapFree", 0))))
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)


def machine() -> str:
    """An identity that all processes on this machine share, even if their host names differ."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def shortage(error: BaseException) -> str:
    """Says that memory ran out, and how much was asked for; empty for any other error."""
    text = str(error)
    known = isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)
    if not known:
        return ""
    asked = re.search(r"allocate (\d+ bytes|[\d.]+ \wiB)", text)
    return f"memory ran out ({asked[1]} could not be had)" if asked else "memory ran out"
