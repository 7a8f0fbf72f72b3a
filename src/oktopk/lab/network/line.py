"""Delay and loss, for kernels that were built without netem: `python line.py TAP SECONDS LOSS`.

This process reads the frames that a TAP device sends, holds them for a while, and hands them back
as if the device had received them. Offloads are on, so a frame has up to 64 kB of TCP, as between
the kernel and a real network card. At 1 Gbit/s that makes only a few thousand frames a second. The
script imports nothing of the package, which would take seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFORMATION, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENT_IPV4, _SEGMENT_IPV6, _SEGMENT_ECN = 1, 2, 4, 8
_LARGEST = 10 + 14 + 65536  # the header of offloads, that of Ethernet, a packet
_AT_ONCE = 64


def run(device: str, seconds: float, loss: float) -> None:
    """Pass frames on, until killed.

    Args:
        loss: per cent of the frames.
    """
    line = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFORMATION | _OFFLOAD_HEADER
    fcntl.ioctl(line, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
    offloads = _CHECKSUM | _SEGMENT_IPV4 | _SEGMENT_IPV6 | _SEGMENT_ECN
    fcntl.ioctl(line, _TUNSETOFFLOAD, offloads)
    with contextlib.suppress(OSError):  # a delay of 0.1 ms cannot wait for a turn of several ms
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    # On another core, a frame would wait in another queue, and could overtake earlier ones.
    os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})
    gc.disable()
    print("ready", flush=True)

    held: deque[tuple[float, bytes]] = deque()
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            with contextlib.suppress(OSError):  # a wire does not report its losses
                os.write(line, held.popleft()[1])
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        if not select.select([line], [], [], wait)[0]:
            continue
        with contextlib.suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                frame = os.read(line, _LARGEST)
                if loss == 0 or random.random() * 100 >= loss:
                    held.append((time.monotonic() + seconds, frame))


if __name__ == "__main__":
    run(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
