"""The commands of iproute2 (ip, tc, bridge), and what they can do on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from functools import cache

from ...common.errors import UserError
from .hosts import LINUX

ELSE = "--loopback runs the same on this machine's loopback, without shaping"


@cache
def unavailable() -> str | None:
    """Why no network can be emulated here, and what to do about it; None if one can."""
    if not LINUX:
        return f"the emulated network needs Linux; {ELSE}"
    packages = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "unshare": "util-linux"}
    for command, package in packages.items():
        if not shutil.which(command):
            return (
                f"the emulated network needs the command `{command}`: install {package} "
                f"(Debian: apt install {package}); {ELSE}"
            )
    if os.geteuid() != 0:
        return f"the emulated network needs root: use sudo; {ELSE}"
    trial = "ip link add bridge type bridge && ip link add one type veth peer name other"
    if error := _trial("--mount", "--uts", "sh", "-c", trial):
        return (
            f"no network can be emulated here ({error}): a container must be started with "
            f"--privileged for that; {ELSE}"
        )
    return None


@cache
def has_netem() -> bool:
    """Whether the kernel itself can delay and lose packets."""
    return not _trial("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")


def batch(tool: str, space: str, *commands: str) -> None:
    """Run commands of a tool in a namespace."""
    call(tool, "-n", space, "-batch", "-", given="\n".join(commands))


def try_batch(tool: str, space: str, *commands: str) -> None:
    """Run those commands that succeed."""
    with contextlib.suppress(UserError):
        call(tool, "-n", space, "-force", "-batch", "-", given="\n".join(commands))


def call(*command: str, given: str = "") -> str:
    """The output of a command; UserError if it fails."""
    # In a session of its own: Ctrl-C is for this process to answer, and would leave things half
    # done.
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        asked = given.replace("\n", "; ")
        raise UserError(f"`{' '.join(command)}` failed: {_reason(done)} {asked}".rstrip())
    return done.stdout


def _trial(*arguments: str) -> str:
    """The error of a command in a temporary network namespace; empty if it succeeds."""
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
