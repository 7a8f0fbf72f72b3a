"""Scripts run as users run them: in processes of their own, with torchrun or alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def torchrun(script: Path, *args: object, processes: int = 2, timeout: float = 120.0) -> str:
    """What a script prints on several ranks, in the end; fails if the script does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return _output([*launcher, str(script), *map(str, args)], timeout)


def alone(script: Path, *args: object, timeout: float = 120.0) -> str:
    """The same in a single process that knows nothing of ranks."""
    return _output([str(script), *map(str, args)], timeout)


def _output(arguments: list[str], timeout: float) -> str:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # Not pipes: ranks that outlive the launcher would hold them open, and one would wait for ever.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "GLOO_SOCKET_IFNAME": loopback},
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
