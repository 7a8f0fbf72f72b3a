"""Hosts on an emulated network: namespaces, joined by a bridge, their links shaped by the kernel.

```
 host 0: eth0 ══ port0 ┐
 host 1: eth0 ══ port1 ┼ bridge        a namespace for every host, and one for the switch
 host 2: eth0 ══ port2 ┘
```

A host can send no faster than its rate, since what leaves its end of the cable (`eth0`) is shaped;
nor receive faster, since what leaves the switch's end (`portN`) is. The delay lies at the switch's
end only, so a packet meets it once. Nothing of this is in the machine's own namespace, or has a way
to it: hosts reach each other and nobody else.

    with Network(4, Link("1gbit", "0.2ms")) as network:
        processes = [network.start(host, ["hostname"]) for host in range(4)]
        ...
        print(network.counters())
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...common.errors import UserError
from . import line, namespaces
from .link import Link

__all__ = [
    "Counters",
    "Host",
    "Hosts",
    "Link",
    "Loopback",
    "Network",
    "check_hosts",
    "unavailable",
]

MOST_HOSTS = 254
_LINUX = sys.platform.startswith("linux")
_ELSE = "--loopback runs the same on this machine's loopback, without shaping"


@dataclass(frozen=True)
class Host:
    name: str
    """Of its namespace."""
    address: str
    interface: str


@dataclass(frozen=True)
class Counters:
    """What an interface has counted, headers included, since it was made.

    As on a machine whose network card cuts and joins packets, one packet is up to 64 kB.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class Hosts(ABC):
    """Something to run commands on; they end with it, however it ends: see namespaces.py."""

    hosts: list[Host]

    def __init__(self, run: str) -> None:
        self.run = run
        """Names of all that belongs to these hosts begin with it."""
        self._processes: list[subprocess.Popen[Any]] = []
        self._keeper = namespaces.keep(run) if _LINUX else None

    @property
    @abstractmethod
    def meeting(self) -> tuple[str, int]:
        """An address and a free port on host 0, for ranks to meet."""

    @abstractmethod
    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, as `subprocess.Popen` does, in a session of its own.

        Args:
            env: instead of this process's environment; the interface is added to either.
            popen: further arguments of Popen.
        """

    def counters(self) -> list[Counters]:
        """What each host's interface has counted until now; empty if hosts have none."""
        return []

    def close(self) -> None:
        """End everything that runs on the hosts, and take the hosts away."""
        if _LINUX:
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
        # Otherwise torch's backends look up the machine's name, and take the address they find.
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
    """The same without a network: all hosts are this machine, and speak over its loopback."""

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
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        return self._popen(self.hosts[host], list(command), env, popen)


class Network(Hosts):
    """Hosts on a network of their own, from here until `close`, or the end of the `with` block.

    Commands see their host's name and find the others by theirs: host0, host1, ...
    """

    def __init__(self, hosts: int, link: Link | None = None) -> None:
        check_hosts(hosts)
        if reason := unavailable():
            raise UserError(reason)
        namespaces.remove_left_over()
        run = namespaces.new_run()
        super().__init__(run)
        numbers = range(hosts)
        self.hosts = [
            Host(f"{run}-{number}", f"10.77.0.{number + 1}", "eth0") for number in numbers
        ]
        self.link = Link()
        self._switch = f"{run}-switch"
        self._ports = [f"port{number}" for number in numbers]
        self._line: subprocess.Popen[bytes] | None = None
        try:
            self._build()
            self.shape(link or Link())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    @property
    def meeting(self) -> tuple[str, int]:
        # On a host that is new all ports are free; the system takes none of these by itself.
        return self.hosts[0].address, 29500

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[Any]:
        here = self.hosts[host]
        # Each of these becomes the next, so that process, signals and exit code are the command's.
        enter = ["ip", "netns", "exec", here.name, "unshare", "--uts"]
        rename = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', f"host{host}"]
        return self._popen(here, [*enter, *rename, *command], env, popen)

    def shape(self, link: Link) -> None:
        """Change the links of all hosts, also while they are in use. If it fails, try again.

        A connection's packets stay as large as when it was made. Where a slower link takes only
        smaller ones, the kernel cuts them in software, which takes time: better connect anew.
        """
        self._unshape()
        self.link = Link()
        cut = f"gso_max_size {link.largest_packet}"
        for host in self.hosts:
            _batch("ip", host.name, [f"link set {host.interface} {cut}"])
            if link.shaped:
                _batch("tc", host.name, [f"qdisc add dev {host.interface} root {link.bucket}"])
        if link.far and not has_netem():
            self._start_line(link)
        for port in self._ports:
            disciplines = [link.bucket] if link.shaped else []
            disciplines += [link.netem] if link.far and not self._line else []
            for number, discipline in enumerate(disciplines, 1):
                parent = f"parent {number - 1}:1" if number > 1 else "root"
                add = f"qdisc add dev {port} {parent} handle {number}: {discipline}"
                _batch("tc", self._switch, [add])
        self.link = link

    def counters(self) -> list[Counters]:
        return [_counters(host) for host in self.hosts]

    def close(self) -> None:
        if self._line:
            self._line.kill()
        super().close()
        if self._line:
            self._line.wait()

    def _build(self) -> None:
        # Without IPv6 and a bridge that watches multicasts, which announce themselves, the counters
        # stand still while nobody sends.
        quiet = "for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $file; done"
        for name in (self._switch, *(host.name for host in self.hosts)):
            _run(["ip", "netns", "add", name])
            if os.path.exists("/proc/sys/net/ipv6"):
                _run(["ip", "netns", "exec", name, "sh", "-c", quiet])
        bridge = "link add bridge type bridge mcast_snooping 0"
        _batch("ip", self._switch, [bridge, "link set bridge up"])
        known = "127.0.0.1 localhost\n" + "".join(
            # torch listens on sockets for both IPs, and asks for names of addresses in IPv6's style
            f"{host.address} host{number}\n::ffff:{host.address} host{number}-mapped\n"
            for number, host in enumerate(self.hosts)
        )
        for number, (host, port) in enumerate(zip(self.hosts, self._ports, strict=True)):
            end = f"{host.interface} address {_hardware(number)} netns {host.name}"
            _batch(
                "ip",
                self._switch,
                [
                    f"link add {port} type veth peer name {end}",
                    f"link set {port} master bridge up",
                ],
            )
            _batch(
                "ip",
                host.name,
                [
                    "link set lo up",
                    f"address add {host.address}/24 dev {host.interface}",
                    f"link set {host.interface} up",
                ],
            )
            try:
                namespaces.write_hosts(host.name, known)
            except OSError as error:
                raise UserError(
                    f"{error.filename} cannot be written ({error.strerror}), where hosts have "
                    f"their /etc/hosts; {_ELSE}"
                ) from None

    def _unshape(self) -> None:
        """Take away what there is; after a failure that may be any part of it."""
        for host in self.hosts:
            _try("tc", host.name, [f"qdisc del dev {host.interface} root"])
        for kind in ("root", "ingress"):
            _try("tc", self._switch, [f"qdisc del dev {port} {kind}" for port in self._ports])
        if self._line:
            self._line.kill()
            self._line.wait()
            self._line = None
        _try("ip", self._switch, ["link del line"])

    def _start_line(self, link: Link) -> None:
        """Lead all that comes from the hosts through a process that delays it: see line.py."""
        _batch(
            "ip",
            self._switch,
            [
                "tuntap add dev line mode tap vnet_hdr",
                "link set line txqueuelen 10000 master bridge up",
            ],
        )
        # All of it enters the bridge at `line` then. So the bridge cannot learn where the hosts
        # are, and must send nothing back to `line`.
        _batch(
            "bridge",
            self._switch,
            [
                "link set dev line learning off flood off mcast_flood off bcast_flood off",
                *(
                    f"fdb replace {_hardware(number)} dev {port} master static"
                    for number, port in enumerate(self._ports)
                ),
            ],
        )
        self._line = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._switch, sys.executable, "-I", "-S", line.__file__),
                *("line", str(link.seconds), str(link.loss)),
            ],
            env={**os.environ, namespaces.MARK: self.run},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._line.stdout
        with self._line.stdout as said:
            if said.readline() != b"ready\n":
                raise UserError(
                    "delay and loss need a kernel with netem (modprobe sch_netem; Ubuntu: apt "
                    "install linux-modules-extra-$(uname -r)), or with TAP devices (/dev/net/tun)"
                )
        redirect = "u32 match u32 0 0 action mirred egress redirect dev line"
        for port in self._ports:
            _batch(
                "tc",
                self._switch,
                [
                    f"qdisc add dev {port} ingress",
                    f"filter add dev {port} parent ffff: protocol all {redirect}",
                ],
            )


@cache
def unavailable() -> str | None:
    """Why there can be no emulated network here, and what to do about it; None if there can."""
    if not _LINUX:
        return f"the emulated network needs Linux; {_ELSE}"
    packages = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "unshare": "util-linux"}
    for command, package in packages.items():
        if not shutil.which(command):
            return (
                f"the emulated network needs the command `{command}`: install {package} "
                f"(Debian: apt install {package}); {_ELSE}"
            )
    if os.geteuid() != 0:
        return f"the emulated network needs root: use sudo; {_ELSE}"
    trial = "ip link add bridge type bridge && ip link add one type veth peer name other"
    if error := _trial(["--mount", "--uts", "sh", "-c", trial]):
        return (
            f"no network can be emulated here ({error}): a container must be started with "
            f"--privileged for that; {_ELSE}"
        )
    return None


@cache
def has_netem() -> bool:
    """Can the kernel itself delay and lose packets?"""
    return not _trial(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])


def check_hosts(hosts: int) -> None:
    """UserError if there can be no network of so many."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise UserError(f"there can be no network of {hosts} hosts: take 1 to {MOST_HOSTS}")


def _counters(host: Host) -> Counters:
    shown = _run(["ip", "-n", host.name, "-j", "-s", "link", "show", "dev", host.interface])
    counted = json.loads(shown)[0]["stats64"]
    sent, received = counted["tx"], counted["rx"]
    return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])


def _hardware(number: int) -> str:
    return f"02:00:0a:4d:00:{number + 1:02x}"


def _batch(tool: str, space: str, commands: Sequence[str]) -> None:
    _run([tool, "-n", space, "-batch", "-"], "\n".join(commands))


def _try(tool: str, space: str, commands: Sequence[str]) -> None:
    """Those of the commands that can be done."""
    with contextlib.suppress(UserError):
        _run([tool, "-n", space, "-force", "-batch", "-"], "\n".join(commands))


def _run(command: Sequence[str], given: str = "") -> str:
    # In a session of its own: Ctrl-C is for us to answer, and would leave things half done.
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        asked = given.replace("\n", "; ")
        raise UserError(f"`{' '.join(command)}` failed: {_reason(done)} {asked}".rstrip())
    return done.stdout


def _trial(arguments: Sequence[str]) -> str:
    """What goes wrong in a network namespace that is gone afterwards; nothing if all goes well."""
    done = subprocess.run(
        ["unshare", "--net", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return _reason(done) if done.returncode else ""


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter(done.stderr.strip().splitlines()), "no reason given")
