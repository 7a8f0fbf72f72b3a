"""The code in docs/how runs, and the names in it are where the pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import oktopk
from launch import Warm

HOW = Path(__file__).parents[1] / "docs" / "how"
SOURCE = Path(oktopk.__file__).parent
LISTINGS = dict(
    re.findall(r'```python title="(.*?)"\n(.*?)```', (HOW / "extending.md").read_text(), re.DOTALL)
)

REDUCE = """
import sys
import torch
import torch.distributed as dist

sys.path.insert(0, {folder!r})
import oktopk
{setup}

dist.init_process_group("gloo")
n, size = 1000, dist.get_world_size()
reduce = oktopk.SparseAllreduce({algorithm}, n)
came, applied = torch.zeros(n), torch.zeros(n)
for step in range(12):
    torch.manual_seed(100 * step + dist.get_rank())
    gradient = torch.randn(n)
    came += gradient
    average = reduce(gradient)
    everyone = [torch.empty(n) for _ in range(size)]
    dist.all_gather(everyone, average)
    assert all(torch.equal(average, other) for other in everyone)
    assert reduce.last.selected_global == 100
    applied += size * average
    if step == 6:  # through a saved state
        saved = reduce.state_dict()
        reduce = oktopk.SparseAllreduce({algorithm}, n)
        reduce.load_state_dict(saved)
waiting = reduce.residual.clone()
for tensor in (came, waiting):
    dist.all_reduce(tensor)
assert torch.allclose(applied + waiting, came, atol=1e-4)
assert waiting.abs().max() > 1e-3
before = reduce.residual.clone()
gradient = torch.randn(n)
gradient[0] = float("nan") if dist.get_rank() == 1 else 0.0
try:
    reduce(gradient)
except oktopk.NonFiniteGradientError as error:
    assert "rank 1" in str(error)
    assert torch.equal(before, reduce.residual)
    print("as it should be")
"""


def listings(folder: Path) -> Path:
    """The files of the page, in a folder."""
    for name, text in LISTINGS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("setup", "algorithm"),
    [
        ("from randomk import RandomK", "RandomK(density=0.1)"),
        (
            "import randomk; oktopk.algorithms.register('randomk', randomk.RandomK)",
            "oktopk.algorithm('RandomK', density=0.1)",
        ),
        ("import linear8", "oktopk.OkTopk(density=0.1, wire='linear8')"),
    ],
    ids=["algorithm", "by name", "wire"],
)
def test_an_algorithm_and_a_wire_format_of_ones_own(
    warm: Warm, tmp_path: Path, setup: str, algorithm: str
) -> None:
    folder = str(listings(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(REDUCE.format(folder=folder, setup=setup, algorithm=algorithm))
    assert warm.torchrun(script, processes=3).count("as it should be") == 3


def test_a_workload_of_ones_own(warm: Warm, tmp_path: Path) -> None:
    script = listings(tmp_path) / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import oktopk.workloads\nfrom curve import WORKLOAD\nfrom oktopk.cli import main\n"
        "oktopk.workloads.register(WORKLOAD)\nsys.exit(main(sys.argv[1:]))\n"
    )
    flags = ("--threads", 1, "--tensorboard", "false", "--run-dir", tmp_path / "run")
    warm.torchrun(script, "train", "curve", *flags)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["kind"] == "epoch"
    assert last["validation"]["r2"] > 0.9


def test_an_algorithm_takes_less_than_sixty_lines() -> None:
    assert len(LISTINGS["randomk.py"].splitlines()) < 60


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_names_are_where_the_pages_say(page: str) -> None:
    text = " ".join((HOW / page).read_text().split())
    found = re.findall(r"`([A-Za-z_][\w.]*)` in `([\w/]+\.py)`", text)
    assert len(found) >= 5
    for name, file in found:
        code = (SOURCE / file).read_text()
        for part in name.split("."):
            defined = rf"^\s*(?:def|class) {part}\b|^{part}\s*[:=]"
            assert re.search(defined, code, re.MULTILINE), f"{page}: {name} is not in {file}"
