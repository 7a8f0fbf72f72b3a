"""What the README shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch import Warm, torchrun

README = Path(__file__).parents[1] / "README.md"
DDP, WRAPPER, TENSOR = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("example", "expected"),
    [(DDP, "47.7 x fewer entries"), (WRAPPER, "48 x fewer entries"), (TENSOR, "bytes sent")],
    ids=["ddp", "wrapper", "tensor"],
)
def test_examples_of_the_readme(warm: Warm, tmp_path: Path, example: str, expected: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(example)
    run = torchrun if example is DDP else warm.torchrun
    # Both ranks print into one file, and their lines may be joined.
    assert run(script).count(expected) == 2


@pytest.mark.parametrize(
    ("example", "ratio"), [(WRAPPER, 48), (TENSOR, 50)], ids=["wrapper", "tensor"]
)
def test_without_init_process_group_one_rank_works_alone(
    warm: Warm, tmp_path: Path, example: str, ratio: int
) -> None:
    lines = example.splitlines(keepends=True)
    script = tmp_path / "example.py"
    script.write_text("".join(line for line in lines if "init_process_group" not in line))
    assert f"{ratio} x fewer entries" in warm.alone(script)
