"""A workload is a class of settings and a class that trains: nothing else knows it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from oktopk.cli import main
from oktopk.common.errors import UserError
from oktopk.common.sections import option
from oktopk.train.config.config import Config
from oktopk.train.config.options import add_arguments, build
from oktopk.train.config.recipes import recipe
from oktopk.train.metrics_file import read_metrics
from oktopk.train.trainer import Trainer
from oktopk.workloads import RECIPES, WORKLOADS, register, workload_for
from oktopk.workloads.base import Context, Metric, Recipe, Validation, WorkloadConfig
from oktopk.workloads.checks import check_step, make_model
from oktopk.workloads.speech.config import SpeechConfig


@dataclass(frozen=True)
class LineConfig(WorkloadConfig):
    """Fits a line to points."""

    name: ClassVar[str] = "line"
    title: ClassVar[str] = "A line"
    sample: ClassVar[str] = "point"
    metrics: ClassVar[Sequence[Metric]] = (
        Metric("loss", "val loss"),
        Metric("fit", "fit", lambda value: f"{100 * value:.0f}%", lower_is_better=False),
    )
    recipes: ClassVar[Mapping[str, Recipe]] = {
        "line": Recipe(
            "a line, in a moment",
            {
                "dataset": "points", "max_epochs": 3, "batch_size": 4, "lr": 0.05,
                "warmup_steps": 2, "density": 0.5, "dense_below": 1, "validate_every": 1,
            },
        )
    }  # fmt: skip

    dataset: str = option("points", "Data: points.", choices=("points",))
    data_dir: str = option("", "Not used.", path=True)
    width: int | None = option(None, "Coordinates of a point.", least=1)
    slope: float = option(2.0, "Slope of the line.", above=0)

    def make(self, context: Context) -> Line:
        return Line(self, context)

    def prepare(self, progress: bool) -> None:
        """Nothing to fetch."""


class Line:
    """40 points on a line."""

    samples = 40

    def __init__(self, config: LineConfig, context: Context) -> None:
        self.context = context
        self.points = torch.rand(self.samples, config.width or 3)
        self.values = config.slope * self.points.sum(1, keepdim=True)
        check_step(context, self.samples, config.sample)
        sizes = {"--width": self.points.size(1)}
        self.model = make_model(lambda: nn.Linear(sizes["--width"], 1), context, sizes)
        self.batches_per_epoch = self.samples // context.batch_size

    def batches(self, epoch: int, done: int = 0) -> Generator[Tensor, None, None]:
        rows = torch.arange(self.samples).split(self.context.batch_size)
        yield from rows[done : self.batches_per_epoch]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(self.points[batch]), self.values[batch])

    def validate(self, model: nn.Module, progress: Callable[[int, int], None]) -> Validation:
        with torch.no_grad():
            loss = float(nn.functional.mse_loss(model(self.points), self.values))
        progress(1, 1)
        return Validation({"loss": loss, "fit": 1 / (1 + loss)}, ({"text": f"one\n\ttwo {loss}"},))


@pytest.fixture(autouse=True)
def _line() -> Iterator[None]:
    register(LineConfig)
    yield
    WORKLOADS.remove(LineConfig)
    del RECIPES["line"]


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Trainer(recipe("line", run_dir=str(tmp_path))).run()
    assert outcome is not None
    assert (outcome.plan.samples, outcome.steps, outcome.sparse_steps) == (40, 30, 28)
    first, last = outcome.epochs[0].validation, outcome.epochs[-1].validation
    assert last["loss"] < first["loss"]
    shown = capsys.readouterr().out
    assert "40 points" in shown
    assert "text: one" in shown
    assert "          two" in shown  # a text may have several lines, and tabs
    assert f"{100 * last['fit']:.0f}% at the end, best {100 * last['fit']:.0f}% (epoch 3)" in shown
    assert "utterance" not in shown
    assert read_metrics(tmp_path)[1][-1]["validation"] == last
    config = json.loads((tmp_path / "summary.json").read_text())["plan"]["config"]
    assert config["slope"] == 2.0
    assert "dnn" not in config


@pytest.mark.usefixtures("_alone")
def test_the_checks_are_for_all_workloads(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 40 points, but a step takes 41"):
        Trainer(recipe("line", run_dir=str(tmp_path), batch_size=41))


def test_dataset_or_recipe_chooses_the_workload() -> None:
    for values in ({"dataset": "points"}, {"recipe": "line"}):
        assert workload_for(values) is LineConfig
    for values in ({}, {"recipe": "an4"}, {"dataset": "spoken"}, {"recipe": "mine"}):
        assert workload_for(values) is SpeechConfig
    assert isinstance(Config.of(dataset="points", width=2).workload, LineConfig)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--slope 1", "--slope is for --dataset points, not for speech"),
        ("line --dnn lstman4", "--dnn is for --dataset an4, spoken, manifest, not for line"),
        ("line --dataset an4", "--recipe line is for --dataset points, not for an4"),
        ("spoken --dataset points", "--recipe spoken is for --dataset an4, spoken, manifest"),
        ("--dataset nope", "must be one of an4, spoken, manifest"),
        ("line --slope -1", "--slope is -1.0, but must be above 0"),
        ("line --slop 1", "did you mean --slope?"),
        (f"line --width {10**400}", "but must be at most 1000000000000000"),
    ],
)
def test_flags_of_another_workload(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *line.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_help_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "A line (--dataset points): --slope X Slope of the line. (default: 2.0)" in shown
    assert "A line: Coordinates of a point." in shown
    assert f"RECIPE {', '.join(RECIPES)}; see `oktopk recipes`" in shown
    titles = [
        shown.index(title) for title in ("Speech recognition (", "A line (", "The optimizer:")
    ]
    assert titles == sorted(titles)
    assert main(["recipes"]) == 0
    assert "a line, in a moment" in capsys.readouterr().out


def test_none_is_the_default() -> None:
    """Of this workload, even if another one has no default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config, _ = build(parser.parse_args(["text", "--width", "none"]))
    assert config == recipe("text")


@pytest.mark.parametrize("line", ["line", "--dataset points", "spoken --dataset points"])
def test_a_run_of_another_workload(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('recipe = "spoken"\ndataset = "spoken"\n')
    assert main(["train", *line.split(), "--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"--resume {tmp_path}: --recipe" in error
    assert error.count("\n") == 1


def test_names_that_are_taken() -> None:
    @dataclass(frozen=True)
    class Other(LineConfig):
        name: ClassVar[str] = "other"
        recipes: ClassVar[Mapping[str, Recipe]] = {}
        dataset: str = option("a", "Data.", choices=("a",))
        slope: int = option(1, "Another type.")

    with pytest.raises(ValueError, match="other and line both have slope"):
        register(Other)
    with pytest.raises(ValueError, match="both have"):
        register(LineConfig)
