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
FRAMEWORKS = NAMES[1:]
BREAK, STEPS = 20, 60
Run = Callable[[str], tuple[Path, dict[str, float]]]


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Warm]:
    """Runs examples without the seconds that importing a framework takes."""
    ours = [f"oktopk.integrations.{name}" for name in ("accelerate", "lightning", "transformers")]
    with Warm("torch._dynamo", "heated", *ours, "transformers.trainer") as forks:
        yield forks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, frameworks: Warm) -> Run:
    """Trains an example in one go, once for all tests: its checkpoint, and what it printed."""

    @functools.cache
    def run(name: str) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp(name) / "run"
        start = torchrun if name == "ddp" else frameworks.torchrun
        return folder, _numbers(start(_script(name), "--steps", STEPS, "--checkpoint", folder))

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
    folder = tmp_path / "run"
    frameworks.torchrun(_script(name), "--checkpoint", folder, "--steps", BREAK)
    before = _states(name, folder, BREAK)
    assert [state["step"] for state in before] == [BREAK] * 2
    largest = max(before[0]["residual"].values(), key=Tensor.numel)
    assert largest.count_nonzero() > 0.5 * largest.numel()

    printed = frameworks.torchrun(_script(name), "--checkpoint", folder, "--steps", STEPS)
    expected, expected_numbers = trained(name)
    assert _numbers(printed)["last loss"] == expected_numbers["last loss"]
    _assert_equal(_model(name, folder), _model(name, expected))
    for mine, theirs in zip(
        _states(name, folder, STEPS), _states(name, expected, STEPS), strict=True
    ):
        assert mine["step"] == theirs["step"] == STEPS
        _assert_equal(mine["residual"], theirs["residual"])


RESUME = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import transformers_trainer as example
last = sys.argv.pop(1)
example.get_last_checkpoint = lambda folder: last
example.main()
"""


def test_a_trainer_resumes_from_any_folder(frameworks: Warm, tmp_path: Path) -> None:
    name, script = "transformers_trainer", tmp_path / "resume.py"
    script.write_text(RESUME)
    old, new, moved = tmp_path / "old", tmp_path / "new", tmp_path / "moved"
    new.mkdir()
    frameworks.torchrun(_script(name), "--checkpoint", old, "--steps", 6)
    (old / "checkpoint-6").rename(moved)
    frameworks.torchrun(script, moved, "--checkpoint", new, "--steps", 8)
    assert [state["step"] for state in _states(name, new, 8)] == [8, 8]
    (moved / "oktopk").rename(tmp_path / "elsewhere")
    with pytest.raises(AssertionError, match=r"moved has no compression state.*resume_from=False"):
        frameworks.torchrun(script, moved, "--checkpoint", new, "--steps", 8)


ACCELERATE = """
import sys, torch, oktopk
from accelerate import Accelerator
from oktopk.integrations.accelerate import checkpoint_with

def attempt(action, *arguments):
    try:
        action(*arguments)
    except ValueError as error:
        print(f"rank {accelerator.process_index}: {error}", flush=True)

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(100, 100))
handle = oktopk.attach(model, oktopk.OkTopk())
accelerator.save_state(sys.argv[1] + "/none")
accelerator.wait_for_everyone()
checkpoint_with(accelerator, handle)
attempt(checkpoint_with, accelerator, handle)
attempt(accelerator.load_state, sys.argv[1] + "/none")
accelerator.register_for_checkpointing(handle)
accelerator.save_state(sys.argv[1] + "/wrong")
accelerator.wait_for_everyone()
attempt(accelerator.load_state, sys.argv[1] + "/wrong")
accelerator.end_training()
"""


def test_mistakes_with_accelerate_are_told(frameworks: Warm, tmp_path: Path) -> None:
    script = tmp_path / "mistakes.py"
    script.write_text(ACCELERATE)
    printed = frameworks.torchrun(script, tmp_path)
    for rank in range(2):
        assert f"rank {rank}: this accelerator's checkpoints have a folder 'oktopk'" in printed
        assert f"rank {rank}: {tmp_path}/none has no compression state" in printed
    wrong = "rank 1: this is the state of rank 0, loaded on rank 1"
    assert wrong in printed
    assert "oktopk.integrations.accelerate.checkpoint_with" in printed.partition(wrong)[2]


ALONE = f"""
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.path.insert(0, {str(EXAMPLES)!r})
import lightning_trainer as example
compress = example.Compress(example.oktopk.OkTopk(), folder=sys.argv[1])
trainer = example.Trainer(
    accelerator="cpu", devices=1, strategy="auto", callbacks=[compress], max_steps=1,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=sys.argv[1])
trainer.fit(example.Classifier(), example.DataLoader(example.patterns(64), 32))
print(compress.active)
print(compress.handle)
"""


def test_one_process_has_nothing_to_compress(frameworks: Warm, tmp_path: Path) -> None:
    printed = frameworks.alone(_script("transformers_trainer"), "--steps", 2)
    assert re.fullmatch(r"first loss +[0-9.]+\nlast loss +[0-9.]+\n", printed)
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    with pytest.raises(AssertionError) as error:
        frameworks.alone(script, tmp_path / "run")
    assert "one process: nothing to compress. To train with several" in str(error.value)
    assert "\nFalse\n" in str(error.value)
    assert "RuntimeError: one process: nothing is compressed" in str(error.value)
    with pytest.raises(AssertionError, match=r"Compress needs a model in DDP.*strategy=.ddp"):
        frameworks.torchrun(script, tmp_path / "run")


@pytest.mark.parametrize(
    ("module", "missing", "fix"),
    [
        ("lightning", ["lightning", "pytorch_lightning"], "pip install lightning"),
        ("transformers", ["transformers"], "pip install transformers accelerate"),
        ("accelerate", ["accelerate"], "pip install accelerate"),
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

    checkpoint = "" if name == "accelerate_loop" else f"checkpoint-{STEPS}"
    return load_file(folder / checkpoint / "model.safetensors")


def _states(name: str, folder: Path, step: int) -> list[dict[str, Any]]:
    """The compression state of each rank, saved at this step."""
    place = {
        "ddp": folder,
        "accelerate_loop": folder / "oktopk",
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
