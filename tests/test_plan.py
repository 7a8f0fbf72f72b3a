"""`oktopk plan`: flags, tables, JSON, curves, and a real measurement."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch import torchrun
from oktopk.cli import main
from oktopk.common.errors import UserError
from oktopk.common.host import cores
from oktopk.cost import Link, Machine
from oktopk.lab.plan import answer, calibration, command
from oktopk.lab.plan.answer import ALWAYS, NEVER, Question
from oktopk.lab.plan.calibration import Calibration
from oktopk.lab.plan.command import elements
from oktopk.train.config.recipes import recipe
from oktopk.workloads import RECIPES


def question(**changes: Any) -> Question:
    values = {"numel": 27_600_000, "size": 8, "link": Link.of(1e9, 5e-5), "machine": Machine()}
    return Question(**{**values, **changes})


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_table_with_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--params 27.6M --nworkers 8 --bandwidth 100mbit --algorithms oktopk topka"
    assert main(["plan", *flags.split(), "--wires", "int8", "int4", "--density", "0.01"]) == 0
    shown = capsys.readouterr().out
    heads = [line.split("  ")[0] for line in shown.splitlines()]
    rows = [head for head in heads if head.startswith(("dense", "oktopk", "topka"))]
    of_sparse = [f"{name} {wire} 0.01" for name in ("oktopk", "topka") for wire in ("int8", "int4")]
    assert rows == ["dense", *of_sparse]
    assert "27,600,000 parameters in 4 buckets, P = 8, 100 Mbit/s" in shown
    assert "machine: defaults, measured on another machine: --measure replaces them" in shown
    assert "Recommendation: oktopk int4 0.01" in shown
    assert "Break-even: oktopk int4 0.01 is" in shown


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--params 1e6 --nworkers 4 --step-seconds 0.05 --samples 8 --buckets 1"
    found = planned(capsys, *flags.split())
    assert found["format"] == "oktopk plan"
    assert found["question"]["numel"] == 1_000_000
    dense, *others = found["rows"]
    assert dense["algorithm"] == "dense"
    assert dense["speedup"] == 1
    for row in (dense, *others):
        reduction = row["compute"] + row["transfer"] + row["latency"]
        assert row["seconds"] == pytest.approx(0.05 + reduction)  # one bucket: nothing is hidden
        assert row["communication_share"] == pytest.approx(reduction / row["seconds"])
        assert row["samples_per_second"] == pytest.approx(8 * 4 / row["seconds"])
        assert row["speedup"] == pytest.approx(dense["seconds"] / row["seconds"])
    assert found["best"] in found["recommendation"]


def test_buckets_hide_communication(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--params", "27.6M", "--bandwidth", "1gbit", "--step-seconds", "1"]
    one = planned(capsys, *flags, "--buckets", "1")["rows"][0]
    several = planned(capsys, *flags, "--buckets", "10")["rows"][0]
    assert one["seconds"] == pytest.approx(1 + one["compute"] + one["transfer"] + one["latency"])
    assert several["seconds"] < one["seconds"]


def test_a_recipe_gives_model_workers_and_density(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "lstm_extended")
    config = recipe("lstm_extended")
    assert found["question"]["size"] == config.launch.nworkers == 8
    assert found["question"]["numel"] == 27_569_568
    assert found["question"]["densities"] == [config.compression.density]
    assert found["question"]["samples"] == config.run.batch_size
    assert planned(capsys, "text", "--nworkers", "3")["question"]["size"] == 3


def test_every_recipe_says_how_large_its_model_is() -> None:
    for name in RECIPES:
        assert recipe(name).workload.elements() > 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [("27569568", 27_569_568), ("1.3e9", 1_300_000_000), ("27.6M", 27_600_000), ("7B", 7 * 10**9)],
)
def test_sizes_of_models(text: str, value: int) -> None:
    assert elements(text) == value
    assert elements(text.lower()) == value


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "name a recipe, or the size of a model"),
        ("nothing-like-it", "unknown recipe 'nothing-like-it'"),
        ("--params many", "many is no number of parameters"),
        ("--params 0", "0 is no number of parameters"),
        ("--params nan", "nan is no number of parameters"),
        ("--params e", "e is no number of parameters"),
        ("--params 1e9 --nworkers 0", "--nworkers: 0 is not a whole number of at least 1"),
        ("--params 1e9 --bandwidth fast", "'fast' is no rate: write 1gbit"),
        ("--params 1e9 --latency soon", "'soon' is no delay"),
        ("--params 1e9 --inside-bandwidth 5", "'5' is no rate"),
        ("--params 1e9 --step-seconds -1", "-1 is not a number of seconds"),
        ("--params 1e9 --density 2", "2 is not above 0 and at most 1"),
        ("--params 1e9 --algorithms okktopk", "did you mean oktopk?"),
        ("--params 1e9 --wires int7", "--wires has no 'int7'"),
        ("--params 1e9 --save machine.json", "--save keeps what --measure finds: add --measure"),
        ("--params 1e9 --machine nowhere.json", "--machine nowhere.json: No such file"),
        ("--params 1e9 --measure --machine x.json", "leave out --measure, or --machine"),
        ("--params 1e9 --plot plan.txt", "--plot plan.txt must end in .svg or .png"),
        ("--params 1e9 --measure --save nowhere/x.json", "--save nowhere/x.json cannot be written"),
        ("--params 1e9 --ranks-per-core 0.5", "0.5 is not a number of at least 1"),
    ],
)
def test_a_mistake_is_one_line(
    flags: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *flags.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert problem in captured.err


def test_a_damaged_machine_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    calibration.save(path, Calibration(link=Link(1e9, 1e-5), source="here"))
    good = path.read_text()
    for broken, problem in (
        ("{", "is not JSON"),
        ("[]", "was not written by this version"),
        (re.sub(r'"rate": [\d.e+]+', '"rate": -1', good), "is damaged: rate is -1"),
        (re.sub(r'"pick": [\d.e-]+', '"pick": "much"', good), "is damaged: machine.pick"),
    ):
        path.write_text(broken)
        assert main(["plan", "--params", "1e6", "--machine", str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert re.search(problem, captured.err), captured.err


def test_help_is_quick() -> None:
    program = (
        "import sys, oktopk.cli\n"
        "try: oktopk.cli.main(['plan', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"False"


# What follows from the rows.


@given(st.floats(0.001, 0.2), st.integers(2, 64), st.floats(1e-7, 1e-4))
def test_sparse_pays_below_the_break_even_and_not_above(
    density: float, size: int, slow: float
) -> None:
    asked = question(size=size, densities=[density], machine=Machine(pick=slow))
    found = answer.answer(asked)
    assert found.sparse is not None
    row = found.sparse

    def pays(bits: float) -> bool:
        mine = answer.predicted(asked.at(bits), row.algorithm, row.wire, row.density)
        return mine.step.seconds < answer.predicted(asked.at(bits), "dense").step.seconds

    if found.break_even == ALWAYS:
        assert pays(answer.FASTEST)
    elif found.break_even == NEVER:
        assert not pays(1e9)
    else:
        assert isinstance(found.break_even, float)
        assert pays(found.break_even * 0.99)
        assert not pays(found.break_even * 1.01)


def test_sentences() -> None:
    slow = answer.answer(question(link=Link.of(1e8, 5e-5)))
    assert "oktopk int8 0.02, " in answer.recommendation(question(), slow)
    hopeless = question(machine=Machine(pick=1.0, copy=0.0))
    found = answer.answer(hopeless)
    assert found.break_even == NEVER
    assert "never faster than dense" in answer.break_even_sentence(found)
    assert "compression takes longer than it saves" in answer.recommendation(hopeless, found)
    dense = question(algorithms=["dense"])
    found = answer.answer(dense)
    assert answer.break_even_sentence(found) == ""
    assert "Recommendation: dense" in answer.recommendation(dense, found)
    alone = question(size=1)
    assert "nobody" in answer.recommendation(alone, answer.answer(alone))


def test_curves_reach_4096_ranks_and_400_gbit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from oktopk.lab.plan import plots

    assert plots.SIZES[-1] == 4096
    assert plots.RATES[0] == 1e7
    assert plots.RATES[-1] >= 3.9e11
    path = tmp_path / "plan.svg"
    flags = ["--params", "27.6M", "--algorithms", "oktopk", "topka", "--plot", str(path)]
    assert main(["plan", *flags]) == 0
    drawn = path.read_text()
    for text in ("oktopk int8 0.02", "topka int8 0.02", "dense", "4,096", "ms a step", "100G"):
        assert text in drawn


# Measuring, for real.


def test_measuring_finds_this_machine_and_saves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    assert main(["plan", "--measure", "--save", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "ranks over loopback" in shown
    found = calibration.load(path)
    machine, link = found.machine, found.link
    assert link is not None
    # Processors differ, but none takes a thousandth of these times, or a thousand times as long.
    for name in ("element", "pick", "encode", "decode", "apply", "merge", "dense", "step"):
        ratio = getattr(machine, name) / getattr(Machine(), name)
        assert 1e-3 < ratio < 1e3, name
    assert 1e7 < link.rate < 1e12
    assert 1e-6 < link.latency < 1
    assert main(["plan", "--params", "1e6", "--machine", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"from {path}" in shown
    assert "defaults" not in shown


def test_ranks_of_a_job_measure_their_own_link(tmp_path: Path) -> None:
    script, path = tmp_path / "plan.py", tmp_path / "machine.json"
    script.write_text("import sys\nfrom oktopk.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    done = torchrun(script, "plan", "--measure", "--save", path, "--params", "1e6")
    assert done.count("Recommendation:") == 1  # rank 0 alone answers
    found = calibration.load(path)
    assert "the 2 ranks of this job" in found.source
    assert found.machine.ranks_a_core == max(1.0, 2 / len(cores()))


def test_a_rank_alone_cannot_measure_a_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--measure needs two ranks"):
        _run("--measure")
    assert capsys.readouterr().out == ""


def _run(*flags: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(flags))


def test_kernels_are_measured_in_processor_time() -> None:
    from oktopk.lab.plan import probe

    vector = torch.ones(1 << 20)
    idle = probe._seconds(lambda: __import__("time").sleep(0.02))
    assert idle < 0.01
    assert probe._seconds(lambda: vector.add_(1.0)) > 0
