"""What the README shows works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("launch", ["alone", "torchrun"])
def test_the_five_lines(tmp_path: Path, launch: str) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    if launch == "alone":
        lines = example.splitlines(keepends=True)
        example = "".join(line for line in lines if "init_process_group" not in line)
        command = [sys.executable]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2"]
    script = tmp_path / "example.py"
    script.write_text(example)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    finished = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": loopback},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    # Both ranks print into one pipe, and their lines may be joined.
    expected = 1 if launch == "alone" else 2
    assert finished.stdout.count("50 x fewer entries") == expected
