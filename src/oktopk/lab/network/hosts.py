"""Hosts to run commands on, and the loopback as the simplest kind of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import UserError
from . import namespaces

MOST_HOSTS = 254
LINUX = sys.platform.startswith("linux")


@dataclass(frozen=True)
class Host:
    name: str
    """Of its namespace."""
    address: str
    interface: str


@dataclass(frozen=True)
class Counters:
    """Counters of an interface since it was made, headers included.

    One packet is up to 64 kB, as on a machine whose network card cuts and joins packets.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class Hosts(ABC):
    """Places to run commands. The commands end with them, however they end: see namespaces.py."""

    hosts: list[Host]

    def __init__(self, run: str) -> None:
        self.run = run
        """Names of all that belongs to these hosts begin with it."""
        self._processes: list[subprocess.Popen[Any]] = []
        self._keeper = namespaces.keep(run) if LINUX else None

    @property
    @abstractmethod
    def meeting(self) -> tuple[str, int]:
        """An address and a free port on host 0, for ranks to meet."""

    @abstractmethod
    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, as `subprocess.Popen` does, in a session of its own.

        Args:
            env: instead of this process's environment; the interface is added to it.
            popen: further arguments of Popen.
        """

    def counters(self) -> list[Counters]:
        """The counters of each host's interface; empty if hosts have none of their own."""
        return []

    def close(self) -> None:
        """End everything that runs on the hosts, and remove the hosts."""
        if LINUX:
            namespaces.remove(self.run)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._keeper:
            self._keeper.kill()
            self._keeper.wait()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _popen(
        self, host: Host, command: list[str], env: Mapping[str, str] | None, popen: dict[str, Any]
    ) -> subprocess.Popen[Any]:
        # Otherwise torch's backends look up the machine's name, and use the address that they find.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        ours = {namespaces.MARK: self.run, **dict.fromkeys(names, host.interface)}
        try:
            process = subprocess.Popen(
                command,
                env={**(os.environ if env is None else env), **ours},
                **{"start_new_session": True, **popen},
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None
        self._processes.append(process)
        return process


class Loopback(Hosts):
    """Hosts without a network of their own: all are this machine, and talk over its loopback."""

    def __init__(self, hosts: int) -> None:
        check_hosts(hosts)
        super().__init__(namespaces.new_run())
        names = {name for _, name in socket.if_nameindex()}
        interface = "lo" if "lo" in names else "lo0"
        self.hosts = [Host(f"host{number}", "127.0.0.1", interface) for number in range(hosts)]

    @property
    def meeting(self) -> tuple[str, int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return "127.0.0.1", free.getsockname()[1]

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        return self._popen(self.hosts[host], list(command), env, popen)


def check_hosts(hosts: int) -> None:
    """UserError if a network cannot have so many hosts."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise UserError(f"there can be no network of {hosts} hosts: take 1 to {MOST_HOSTS}")
