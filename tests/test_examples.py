"""The examples train, compress, and go on after a break as if there had been none."""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import Warm, torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ["ddp", "accelerate_loop", "lightning_trainer", "transformers_trainer"]
RESUMABLE = ["ddp", "lightning_trainer", "transformers_trainer"]
FRAMEWORKS = RESUMABLE[1:]
BREAK, STEPS = 20, 60
Run = Callable[[str], tuple[Path, dict[str, float]]]


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Warm]:
    """Runs examples without the seconds that importing a framework takes."""
    names = ("torch._dynamo", "heated", "accelerate", "oktopk.integrations.lightning")
    with Warm(*names, "oktopk.integrations.transformers", "transformers.trainer") as forks:
        yield forks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, frameworks: Warm) -> Run:
    """Trains an example in one go, once for all tests: its checkpoint, and what it printed."""

    @functools.cache
    def run(name: str) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp(name)
        checkpoint = ["--checkpoint", folder] if name in RESUMABLE else []
        start = torchrun if name == "ddp" else frameworks.torchrun
        return folder, _numbers(start(_script(name), "--steps", STEPS, *checkpoint))

    return run


@pytest.mark.parametrize("name", NAMES)
def test_examples_learn(name: str, trained: Run) -> None:
    _, numbers = trained(name)
    assert all(math.isfinite(number) for number in numbers.values()), numbers
    assert numbers["last loss"] < 0.75 * numbers["first loss"]
    assert numbers["compression ratio"] > 5
    assert numbers["sparsity"] > 0.8
    assert numbers["megabytes sent"] > 0


def test_examples_send_fewer_bytes_than_dense(trained: Run, warm: Warm) -> None:
    _, sparse = trained("ddp")
    dense = _numbers(warm.torchrun(_script("ddp"), "--steps", STEPS, "--algorithm", "dense"))
    assert dense["last loss"] < 0.75 * dense["first loss"]
    assert sparse["first loss"] == dense["first loss"]
    assert sparse["megabytes sent"] < dense["megabytes sent"] / 3
    assert dense["compression ratio"] == 1.0
    assert dense["sparsity"] == 0.0


def test_plain_example_goes_on_from_its_checkpoint(trained: Run, warm: Warm) -> None:
    folder, _ = trained("ddp")
    printed = warm.torchrun(_script("ddp"), "--checkpoint", folder, "--steps", STEPS)
    assert f"is at step {STEPS}" in printed


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_examples_go_on_bitwise(name: str, trained: Run, frameworks: Warm, tmp_path: Path) -> None:
    frameworks.torchrun(_script(name), "--checkpoint", tmp_path, "--steps", BREAK)
    before = _states(name, tmp_path, BREAK)
    assert [state["step"] for state in before] == [BREAK] * 2
    largest = max(before[0]["residual"].values(), key=Tensor.numel)
    assert largest.count_nonzero() > 0.5 * largest.numel()

    printed = frameworks.torchrun(_script(name), "--checkpoint", tmp_path, "--steps", STEPS)
    numbers = _numbers(printed)
    expected, expected_numbers = trained(name)
    assert numbers["last loss"] == expected_numbers["last loss"]
    _assert_equal(_model(name, tmp_path), _model(name, expected))
    for mine, theirs in zip(
        _states(name, tmp_path, STEPS), _states(name, expected, STEPS), strict=True
    ):
        assert mine["step"] == theirs["step"] == STEPS
        _assert_equal(mine["residual"], theirs["residual"])


def test_a_trainer_without_ddp_is_told_to_use_it(frameworks: Warm) -> None:
    with pytest.raises(AssertionError, match=r"needs a model in DDP.*torchrun"):
        frameworks.alone(_script("transformers_trainer"), "--steps", 1)


@pytest.mark.parametrize(
    ("module", "missing", "fix"),
    [
        ("lightning", ["lightning", "pytorch_lightning"], "pip install lightning"),
        ("transformers", ["transformers"], "pip install transformers accelerate"),
    ],
)
def test_a_missing_framework_is_named(
    module: str, missing: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"oktopk.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=fix):
        importlib.import_module(f"oktopk.integrations.{module}")


def _script(name: str) -> Path:
    return EXAMPLES / f"{name}.py"


def _numbers(printed: str) -> dict[str, float]:
    """Lines such as `last loss          0.0002`."""
    found = re.findall(r"^([a-z]+ ?[a-z]+)  +(\S+)$", printed, re.MULTILINE)
    numbers = {name: float(number) for name, number in found}
    labels = {"first loss", "last loss", "compression ratio", "sparsity", "megabytes sent"}
    assert numbers.keys() == labels, printed
    return numbers


def _model(name: str, folder: Path) -> dict[str, Tensor]:
    """The parameters in the last checkpoint."""
    if name == "ddp":
        [file] = folder.glob("data-*/shared.pt")
        return dict(torch.load(file)["model"])
    if name == "lightning_trainer":
        return dict(torch.load(folder / "last.ckpt")["state_dict"])
    from safetensors.torch import load_file

    return load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors")


def _states(name: str, folder: Path, step: int) -> list[dict[str, Any]]:
    """The compression state of each rank, saved at this step."""
    place = {
        "ddp": folder,
        "lightning_trainer": folder / "compression" / f"step-{step}",
        "transformers_trainer": folder / f"checkpoint-{step}" / "oktopk",
    }[name]
    files = sorted(place.glob("data-*/rank-*.pt"))
    return [torch.load(file)["compression"] for file in files]


def _assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert mine
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
