"""Network namespaces whose names say whose they are, so that none outlives its owner.

The names of a run are `oktopk-PID-START-SPACE-RANDOM-PART`. PID and START name the owner: a number
and the clock tick at which it began. A later process with the same number began at another tick.
SPACE is the PID namespace of that number: containers may share the folders below, but see only
their own processes, and leave alone the runs of others. So anybody can tell which runs are dead,
and may remove them, with all processes that still run inside:

1. the owner itself, when it is done (`remove`);
2. its keeper, a small process that watches the owner and outlives even a kill -9 of it;
3. the next run, should the keeper be dead as well (`remove_left_over`).

The keeper is this file, run as a script. It imports nothing of the package, which would take
seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "OKTOPK_LAB"
"""Environment variable of a run's processes; its value is the run. It identifies processes on the
loopback, which have no namespace of their own."""

_NAMES = Path("/run/netns")  # both are where `ip netns` keeps them
_FILES = Path("/etc/netns")
_RUN = re.compile(r"(oktopk-(\d+)-(\d+)-(\d+)-[0-9a-f]+)(?:-\w+)?")
_MADE = "made"  # the part of a run that made /etc/netns
_SECONDS_TO_DIE = 10.0


def new_run() -> str:
    """A name for a run of this process."""
    pid = os.getpid()
    return f"oktopk-{pid}-{_began(pid)}-{_space()}-{secrets.token_hex(3)}"


def keep(run: str) -> subprocess.Popen[bytes]:
    """Start the keeper of a run. It is in a session of its own, which no Ctrl-C reaches."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, run],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def remove(run: str) -> None:
    """End the processes of a run, and remove its namespaces and the files that belong to them."""
    end(run)
    for name in _parts(_NAMES, run):
        subprocess.run(  # out of reach of Ctrl-C; fails if another did it first
            ["ip", "netns", "del", name],
            stderr=subprocess.DEVNULL,
            check=False,
            start_new_session=True,
        )
    files = _parts(_FILES, run)
    for name in files:
        shutil.rmtree(_FILES / name, ignore_errors=True)
    if f"{run}-{_MADE}" in files:
        with contextlib.suppress(OSError):  # others have files there
            _FILES.rmdir()


def remove_left_over() -> None:
    """Remove all runs whose owner is gone, as far as can be seen from here."""
    names = [name for folder in (_NAMES, _FILES) for name in _list(folder)]
    for run in {match[1] for name in names if (match := _RUN.fullmatch(name))}:
        if _owner(run)[2] == _space() and not _owner_lives(run):
            remove(run)


def end(run: str) -> None:
    """Kill all processes of a run, and those that they start meanwhile."""
    until = time.monotonic() + _SECONDS_TO_DIE
    while time.monotonic() < until:
        found = False
        for process in _processes(run):
            found = True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)


def write_hosts(name: str, text: str) -> None:
    """Write the /etc/hosts of a namespace; `ip netns exec` shows it to processes."""
    try:
        folder = _make_folder(name)
    except FileNotFoundError:  # another run, which had made /etc/netns, removed it meanwhile
        folder = _make_folder(name)
    (folder / "hosts").write_text(text)


def _make_folder(name: str) -> Path:
    with contextlib.suppress(FileExistsError):
        _FILES.mkdir()
        (_FILES / f"{name.rpartition('-')[0]}-{_MADE}").mkdir()
    folder = _FILES / name
    folder.mkdir()
    return folder


def _processes(run: str) -> Iterator[int]:
    """Processes of a run as file descriptors, which stay valid if a number is used again."""
    spaces = set()
    for name in _parts(_NAMES, run):
        with contextlib.suppress(OSError):
            spaces.add(_identity(_NAMES / name))
    mark = f"{MARK}={run}".encode()
    for pid in _list(Path("/proc")):
        if not pid.isdecimal() or int(pid) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            process = os.pidfd_open(int(pid))
            try:
                folder = Path("/proc", pid)
                ours = _identity(folder / "ns" / "net") in spaces
                if ours or mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield process
            finally:
                os.close(process)


def _identity(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_dev, facts.st_ino


def _parts(folder: Path, run: str) -> list[str]:
    return [name for name in _list(folder) if name.startswith(f"{run}-")]


def _list(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _owner(run: str) -> tuple[int, str, str]:
    match = _RUN.fullmatch(run)
    assert match
    return int(match[2]), match[3], match[4]


def _owner_lives(run: str) -> bool:
    pid, began, _ = _owner(run)
    return _began(pid) == began


def _space() -> str:
    """The PID namespace of this process."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not on Linux
        return "0"


def _began(pid: int) -> str:
    """The clock tick at which a process began; empty if there is no such process."""
    try:
        # pid (name) state ... the 22nd field is the start; a name may contain anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _watch(run: str) -> None:
    """Wait until the owner is gone, then remove the run."""
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(_owner(run)[0])
        if _owner_lives(run):
            select.select([owner], [], [])
    remove(run)


if __name__ == "__main__":
    _watch(sys.argv[1])
