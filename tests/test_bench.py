"""`oktopk bench`: specs, mistakes, and small benchmarks end to end with real ranks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import oktopk
from oktopk.cli import main
from oktopk.common.errors import UserError
from oktopk.core.stats import STAGES
from oktopk.lab.bench import contenders, files, race, results, tables
from oktopk.lab.bench.contenders import Contender, PowerSGD, parse
from oktopk.lab.bench.measure import with_traffic
from oktopk.lab.bench.messages import (
    Answer,
    Cost,
    Course,
    End,
    Job,
    Progress,
    RawJob,
    Start,
    Step,
    Traffic,
    TrainingJob,
    decode,
    encode,
)
from oktopk.lab.bench.ranks import Ranks, RanksError
from oktopk.lab.bench.results import Result, Setting, Spread
from oktopk.lab.network import Loopback, unavailable
from oktopk.workloads.speech import manifest, spoken

SPECS = [
    *("dense", "fp16", "bf16", "powersgd:1", "oktopk", "oktopk:density=0.1,threshold_interval=2"),
    *("topka", "topkdsa", "gtopk", "gaussiank", "own-dense"),
]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OKTOPK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# Specs.


def test_a_contender_is_a_name_and_options() -> None:
    assert parse("dense", training=False) == Contender("dense", "dense")
    assert parse("OkTopk", training=False).algorithm(density=0.5) == oktopk.OkTopk(density=0.5)
    spec = "oktopk:density=0.01,warmup_steps=20,ramp=0.25/0.06,lr=0.002,scope=model"
    found = parse(spec, training=True)
    assert found.spec == spec
    assert found.algorithm(density=0.5, warmup_steps=7) == oktopk.OkTopk(
        density=0.01, warmup_steps=20, ramp=(0.25, 0.06)
    )
    assert found.training == {"lr": 0.002, "scope": "model"}
    assert found.dense_steps(7) == 20
    assert parse("oktopk", training=True).dense_steps(7) == 7
    assert parse("own-dense", training=False).algorithm(density=0.1) == oktopk.Dense()
    assert parse("powersgd:4", training=False).power_sgd() == PowerSGD(rank=4)
    both = parse("powersgd:rank=2,start=9", training=False)
    assert both.power_sgd() == PowerSGD(rank=2, start=9)
    assert both.dense_steps(0) == 9


def test_every_algorithm_and_all_of_its_options_can_be_written() -> None:
    for name in contenders.known():
        found = parse(name, training=False)
        if not found.own:
            continue
        made = found.algorithm()
        for option, value in vars(made).items():
            text = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert parse(f"{name}:{option}={text}", training=False).algorithm() == made


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("oktpk", "did you mean oktopk?"),
        ("oktopk:densty=0.1", "there is no option 'densty' for oktopk; there are: density, "),
        ("oktopk:density=two", "density must be a number, not 'two'"),
        ("oktopk:density=2", "density is 2.0, but must be above 0 and at most 1"),
        ("oktopk:threshold_interval=0", "threshold_interval is 0"),
        ("oktopk:capacity=inf", "capacity must be a number, not 'inf'"),
        ("oktopk-variable:balance_trigger=nan", "balance_trigger must be a number, not 'nan'"),
        ("powersgd:1,min_compression_rate=-inf", "min_compression_rate must be a number"),
        ("powersgd:1,min_compression_rate=-1", "min_compression_rate is -1.0"),
        ("oktopk:warmup_steps", "warmup_steps must be a whole number, not ''"),
        ("oktopk:lr=0.1", "lr is an option of training"),
        ("fp16:density=0.1", "there is no option 'density' for fp16; there are: none"),
        ("oktopk:", "no options follow the colon"),
        ("powersgd:0", "the rank is 0, but must be at least 1"),
        ("powersgd:1,start=1", "start is 1, but must be at least 2"),
    ],
)
def test_a_wrong_spec_is_told_with_the_fix(spec: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        parse(spec, training=False)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--contenders oktpk", "did you mean oktopk?"),
        ("--hosts 2 300", "no network of 300 hosts: take 1 to 254"),
        ("--numel 0", "0 is not a whole number of at least 1"),
        ("--density 1.5", "1.5 is not above 0 and at most 1"),
        ("--numel 10000000000000", "--numel 10000000000000 takes at least 640 TB on 4 hosts"),
        (f"--numel {10**30}", f"{10**30} is too much, 1000000000000000 is the most"),
        ("--threads 1000000", "1000000 is too much, 4096 is the most"),
        (f"--seed {1 << 40}", "is too much"),
        ("--seconds nan", "nan is not above 0 and at most 1e+08"),
        ("--timeout 1e300", "1e300 is not above 0 and at most 1e+08"),
        ("--target-loss nan", "nan is not a finite number"),
        ("--target-loss=-inf", "-inf is not a finite number"),
        ("--contenders oktopk:warmup_steps=1000000", "at most 1000 are allowed"),
        ("--contenders powersgd:1,start=1000000", "at most 1000 are allowed"),
        ("--contenders powersgd:1,min_compression_rate=nan", "must be a number, not 'nan'"),
        ("--loopback --rate 1gbit", "--loopback has no --rate"),
        ("--contenders dense dense:lr=1", "option of training"),
        ("train --recipe nope", "unknown recipe"),
        ("train --set widht=3", "--set widht=3: there is no 'widht'"),
        ("train --set width=many", "width must be a whole number or none"),
        ("train --set lr=nan", "lr must be a number, not 'nan'"),
        (
            "train --contenders oktopk:optimizer=adam",
            "oktopk:optimizer=adam: --optimizer is 'adam'",
        ),
        ("--json /nowhere/results.json", "cannot be written"),
        ("--json {old}", "is not JSON"),
        ("--plot speed.pdf", "must end in .svg or .png"),
        ("--plot /nowhere/speed.svg", "cannot be written (No such file"),
        ("--plot {folder}.svg", "is a folder: name a file in it"),
        ("--json {folder}.svg --append", "Is a directory"),
        (f"--json {'x' * 300}", "cannot be written (File name too long"),
        (f"--json {'x' * 300} --append", "cannot be written (File name too long"),
        ("--json /dev/zero --append", "it is a device that has no end"),
        ("--report-only", "needs --json"),
        ("--append", "needs --json"),
        ("--report-only --json missing.json", "No such file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.json"
    old.write_text("not JSON")
    (tmp_path / "a.svg").mkdir()
    arguments = line.format(old=f"{old} --append", folder=tmp_path / "a").split()
    if "--loopback" not in arguments:
        arguments.append("--loopback")
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    for word in ("powersgd:2", "--contenders", "examples:", "x dense", "--report-only"):
        assert word in shown


# From records to results.


def step(seconds: float, loss: float = 0.0, elapsed: float = 0.0) -> Step:
    return Step(Cost(1.0, 2.0, 100, loss=loss), seconds, cpu=1.0, elapsed=elapsed)


SETTING = Setting("train", 2, "1gbit", 1e9, None, 0.0, False, cores=2, threads=1)


def training_answer(losses: list[float], seconds: float, failed: str = "") -> Answer:
    steps = [step(seconds, loss, seconds * (i + 1)) for i, loss in enumerate(losses)]
    return Answer(5, steps, Course(2, len(losses), samples=8, dense_steps=0, failed=failed))


def training_result(losses: list[float], seconds: float) -> Result:
    answer = training_answer(losses, seconds)
    result = results.summarize(SETTING, "dense", None, [[answer, answer]])
    return results.add_training(result, [answer, answer])


def test_the_slowest_rank_counts_and_the_rest_are_means() -> None:
    def answer(*seconds: float) -> Answer:
        steps = [replace(step(each), measured=n > 0) for n, each in enumerate(seconds)]
        counters = [*(Traffic(1000 * n, 0) for n in range(len(seconds))), Traffic(4000, 5)]
        return Answer(5, with_traffic(steps, counters), notes=["note"])

    found = results.summarize(SETTING, "x", 0.1, [[answer(9, 1, 2, 3), answer(9, 2, 2, 1)]])
    assert found.seconds == Spread(median=2, lower=2, upper=2.5)
    assert found.steps == 3
    assert found.bytes_sent == 1000
    assert found.bytes_received == pytest.approx(5 / 3)
    assert found.notes == ["note"]
    assert found.name == "x:density=0.1"


def test_seconds_to_a_loss_that_whole_windows_reach() -> None:
    # The first step's loss is small, but of one batch only.
    dense = training_result([1.0, 9.0, 6.0, 4.0, 3.0, 3.0], seconds=2.0)
    fast = training_result([1.0, 9.0, 6.0, 4.0, 3.0, 3.0], seconds=0.5)
    poor = training_result([1.0, 9.0, 9.0, 9.0, 9.0, 9.0], seconds=0.5)
    assert dense.window == 2
    compared = results.compare([dense, fast, poor], None)
    assert [result.final_loss for result in compared] == [3.0, 3.0, 9.0]
    assert [result.seconds_to_target for result in compared] == [12.0, 3.0, None]
    assert [result.target_speedup for result in compared] == [1.0, 4.0, None]
    assert [result.speedup for result in compared] == [1.0, 4.0, 4.0]
    assert results.compare([dense], 4.5)[0].seconds_to_target == 10.0
    assert dense.samples_per_second == 4.0


def test_training_steps_are_compared_with_the_same_steps_of_dense() -> None:
    # Batches get longer; the second is ended early, the third has other steps only.
    dense, short = training_result([1.0] * 8, 1.0), training_result([1.0] * 3, 1.0)
    dense = replace(dense, step_seconds=[9.0, 2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0], steps=7)
    short = replace(short, contender="fp16", step_seconds=[9.0, 1.0, 2.0], steps=2)
    late = replace(dense, contender="oktopk", step_seconds=[8.0] * 9, steps=1)
    assert [each.speedup for each in results.compare([dense, short, late], None)] == [1, 2, None]
    # Without dense there is nothing to compare with.
    assert [each.speedup for each in results.compare([short], None)] == [None]
    assert results.compare([], None) == []


# Messages.


RAW = RawJob("oktopk", 0.1, 1000, 1, first=0, settle=0, skip=0, steps=10**6, least=1, seconds=60.0)


def test_messages_arrive_as_they_were_sent() -> None:
    values: dict[str, bool | int | float | str | None] = {}
    values |= {"lr": 0.1, "width": 3, "dnn": "x", "augment": True, "depth": None}
    training = TrainingJob("dense", None, "spoken", values, 0, 9.0, 2)
    answer = replace(training_answer([4.0, 3.0], 0.1), notes=["note"])
    answer.steps[0] = replace(answer.steps[0], moved=Traffic(7, 8))
    start = Start(0, 2, "folder", "lo", counts=False, threads=1, timeout=9.0)
    for message in (RAW, training, answer, start, End()):
        line = encode(message)
        assert line.count("\n") == 1
        again = decode(line, type(message) | Progress)
        assert again == message
    assert [type(value) for value in decode(encode(training), Job).values.values()] == [
        *(float, int, str, bool, type(None))
    ]
    # JSON has no such number.
    lost = decode(encode(training_answer([math.nan], 0.1)), Answer)
    assert lost.steps[0].cost.loss is None
    assert math.isnan(training_result([1.0, math.nan], 0.1).final_loss or 0.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "Expecting value"),
        ("[1]", "the kind of a message is None, but must be RawJob or End"),
        ('{"kind": ["RawJob"]}', "must be RawJob or End"),
        ('{"kind": "Progress", "step": 1, "steps": 2}', "is 'Progress', but must be RawJob or End"),
        ('{"kind": "RawJob"}', "contender is missing"),
        (encode(RAW).replace("1000000", '"many"'), 'steps is "many", but must be a whole number'),
        (encode(RAW).replace("60.0", "NaN"), "seconds is NaN, but must be a number"),
    ],
)
def test_a_wrong_message_is_refused(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        decode(line, RawJob | End)


# Files.


def kept_run() -> dict[str, Any]:
    """A run of one result, as a file has it."""
    result = asdict(training_result([4.0, 3.0, 2.0], 0.1))
    return {"when": "now", "machine": {"processor": "a fast one"}, "results": [result]}


def damaged_runs() -> Iterator[tuple[Any, str]]:
    """What a file may have instead of its runs, and the complaint."""
    yield [{"results": []}], "is damaged: runs[0].when is missing"
    yield [{**kept_run(), "machine": {}}], "is damaged: runs[0].machine.processor is missing"
    yield [{**kept_run(), "machine": "fast"}], 'machine is "fast", but must be an object'
    yield [{**kept_run(), "notes": "slow"}], 'notes is "slow", but must be a list'
    yield [{**kept_run(), "results": None}], "results is null, but must be a list"
    yield {}, "runs is an object, but must be a list"
    yield [7], "runs[0] is 7, but must be an object"
    yield [], "holds no results"
    yield [{**kept_run(), "results": []}], "holds no results"
    for path, value, says in (
        (("setting",), 3, r"results[0].setting is 3"),
        (("setting", "workload"), "walk", "setting.workload is 'walk'"),
        (("setting", "hosts"), 2.5, "results[0].setting.hosts is 2.5"),
        (("seconds", "median"), None, "results[0].seconds.median is null"),
        (("seconds", "lower"), math.nan, "results[0].seconds.lower is NaN"),
        (("contender",), 3, "results[0].contender is 3"),
        (("stages",), {"data": "long"}, 'results[0].stages.data is "long"'),
        (("curve",), [[1.0]], "points without two numbers"),
        (("curve",), [[1.0, "low"]], 'results[0].curve[0][1] is "low"'),
        (("window",), 0, "window is 0"),
        (("speedup",), "2x", 'results[0].speedup is "2x"'),
    ):
        run = kept_run()
        *above, last = path
        place = run["results"][0]
        for key in above:
            place = place[key]
        place[last] = value
        yield [run], says


@pytest.mark.parametrize(("runs", "says"), list(damaged_runs()))
def test_a_damaged_file_is_told(
    runs: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"format": files.FORMAT, "version": files.VERSION, "runs": runs}))
    assert bench("--report-only --json", path, "--plot", tmp_path / "plot.svg") == 2
    error = capsys.readouterr().err
    assert f"{path} " in error
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b'{"runs": ' * 100_000, "nested too deeply"),
        (b"[]", "does not hold results of oktopk bench"),
        (b'{"format": "oktopk bench", "version": 9}', "has version 9, but must have 1"),
        (b'{"format": "oktopk bench", "version": 1}', "runs is null, but must be a list"),
    ],
)
def test_a_file_of_something_else_is_told(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    for mode in ("--report-only --json", "--loopback --append --json"):
        assert bench(mode, path) == 2
        assert says in capsys.readouterr().err


def test_devices_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert bench("raw --loopback --plot", pipe.rename(tmp_path / "pipe.svg")) == 2
    pipe = tmp_path / "pipe.svg"
    assert f"--plot {pipe} is not an ordinary file" in capsys.readouterr().err
    recording = manifest.Utterance(tmp_path / "a.wav", "YES", 1.0)
    with pytest.raises(UserError, match="is not an ordinary file"):
        manifest.write(pipe, [recording])
    assert pipe.is_fifo()


def test_a_whole_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with a curve that has no finite loss, or not only such."""
    run = kept_run()
    run["results"] += [{**run["results"][0], "contender": "fp16", "curve": []}]
    run["results"] += [
        {**run["results"][0], "contender": "bf16", "curve": [[1.0, 2.0], [2.0, None]]}
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"format": files.FORMAT, "version": files.VERSION, "runs": [run]}))
    assert bench("--report-only --json", path, "--plot", tmp_path / "plot.svg") == 0
    assert "now, a fast one\ntrain: P = 2" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir() if file != path] == ["plot.svg"]


class FakeRanks:
    """Trains in no time, but for what is told by lr: 1 diverges at once, 2 dies, 3 is Ctrl-C."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> FakeRanks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, job: Job, _: object) -> list[Answer]:
        if job.contender.endswith("lr=2"):
            raise RanksError("rank 1 died")
        if job.contender.endswith("lr=3"):
            raise KeyboardInterrupt
        if job.contender.endswith("lr=1"):
            return [training_answer([], 0.1, "diverged in step 0")]
        return [training_answer([4.0, 3.0, 2.0], 0.1)]


@pytest.mark.parametrize(("last", "code"), [("fp16:lr=2", 1), ("fp16:lr=3", 130), ("bf16", 0)])
@pytest.mark.parametrize("first", ["dense", "dense:lr=1"])
def test_what_is_measured_is_kept_whatever_comes(
    first: str,
    last: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(race, "Ranks", FakeRanks)
    monkeypatch.setattr("oktopk.lab.bench.plan._check_training", lambda _: None)
    path, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    specs = [first, "fp16:lr=1", "fp16", last]
    line = "train --loopback --hosts 2 --contenders"
    assert bench(line, *specs, "--json", path, "--plot", plot) == code
    diverged = [spec for spec in specs if spec.endswith("lr=1")]
    measured = [spec for spec in specs if "lr=" not in spec]
    (run,) = files.load(path)
    assert [result.contender for result in run.results] == measured
    notes = [f"P = 2, loopback, not shaped: {spec}: diverged in step 0" for spec in diverged]
    assert run.notes == notes
    printed = capsys.readouterr()
    for text in (*measured, *notes):
        assert f"\n{text}" in printed.out
    assert printed.out.count("train: P = 2") == 1
    assert plot.exists()
    if code == 1:
        assert "P = 2, loopback, not shaped: fp16:lr=2: rank 1 died" in printed.err
    assert bench("--report-only --json", path) == 0
    assert all(note in capsys.readouterr().out for note in notes[:1])


# End to end.


def bench(line: str, *more: object) -> int:
    return main(["bench", *line.split(), *map(str, more)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def raw_file(folder: Path) -> Path:
    """Every kind of contender, on two ranks over loopback."""
    path = folder / "results.json"
    line = "raw --loopback --hosts 2 --numel 20000 --steps 3 --skip 3 --density 0.02 0.05 --plot"
    code = bench(line, folder / "raw.svg", "--json", path, "--contenders", *SPECS)
    assert code == 0
    return path


def test_raw_results_have_their_schema(raw_file: Path) -> None:
    kept = json.loads(raw_file.read_text())
    assert kept["format"] == "oktopk bench"
    assert kept["version"] == 1
    (run,) = kept["runs"]
    assert {"cores", "processor", "system", "python", "torch", "oktopk"} <= run["machine"].keys()
    assert run["arguments"]["numel"] == 20_000
    rows = run["results"]
    names = [(row["contender"], row["density"]) for row in rows]
    # Sparse ones with both densities, but for the one that has its own.
    assert len(names) == len(set(names)) == len(SPECS) + 5
    assert rows[0]["contender"] == "dense"
    assert rows[0]["speedup"] == 1.0
    assert ("oktopk:density=0.1,threshold_interval=2", 0.1) in names
    for row in rows:
        assert row["setting"]["hosts"] == 2
        assert row["setting"]["loopback"] is True
        assert row["steps"] >= 3
        spread = row["seconds"]
        assert 0 < spread["lower"] <= spread["median"] <= spread["upper"]
        assert row["compute"] >= 0
        assert row["communication"] > 0
        assert row["compute"] + row["communication"] <= 3 * spread["upper"]
        assert row["bytes_sent"] is None
        assert row["applied"] > 0
        own = row["contender"] not in ("dense", "fp16", "bf16", "powersgd:1")
        assert list(row["stages"]) == (list(STAGES) if own else [])
    counted = {row["contender"]: row["bytes_counted"] for row in rows}
    assert counted["dense"] == 80_000  # 2n(P-1)/P words
    assert counted["fp16"] == counted["bf16"] == 40_000
    # A matrix of 141 x 141 and what is left over: P, Q and 119 elements.
    assert counted["powersgd:1"] == 4 * (141 + 141 + 20_000 - 141 * 141)
    assert counted["oktopk"] < 20_000


def test_training_is_added_and_all_are_reported_together(
    raw_file: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = spoken.prepare(folder / "corpus", progress=False, train=22, validation=5)[0].parent
    tiny = [
        "--set",
        "dataset=manifest",
        f"train_manifest={corpus / 'spoken_train_manifest.csv'}",
        f"val_manifest={corpus / 'spoken_val_manifest.csv'}",
        *("width=24", "depth=1", "batch_size=2", "dense_below=100", "bucket_mb=0.05"),
    ]
    line = "train --loopback --hosts 2 --steps 8 --contenders own-dense powersgd:1"
    sparse = "oktopk:warmup_steps=2,lr=0.001"
    code = bench(line, sparse, *tiny, "--json", raw_file, "--append")
    printed = capsys.readouterr().out
    assert code == 0
    assert "train: P = 2, loopback, not shaped" in printed
    kept = json.loads(raw_file.read_text())
    assert [run["arguments"]["workload"] for run in kept["runs"]] == ["raw", "train"]
    dense, own_dense, power, ours = kept["runs"][1]["results"]
    for row in (dense, own_dense, power, ours):
        assert len(row["curve"]) == 8
        times = [seconds for seconds, _ in row["curve"]]
        assert times == sorted(times)
        assert row["samples_per_second"] == pytest.approx(8 * 4 / row["total_seconds"])
        assert math.isfinite(row["final_loss"])
        assert row["target_loss"] == dense["final_loss"]
        assert list(row["stages"]) == ["data", "forward", "backward", "synchronise", "update"]
    # The same weights, batches and optimizer: dense of the library is DDP's.
    losses = [[loss for _, loss in row["curve"]] for row in (dense, own_dense, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert dense["seconds_to_target"] is not None
    assert ours["steps"] == 8 - 3  # neither the warm-up nor the first sparse step
    assert ours["bytes_counted"] < dense["bytes_counted"] / 3
    assert power["bytes_counted"] < dense["bytes_counted"] / 3

    together = folder / "all.png"
    assert bench("--report-only --json", raw_file, "--plot", together) == 0
    printed = capsys.readouterr().out
    assert "raw: P = 2" in printed
    assert "train: P = 2" in printed
    assert together.stat().st_size > 10_000
    svg = (folder / "raw.svg").read_text()
    assert "times dense" in svg
    assert "oktopk:density=0.05" in svg


def test_a_file_is_not_overwritten(raw_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = raw_file.read_text()
    assert bench("--loopback --json", raw_file) == 2
    assert "--append adds to it" in capsys.readouterr().err
    assert raw_file.read_text() == before


@pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
def test_on_emulated_links_bytes_are_counted_twice(folder: Path) -> None:
    path = folder / "lab.json"
    line = "raw --hosts 2 --rate 200mbit 1gbit --delay 0.2ms --numel 200000 --steps 4 --skip 3"
    assert bench(line, "--contenders", "oktopk", "--json", path, "--plot", folder / "lab.svg") == 0
    rows = files.load(path)[0].results
    assert [(row.contender, row.setting.rate) for row in rows] == [
        ("dense", "200mbit"),
        ("oktopk", "200mbit"),
        ("dense", "1gbit"),
        ("oktopk", "1gbit"),
    ]
    for row in rows:
        assert row.bytes_sent is not None
        assert row.bytes_received is not None
        # Headers, acknowledgements, and the number that lets ranks begin together.
        assert row.bytes_counted < row.bytes_sent < 1.2 * row.bytes_counted + 5000
        assert row.bytes_received == pytest.approx(row.bytes_sent, rel=0.2)
    # 800,000 bytes at 25 MB/s.
    assert rows[0].seconds.median > 0.8 * 800_000 / 25e6
    assert "bit/s" in (folder / "lab.svg").read_text()
    assert "200mbit, 0.2ms delay" in tables.report(rows[:2])


@pytest.mark.parametrize(
    ("job", "kind", "says"),
    [
        (replace(RAW, contender="oktpk"), UserError, "unknown contender 'oktpk'"),
        (replace(RAW, density=5.0), RanksError, "rank 0 failed\nTraceback"),
    ],
)
def test_a_rank_that_cannot_go_on_says_why(job: RawJob, kind: type[Exception], says: str) -> None:
    with (
        Loopback(1) as hosts,
        pytest.raises(kind, match=says),
        Ranks(hosts, counts=False, threads=1, timeout=60.0) as ranks,
    ):
        ranks.run(job, lambda _: None)


def test_a_rank_that_dies_ends_the_bench_with_a_message() -> None:
    with Loopback(2) as hosts:
        ranks = Ranks(hosts, counts=False, threads=1, timeout=60.0)
        processes = list(ranks._processes)

        def kill(said: Progress) -> None:
            if said.step == 3:
                os.kill(processes[1].pid, signal.SIGKILL)

        since = time.monotonic()
        with ranks, pytest.raises(RanksError, match="rank 1 died with exit code -9"):
            ranks.run(RAW, kill)
        assert time.monotonic() - since < 30
        assert all(process.returncode is not None for process in processes)
