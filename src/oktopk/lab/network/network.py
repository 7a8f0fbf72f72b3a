"""Hosts on an emulated network: namespaces, joined by a bridge, their links shaped by the kernel.

```
 host 0: eth0 ══ port0 ┐
 host 1: eth0 ══ port1 ┼ bridge        a namespace for every host, and one for the switch
 host 2: eth0 ══ port2 ┘
```

The kernel shapes both ends of a host's cable. `eth0`, the host's end, limits the rate of sending;
`portN`, the switch's end, limits the rate of receiving. Only the switch's end delays packets, so
each packet is delayed once. All of this is outside the machine's own namespace, and has no way to
it: hosts reach each other and nobody else.

    with Network(4, Link("1gbit", "0.2ms")) as network:
        processes = [network.start(host, ["hostname"]) for host in range(4)]
        ...
        print(network.counters())
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import UserError
from . import line, namespaces
from .hosts import Counters, Host, Hosts, check_hosts
from .iproute import ELSE, batch, call, has_netem, try_batch, unavailable
from .link import Link

_NO_IPV6 = "for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $file; done"


class Network(Hosts):
    """Hosts on a network of their own, which exists until `close` or the end of the `with` block.

    The hosts are called host0, host1, ..., and find each other by these names.
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
        # All ports of a new host are free, and the system picks none of these by itself.
        return self.hosts[0].address, 29500

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        here = self.hosts[host]
        # Each program replaces itself with the next, so that process, signals and exit code are
        # the command's.
        enter = ["ip", "netns", "exec", here.name, "unshare", "--uts"]
        rename = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', f"host{host}"]
        return self._popen(here, [*enter, *rename, *command], env, popen)

    def shape(self, link: Link) -> None:
        """Change the links of all hosts, even while they are in use. If it fails, try again.

        A connection keeps the packet size that it began with. If a slower link takes only smaller
        packets, the kernel cuts them in software, which takes time: better connect anew.
        """
        self._unshape()
        self.link = Link()
        cut = f"gso_max_size {link.largest_packet}"
        for host in self.hosts:
            batch("ip", host.name, f"link set {host.interface} {cut}")
            if link.shaped:
                batch("tc", host.name, f"qdisc add dev {host.interface} root {link.bucket}")
        if link.far and not has_netem():
            self._start_line(link)
        for port in self._ports:
            disciplines = [link.bucket] if link.shaped else []
            disciplines += [link.netem] if link.far and not self._line else []
            for number, discipline in enumerate(disciplines, 1):
                parent = f"parent {number - 1}:1" if number > 1 else "root"
                add = f"qdisc add dev {port} {parent} handle {number}: {discipline}"
                batch("tc", self._switch, add)
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
        for name in (self._switch, *(host.name for host in self.hosts)):
            call("ip", "netns", "add", name)
            if os.path.exists("/proc/sys/net/ipv6"):
                call("ip", "netns", "exec", name, "sh", "-c", _NO_IPV6)
        # IPv6 and multicast snooping send packets by themselves. Without both, the counters stand
        # still while nobody sends.
        bridge = "link add bridge type bridge mcast_snooping 0"
        batch("ip", self._switch, bridge, "link set bridge up")
        known = "127.0.0.1 localhost\n" + "".join(
            # torch listens on sockets for both IPs, and looks up addresses in the style of IPv6.
            f"{host.address} host{number}\n::ffff:{host.address} host{number}-mapped\n"
            for number, host in enumerate(self.hosts)
        )
        for number, (host, port) in enumerate(zip(self.hosts, self._ports, strict=True)):
            end = f"{host.interface} address {_hardware(number)} netns {host.name}"
            batch(
                "ip",
                self._switch,
                f"link add {port} type veth peer name {end}",
                f"link set {port} master bridge up",
            )
            batch(
                "ip",
                host.name,
                "link set lo up",
                f"address add {host.address}/24 dev {host.interface}",
                f"link set {host.interface} up",
            )
            try:
                namespaces.write_hosts(host.name, known)
            except OSError as error:
                raise UserError(
                    f"{error.filename}, the /etc/hosts of an emulated host, cannot be written "
                    f"({error.strerror}); {ELSE}"
                ) from None

    def _unshape(self) -> None:
        """Remove all shaping; after a failure, any part of it may be missing."""
        for host in self.hosts:
            try_batch("tc", host.name, f"qdisc del dev {host.interface} root")
        for kind in ("root", "ingress"):
            try_batch("tc", self._switch, *(f"qdisc del dev {port} {kind}" for port in self._ports))
        if self._line:
            self._line.kill()
            self._line.wait()
            self._line = None
        try_batch("ip", self._switch, "link del line")

    def _start_line(self, link: Link) -> None:
        """Send all traffic of the hosts through a process that delays it: see line.py."""
        batch(
            "ip",
            self._switch,
            "tuntap add dev line mode tap vnet_hdr",
            "link set line txqueuelen 10000 master bridge up",
        )
        # All traffic now enters the bridge at `line`. So the bridge cannot learn where the hosts
        # are, and must send nothing back to `line`.
        batch(
            "bridge",
            self._switch,
            "link set dev line learning off flood off mcast_flood off bcast_flood off",
            *(
                f"fdb replace {_hardware(number)} dev {port} master static"
                for number, port in enumerate(self._ports)
            ),
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
            batch(
                "tc",
                self._switch,
                f"qdisc add dev {port} ingress",
                f"filter add dev {port} parent ffff: protocol all {redirect}",
            )


def _counters(host: Host) -> Counters:
    shown = call("ip", "-n", host.name, "-j", "-s", "link", "show", "dev", host.interface)
    counted = json.loads(shown)[0]["stats64"]
    sent, received = counted["tx"], counted["rx"]
    return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])


def _hardware(number: int) -> str:
    return f"02:00:0a:4d:00:{number + 1:02x}"
