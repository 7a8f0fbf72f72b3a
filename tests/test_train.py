"""Trainings end to end: tiny models on spoken words, real workers, real checkpoints."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import oktopk
from launch import Warm
from oktopk.common.errors import UserError
from oktopk.common.sections import flag
from oktopk.core.stats import STAGES
from oktopk.train.config.config import Config, Optimizer, sections
from oktopk.train.config.recipes import recipe
from oktopk.train.meters import Meters, Sums
from oktopk.train.metrics_file import read_metrics, read_records
from oktopk.train.optimizers import learning_rate
from oktopk.train.trainer import Trainer
from oktopk.workloads import WORKLOADS
from oktopk.workloads.speech import spoken
from oktopk.workloads.speech.an4_archive import Source
from oktopk.workloads.speech.config import SpeechConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22 and 5 utterances."""
    folder = tmp_path_factory.mktemp("corpus")
    return spoken.prepare(folder, progress=False, train=22, validation=5)[0].parent


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OKTOPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def _alone() -> Iterator[None]:
    """This process as the only worker."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny(corpus: Path, folder: Path, name: str = "spoken", **values: Any) -> Config:
    """A recipe, with a model and a corpus that take a moment."""
    given = {
        "dataset": "manifest",
        "train_manifest": str(corpus / "spoken_train_manifest.csv"),
        "val_manifest": str(corpus / "spoken_val_manifest.csv"),
        "width": 24,
        "depth": 1,
        "batch_size": 2,
        "dense_below": 100,
        "tensorboard": False,
        "run_dir": str(folder),
        "nworkers": 1,
    }
    return recipe(name, **given | values)


@pytest.fixture(scope="module")
def trainings(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm
) -> tuple[Any, Path]:
    """What trainings.py found on two workers, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("trainings.py")
    printed = warm.torchrun(script, corpus, folder, timeout=240)
    return json.loads(printed.splitlines()[-1]), folder


@pytest.mark.parametrize("name", ["dense", "oktopk", "topka", "topkdsa", "gtopk", "gaussiank"])
def test_every_compressor_trains(trainings: tuple[Any, Path], name: str) -> None:
    lists = trainings[0]["compressors"][name]
    assert {len(values) for values in lists.values()} == {6}
    assert lists["sparsities"][:2] == [0.0, 0.0]
    assert lists["compression_ratios"][:2] == [1.0, 1.0]
    for sparsity, ratio in zip(
        lists["sparsities"][2:], lists["compression_ratios"][2:], strict=True
    ):
        assert (sparsity == 0.0) if name == "dense" else (0.93 < sparsity < 0.99)
        assert math.isclose(ratio, 1 / (1 - sparsity))
    assert all(size > 0 for size in lists["communication_sizes"])
    assert name == "dense" or lists["communication_sizes"][5] < lists["communication_sizes"][0] / 5

    steps, epochs = read_metrics(trainings[1] / name)
    assert [record["step"] for record in steps] == list(range(6))
    assert [record["sparsity"] for record in steps] == lists["sparsities"]
    assert [record["bytes_sent"] for record in steps] == lists["communication_sizes"]
    assert all(math.isfinite(record["loss"]) for record in steps)
    # 22 utterances make 5 batches for each of two workers; the sixth step is in the second epoch.
    assert [record["steps"] for record in epochs] == [5, 6]
    assert set(epochs[0]["validation"]) == {"loss", "wer", "cer"}


def test_everything_at_once_trains(trainings: tuple[Any, Path]) -> None:
    found = trainings[0]["everything"]
    assert found["steps"] == 4  # 5 batches an epoch, two for each step
    assert found["sparsities"][0] == 0.0
    assert all(sparsity > 0.9 for sparsity in found["sparsities"][1:])


def test_resumed_run_is_bitwise_the_uninterrupted_one(trainings: tuple[Any, Path]) -> None:
    found, folder = trainings
    assert found["resume"] == {"same": True, "sums": True, "blind": True}
    steps, epochs = read_metrics(folder / "parts")
    whole, whole_epochs = read_metrics(folder / "whole")
    for name in ("step", "loss", "lr", "sparsity", "bytes_sent", "grad_norm"):
        assert [record[name] for record in steps] == [record[name] for record in whole]
    last, whole_last = epochs[-1], whole_epochs[-1]
    assert last["validation"] == whole_last["validation"]
    assert last["loss"] == whole_last["loss"]


def test_looks_into_steps_are_kept_once(trainings: tuple[Any, Path]) -> None:
    """Of a run with breaks, those at the end of each part too. Nothing depends on them."""
    looks = {name: read_records(trainings[1] / name) for name in ("whole", "parts", "blind")}
    assert [each["step"] for each in looks["whole"]["detail"]] == [0, 2, 3, 4, 8, 9]
    assert [each["step"] for each in looks["parts"]["detail"]] == [0, 2, 3, 4, 5, 8, 9]
    assert looks["blind"]["detail"] == []
    for each, step in zip(looks["whole"]["step"], looks["blind"]["step"], strict=True):
        assert each["loss"] == step["loss"]
        assert each["applied"] == step["applied"] > 0
        assert set(each["stages"]) == set(STAGES)
        assert each["busy"] > 0
        assert each["target"] >= each["applied"] or each["phase"] == "dense"
    sparse = [each for each in looks["whole"]["detail"] if each["phase"] == "sparse"]
    assert [each["step"] for each in sparse] == [3, 4, 8, 9]
    for each in sparse:
        assert each["staleness"]["histogram"]["counts"]
        assert sum(each["buckets"][0]["regions"]) == each["buckets"][0]["applied"]


def test_the_summary_counts_kinds_and_faults(trainings: tuple[Any, Path]) -> None:
    folder = trainings[1]
    whole, parts = (
        json.loads((folder / name / "summary.json").read_text()) for name in ("whole", "parts")
    )
    assert parts["kinds"] == whole["kinds"]  # of all parts together
    assert {"recurrent", "convolution", "norm"} <= set(whole["kinds"])
    assert sum(kind["numel"] for kind in whole["kinds"].values()) == whole["plan"]["parameters"]
    for kind in whole["kinds"].values():
        assert kind["elements"] == 7 * kind["numel"]  # three of ten steps are dense
        assert 0 < kind["applied"] <= kind["elements"]
    steps = read_records(folder / "parts")["step"]
    assert parts["busy"] == pytest.approx(sum(step["busy"] for step in steps))
    waited = sum(step["seconds"]["synchronise"] for step in steps)
    assert parts["waited"] == pytest.approx(waited)
    none = {"resumed": 0, "skipped_steps": 0, "discarded_steps": 0, "skipped_samples": 0}
    assert (whole["faults"], parts["faults"]) == (none, {**none, "resumed": 2})


def test_sums_of_an_earlier_version_are_taken_over(trainings: tuple[Any, Path]) -> None:
    """One that has no sums of times, kinds and faults."""
    new = {"busy", "waited", "skipped_steps", "discarded_steps", "kinds"}
    saved = oktopk.checkpoint.read_shared(trainings[1] / "parts" / "checkpoint")["of_run"]
    assert new <= saved.keys()
    old = Sums(**{name: value for name, value in saved.items() if name not in new})
    meters = Meters(1, {})
    meters.go_on(old)
    assert (meters.of_run.steps, meters.of_run.kinds, meters.of_run.busy) == (10, {}, 0.0)


def test_a_folder_is_not_overwritten(trainings: tuple[Any, Path]) -> None:
    assert "--resume auto goes on with it" in trainings[0]["occupied"]


def test_weights_from_run_checkpoint_and_file(trainings: tuple[Any, Path]) -> None:
    assert trainings[0]["pretrain"] is True


@pytest.mark.usefixtures("_alone")
def test_resume_with_another_number_of_workers(
    trainings: tuple[Any, Path], corpus: Path, tmp_path: Path
) -> None:
    """Residuals are redistributed; the epoch that two workers had begun begins anew."""
    folder = tmp_path / "run"
    shutil.copytree(trainings[1] / "parts", folder)
    config = tiny(
        corpus,
        folder,
        resume="auto",
        max_epochs=2,
        schedule="anneal",
        warmup_steps=3,
        density=0.05,
    )
    outcome = Trainer(config).run()
    assert outcome is not None
    assert outcome.plan.first_step == 10
    assert outcome.steps == 10  # two epochs were done
    more = Trainer(config.replace(max_epochs=3)).run()
    assert more is not None
    assert more.steps == 10 + 11
    assert [record.epoch for record in more.epochs] == [1, 2, 3]


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", SpeechConfig.recipes)
def test_every_recipe_starts(name: str, corpus: Path, tmp_path: Path) -> None:
    sizes = {"width": None, "depth": None} if name == "lstm_debug" else {}  # one at full size
    config = tiny(corpus, tmp_path, name, max_steps=1, checkpoint_every=-1, **sizes)
    outcome = Trainer(config).run()
    assert outcome is not None
    assert outcome.steps == 1
    assert config.run.recipe == name
    assert outcome.plan.parameters == 27_569_568 or sizes == {}


@pytest.mark.usefixtures("_alone")
def test_short_run_warns_and_fills_its_lists(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tiny(corpus, tmp_path, max_epochs=2))
    outcome = trainer.run()
    printed = " ".join(capsys.readouterr().out.split())
    assert "WARNING" in printed
    assert "--warmup-steps" in printed
    assert "nan" not in printed.lower()
    assert trainer.sparsities == [0.0] * 22
    assert trainer.compression_ratios == [1.0] * 22
    assert len(trainer.communication_sizes) == 22
    assert outcome is not None
    assert outcome.sparse_steps == 0
    steps, epochs = read_metrics(tmp_path)
    assert len(steps) == 22
    assert len(epochs) == 2
    assert (tmp_path / "summary.json").exists()
    assert (tmp_path / "report.html").exists()
    for part in ("part of a step", "backward", "merge", "compression", "allreduce", "demerge"):
        assert part in printed


@pytest.mark.usefixtures("_alone")
def test_it_learns(corpus: Path, tmp_path: Path) -> None:
    """A quarter of the loss goes; of 88 steps 68 are sparse."""
    config = tiny(
        corpus, tmp_path, width=64, max_epochs=8, warmup_steps=20, lr=0.005, validate_every=20
    )
    outcome = Trainer(config).run()
    assert outcome is not None
    assert outcome.epochs[-1].loss < 0.75 * outcome.epochs[0].loss
    assert outcome.sparse_steps == 8 * 11 - 20


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("steps", [1, 30])
def test_divergence_is_told(corpus: Path, tmp_path: Path, steps: int) -> None:
    """By a gradient, or by the validation after a single step."""
    values: dict[str, Any] = {"optimizer": "sgd", "lr": 1e30, "clip": 0.0, "schedule": "constant"}
    config = tiny(corpus, tmp_path, max_epochs=3, max_steps=steps, **values)
    with pytest.raises(UserError, match=r"diverged in step \d+.*--lr"):
        Trainer(config).run()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"optimizer": "sgd"}, "begun with adamw"),
        ({"width": 32}, "begun with"),
        ({"density": 0.5}, "begun with"),
        ({"resume": "elsewhere"}, "leave out --run-dir"),
    ],
)
def test_resuming_as_something_else(
    trainings: tuple[Any, Path], corpus: Path, values: dict[str, Any], problem: str
) -> None:
    known: dict[str, Any] = {
        "resume": "auto",
        "warmup_steps": 3,
        "density": 0.05,
        "max_epochs": 9,
    }
    with pytest.raises(UserError, match=problem):
        Trainer(tiny(corpus, trainings[1] / "whole", **known | values))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("name", "samples"), [("spoken", 1200), ("an4", 948)])
def test_real_corpora(tmp_path: Path, name: str, samples: int) -> None:
    """Whole, as the recipes use them."""
    values: dict[str, Any] = {"width": 16, "depth": 1, "batch_size": 2, "max_steps": 1}
    if name == "an4":
        data = os.environ.get("OKTOPK_DATA") or Path(__file__).parents[2] / "shared" / "data"
        if not (Path(data) / "an4" / "etc").is_dir():
            pytest.skip("AN4 is not here; OKTOPK_DATA names the folder that has it")
        (tmp_path / "an4").symlink_to(Path(data) / "an4")  # so that nothing is written there
        values |= {"data_dir": str(tmp_path)}
    outcome = Trainer(recipe(name, **values, run_dir=str(tmp_path / "run"))).run()
    assert outcome is not None
    assert outcome.plan.samples == samples


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"batch_size": 100}, "a step takes 100.*--batch-size"),
        ({"train_manifest": "nowhere.csv"}, "nowhere.csv"),
        ({"dataset": "an4", "data_dir": "nowhere"}, "AN4|an4"),
        ({"resume": "nowhere", "run_dir": ""}, "no run with a checkpoint"),
        ({"pretrain": "nowhere.pt"}, "no such file"),
        ({"pretrain": "/dev/null"}, "it is no file that torch.save wrote"),
        ({"pretrain": "~nobody-at-all/a"}, "~nobody-at-all/a: there is no such home"),
        ({"run_dir": "~nobody-at-all/a"}, "there is no such home"),
        ({"train_manifest": "~nobody-at-all/a"}, "there is no such home"),
        ({"width": 1_000_000}, "--width 1000000 and --depth 1 make 8,0.* 1 worker"),
    ],
)
def test_bad_values(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    problem: str,
) -> None:
    if values.get("dataset") == "an4":  # so that nothing is downloaded
        values = values | {"data_dir": str(tmp_path / "nowhere")}
        nowhere = (Source("http://127.0.0.1:9/an4.tar.gz"),)
        monkeypatch.setattr("oktopk.workloads.speech.an4.SOURCES", nowhere)
    with pytest.raises(UserError, match=problem):
        Trainer(tiny(corpus, tmp_path / "run", **values))


@pytest.mark.usefixtures("_alone")
def test_weights_that_do_not_fit(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for content, problem in (
        ({"bytes.weight": torch.zeros(3)}, "has no .*Use weights of the same workload"),
        ({"linear.weight": torch.zeros(3)}, "linear.weight: .*--width and --depth"),
        (torch.zeros(3), "holds no state_dict"),
        ({1: torch.zeros(3)}, "holds no state_dict"),
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=problem):
            Trainer(tiny(corpus, tmp_path / "run", pretrain=str(path)))
    path.write_text("no weights")
    with pytest.raises(UserError, match="cannot be read"):
        Trainer(tiny(corpus, tmp_path / "run", pretrain=str(path)))


def test_learning_rates() -> None:
    constant = Optimizer(schedule="constant")
    assert {learning_rate(constant, step, 100, 1 + step // 10) for step in range(100)} == {0.01}
    anneal = Optimizer()
    assert learning_rate(anneal, 0, 100, 1) == 0.01
    assert learning_rate(anneal, 50, 100, 3) == pytest.approx(0.01 / 1.01**2)
    assert learning_rate(anneal, 50, 100, 100_000) == 0.0
    cycle = Optimizer(schedule="onecycle", lr=1.0)
    rates = [learning_rate(cycle, step, 100, 1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lr": 0.0}, "--lr"),
        ({"dataset": "librispeech"}, "an4, spoken, manifest"),
        ({"nworkers": 0}, "--nworkers"),
        ({"compressor": "zip"}, "oktopk"),
        ({"density": 2.0}, "density"),
        ({"dataset": "manifest"}, "--train-manifest"),
        ({"momentum_correction": True, "optimizer": "adamw"}, "sgd"),
        ({"bucket_mb": 0.0}, "--bucket-mb"),
        ({"seed": -1}, "--seed"),
        ({"max_epochs": 0}, "--max-epochs"),
        ({"batch_size": -1}, "--batch-size"),
        ({"depth": 10**30}, "--depth is 10*, but must be at most 1000"),
        ({"threads": 10**30}, "--threads"),
        ({"seed": 1 << 40}, "--seed"),
        ({"bucket_mb": 1e300}, "--bucket-mb"),
        ({"data_dir": "a\0b"}, r"--data-dir is a\\x00b, but must be text in UTF-8"),
        ({"run_dir": "a\udcffb"}, r"--run-dir is a\\xffb, but must be text in UTF-8"),
    ],
)
def test_bad_configurations(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Config.of(**values)


@pytest.mark.parametrize("other", [{"compressor": "topka"}, {"compression": False}])
@pytest.mark.parametrize(
    ("name", "dataset"),
    {
        (each.name, workload.datasets()[0] if kind is workload else "an4")
        for workload in WORKLOADS
        for kind in sections(workload).values()
        for each in kind.options().values()
        if each.kind is float
    },
)
def test_numbers_that_are_none(name: str, dataset: str, other: dict[str, Any]) -> None:
    """Refused at the start, also where nothing would use them: the summary could not be saved."""
    for value in (math.nan, math.inf, -math.inf, -1.0):
        with pytest.raises(UserError, match=rf"^{flag(name)} is {value}, but must be"):
            Config.of(**{name: value, "dataset": dataset, **other})
