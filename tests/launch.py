"""Processes for tests: the real torchrun, and a fork server whose children start at once.

Importing torch takes seconds. `Warm` starts one process that imports everything once and then
forks children. Each child runs a script like `python script arguments` would. The same file is
the program of the server:

    python tests/launch.py MODULE ...

The server reads commands as lines of JSON and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def torchrun(script: Path, *args: object, processes: int = 2, timeout: float = 120.0) -> str:
    """Run a script with the real torchrun. Return its output; fail if the script fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [*launcher, str(script), *map(str, args)]
    # Files, not pipes: a rank that outlives the launcher would hold a pipe open for ever.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **LOOPBACK},
            stdout=out,
            stderr=err,
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"none after {timeout:.0f} seconds"
        finally:
            _end(process)
        out.seek(0)
        err.seek(0)
        printed = out.read()
        assert code == 0, f"exit code {code}\n{printed}\n{err.read()}"
    return printed


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: torchrun then ends its ranks, which are in sessions of their own."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(40)  # torchrun gives its ranks 30 seconds
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Warm:
    """A fork server that has imported `modules`; `torchrun`, `alone` and `start` fork from it."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *modules],
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as torchrun does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests
        )

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def torchrun(
        self, script: Path, *args: object, processes: int = 2, timeout: float = 120.0
    ) -> str:
        """Like the function `torchrun`: set the variables that torchrun sets for its ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size = str(processes)
        common = {
            **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1"},
            **{"ROLE_WORLD_SIZE": size, "ROLE_NAME": "default", "GROUP_RANK": "0"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_RUN_ID": str(port), "TORCHELASTIC_RESTART_COUNT": "0"},
            **{"TORCHELASTIC_MAX_RESTARTS": "0"},
        }
        names = ("RANK", "LOCAL_RANK", "ROLE_RANK")
        each = [common | dict.fromkeys(names, str(rank)) for rank in range(processes)]
        return self._output(script, args, each, timeout)

    def alone(self, script: Path, *args: object, timeout: float = 120.0) -> str:
        """Run a script in one process, without ranks. Return its output."""
        return self._output(script, args, [{}], timeout)

    def _output(
        self, script: Path, args: tuple[object, ...], each: list[dict[str, str]], timeout: float
    ) -> str:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            children = [
                self.start(
                    script, *args, environ={**os.environ, **LOOPBACK, **own}, out=out, err=err
                )
                for own in each
            ]
            codes = self.wait(*children, timeout=timeout)
            printed = out.read_text()
            assert not any(codes), f"exit codes {codes}\n{printed}\n{err.read_text()}"
            assert None not in codes, f"no end after {timeout:.0f} seconds\n{printed}"
        return printed

    def start(
        self,
        script: Path,
        *args: object,
        out: Path,
        err: Path,
        environ: Mapping[str, str] | None = None,
        folder: Path = Path(),
    ) -> int:
        """Start a script and return its process id. The script appends its output to files."""
        child = self._ask(
            script=str(script),
            args=list(map(str, args)),
            environ={**os.environ, **LOOPBACK} if environ is None else dict(environ),
            folder=str(folder.resolve()),
            out=str(out),
            err=str(err),
        )
        return int(child)

    def wait(self, *children: int, timeout: float = 120.0) -> list[int | None]:
        """Wait until all have ended, one has failed, or it is late. Kill those that still run.

        Returns their exit codes; None means killed here.
        """
        codes: list[int | None] = self._ask(wait=children, seconds=timeout)
        late = [child for child, code in zip(children, codes, strict=True) if code is None]
        for child in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            self._ask(wait=[child], seconds=30)
        return codes

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def _serve() -> dict[str, Any] | None:
    """Follow commands until there are no more. In a child, return the command to run.

    The child leaves the loop and ends like any program, with all that Python does at the end.
    """
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer: Any = _codes(command["wait"], command["seconds"])
        else:
            answer = os.fork()
            if answer == 0:
                return dict(command)
        print(json.dumps(answer), flush=True)
    return None


def _codes(children: list[int], seconds: float) -> list[int | None]:
    """Exit codes, once all have ended or one has failed; None for those that still run."""
    codes: dict[int, int | None] = dict.fromkeys(children)
    until = time.monotonic() + seconds
    while True:
        for child in [child for child, code in codes.items() if code is None]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        if all(code == 0 for code in codes.values()) or any(codes.values()):
            return list(codes.values())
        if time.monotonic() > until:
            return list(codes.values())
        time.sleep(0.02)


def _become(
    script: str, args: list[str], environ: dict[str, str], folder: str, out: str, err: str
) -> None:
    """Run a script like `python script args`, in a session of its own."""
    os.setsid()
    os.chdir(folder)
    for number, path in enumerate((os.devnull, out, err)):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # the script that needs it will say so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children need not look through what was imported
    if command := _serve():
        _become(**command)
