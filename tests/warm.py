"""A process that has imported what takes long, and forks children that run scripts; see launch.py.

python tests/warm.py MODULE ...

Each line that it reads is a command in JSON, and each line that it prints is the answer. A child
leaves the loop and ends as any program does, with all that Python does at the end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import time
from typing import Any


def serve() -> dict[str, Any] | None:
    """Does what it is told; in a child, what the child is to run."""
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer: Any = wait(command["wait"], command["seconds"])
        else:
            answer = os.fork()
            if answer == 0:
                return dict(command)
        print(json.dumps(answer), flush=True)
    return None


def wait(children: list[int], seconds: float) -> list[int | None]:
    """Their exit codes, when all have ended or one has failed; None of those that go on."""
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


def become(
    script: str, args: list[str], environ: dict[str, str], folder: str, out: str, err: str
) -> None:
    """As `python script args` would run it, in a session of its own."""
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
        with contextlib.suppress(ImportError):  # what is missing is said by who needs it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children need not look through what was imported
    if command := serve():
        become(**command)
