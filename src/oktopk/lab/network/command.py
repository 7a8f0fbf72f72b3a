"""`oktopk lab`: run a command on every host of an emulated network.

1. Bring up the hosts, and start every rank with the environment that a launcher would set.
2. Rank 0 keeps the terminal; lines of the others begin with their rank.
3. When a rank fails, give the others a moment to end by themselves, then end them.
4. Show a table of what the interfaces have counted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TextIO

from ...common.errors import UserError
from ...common.format import byte_size, table
from . import Counters, Hosts, Link, Loopback, Network
from .ranks import environment

DESCRIPTION = """Run a command on every host of an emulated network: hosts with links of a given
rate and delay, on this machine. Needs root.

Each rank has the environment that torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK and NODE_RANK (the host), NNODES, MASTER_ADDR, MASTER_PORT,
and GLOO_, NCCL_ and TP_SOCKET_IFNAME. In the arguments of COMMAND, these are replaced:

  {rank} {size}        of this process, among all
  {host} {hosts}       the number of its host, from 0, and how many there are
  {local_rank}         among the ranks of its host
  {address} {port}     where ranks meet, on host 0
  {own_address}        of its host
"""

EXAMPLES = """examples:
  oktopk lab --hosts 4 --rate 1gbit --delay 0.2ms -- oktopk train --max-steps 100
  oktopk lab --hosts 4 --rate 100mbit -- torchrun --nnodes 4 --nproc-per-node 1 \\
      --rdzv-backend c10d --rdzv-endpoint {address}:{port} -m oktopk train
  oktopk lab --hosts 2 -- torchrun --nnodes 2 --nproc-per-node 2 --node-rank {host} \\
      --master-addr {address} --master-port {port} -m oktopk train
  oktopk lab --hosts 2 --ranks-per-host 2 --loopback -- python script.py --seed {rank}
"""

_MOST_RANKS = 256  # on a host
_SECONDS_ALONE = 3.0  # for ranks to end by themselves after one has failed
_SECONDS_TO_END = 10.0  # after they were asked to
_INTERVAL = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="2 unless given")
    parser.add_argument(
        "--rate", help="of every host, each way: 1gbit, 100mbit; unless given, none"
    )
    parser.add_argument("--delay", help="one way between hosts: 0.2ms, 200us; unless given, none")
    parser.add_argument("--loss", type=float, default=0.0, help="per cent of packets")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="1 unless given")
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="use this machine's loopback instead; no shaping, no root needed",
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the command behind the first `--`."""
    given = [*arguments, "--"]
    at = given.index("--")
    ours, command = given[:at], given[at + 1 : -1]
    if not command and not {"-h", "--help"} & {*ours}:
        raise UserError("there is no command: write it after --, as in oktopk lab -- COMMAND")
    return ours, command


def run(parsed: argparse.Namespace, command: Sequence[str]) -> int:
    """Run it; the exit code is that of the rank that failed first, or 0."""
    if not shutil.which(command[0]):
        raise UserError(
            f"{command[0]!r} is not a command that can be run: give its path, or activate its "
            "environment"
        )
    if not 1 <= parsed.ranks_per_host <= _MOST_RANKS:
        raise UserError(f"--ranks-per-host is {parsed.ranks_per_host}: take 1 to {_MOST_RANKS}")
    link = Link(parsed.rate, parsed.delay, parsed.loss)
    if parsed.loopback and (link.shaped or link.far):
        given = "--rate" if link.shaped else "--delay" if link.seconds else "--loss"
        raise UserError(f"the loopback is not shaped: leave out either {given} or --loopback")
    with _signals() as asked:
        began = time.monotonic()
        with Loopback(parsed.hosts) if parsed.loopback else Network(parsed.hosts, link) as hosts:
            ranks = _start(hosts, parsed.ranks_per_host, command)
            code = _wait(ranks, asked)
            counters = hosts.counters()
    for rank in ranks:
        rank.finish()
    if asked:
        print("oktopk: interrupted", file=sys.stderr)
        return 128 + asked[0]
    _table(hosts, counters, ranks, began)
    return code


class _Rank:
    """A rank's process, when it ended, and the threads that pass its lines on."""

    def __init__(self, number: int, host: int, process: subprocess.Popen[str]) -> None:
        self.number, self.host, self.process = number, host, process
        self.ended: float | None = None
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._pass_on, args=(source, target), daemon=True)
            for source, target in pairs
            if source
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, source: TextIO, target: TextIO) -> None:
        with source, contextlib.suppress(BrokenPipeError):  # nobody reads any more
            for line in source:
                target.write(f"[{self.number}] {line.rstrip()}\n")
                target.flush()

    def poll(self, now: float) -> int | None:
        """The exit code, as a shell would give it; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = now
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """Wait for its last lines."""
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)


def _start(hosts: Hosts, ranks_per_host: int, command: Sequence[str]) -> list[_Rank]:
    address, port = meeting = hosts.meeting
    size = len(hosts.hosts) * ranks_per_host
    ranks = []
    for rank in range(size):
        host, local_rank = divmod(rank, ranks_per_host)
        values = {
            "rank": rank,
            "size": size,
            "host": host,
            "hosts": len(hosts.hosts),
            "local_rank": local_rank,
            "address": address,
            "port": port,
            "own_address": hosts.hosts[host].address,
        }
        pipes: dict[str, Any] = {}
        if rank > 0:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = hosts.start(
            host,
            [_fill(argument, values) for argument in command],
            environment(hosts, ranks_per_host, rank, meeting),
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            **pipes,
        )
        ranks.append(_Rank(rank, host, process))
    return ranks


def _wait(ranks: Sequence[_Rank], asked: Sequence[int]) -> int:
    """Wait until all have ended, or their time is up; the exit code of the first that failed."""
    failed = 0
    ending = False
    deadline = math.inf
    while True:
        now = time.monotonic()
        codes = [rank.poll(now) for rank in ranks]
        for rank, code in zip(ranks, codes, strict=True):
            if code and not failed:
                failed, deadline = code, min(deadline, now + _SECONDS_ALONE)
                if not asked:
                    print(f"oktopk: rank {rank.number} failed, exit code {code}", file=sys.stderr)
        late = now >= deadline
        if None not in codes or (ending and late) or len(asked) > 1:
            return failed
        if (asked or late) and not ending:
            for rank in ranks:
                rank.signal(asked[0] if asked else signal.SIGTERM)
            ending, deadline = True, now + _SECONDS_TO_END
        time.sleep(_INTERVAL)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Note Ctrl-C and SIGTERM, so that the ranks can be ended in good order."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _table(
    hosts: Hosts, counters: Sequence[Counters], ranks: Sequence[_Rank], began: float
) -> None:
    """Show the traffic of each host, on stderr: stdout belongs to the command."""
    if not counters:
        return
    rows = [["host", "address", "sent", "received", "seconds"]]
    now = time.monotonic()
    for number, (host, counted) in enumerate(zip(hosts.hosts, counters, strict=True)):
        seconds = max((rank.ended or now) - began for rank in ranks if rank.host == number)
        moved = (byte_size(counted.sent_bytes), byte_size(counted.received_bytes))
        rows.append([str(number), host.address, *moved, f"{seconds:.1f}"])
    print("\n".join(table(rows, left=2)), file=sys.stderr)


def _fill(argument: str, values: dict[str, Any]) -> str:
    """Replace the names that we know; other braces may be part of a program."""
    pattern = "|".join(values)
    return re.sub(r"\{(" + pattern + r")\}", lambda match: str(values[match[1]]), argument)
