"""Scripts run as users run them: in processes of their own, with torchrun or alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def torchrun(script: Path, *args: object, processes: int = 2, timeout: float = 120.0) -> str:
    """What a script prints on several ranks, in the end; fails if the script does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [*launcher, str(script), *map(str, args)]
    # Not pipes: ranks that outlive the launcher would hold them open, and one would wait for ever.
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
    """Scripts in processes of their own, forked from one that has imported torch already."""

    def __init__(self, *modules: str) -> None:
        program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("warm.py"))]
        self._process = subprocess.Popen(
            [*program, *modules],
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
        """The same as `torchrun`, by what it tells its ranks."""
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
        """The same in a single process that knows nothing of ranks."""
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
        """The number of a process, whose output is appended to files."""
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
        """Exit codes, when all have ended, or one has failed, or it is late: others are killed."""
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
