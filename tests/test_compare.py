"""`oktopk compare`: the grid, statistics, tables, and small grids with real ranks."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from oktopk.cli import _Parser, main
from oktopk.common.errors import UserError
from oktopk.lab.compare import command, grid, tables
from oktopk.lab.compare.folder import Folder
from oktopk.lab.compare.grid import Cell, Grid, Variant, check
from oktopk.lab.compare.progress import GridProgress
from oktopk.lab.compare.results import CellRecord, Comparison, compare
from oktopk.lab.compare.running import Step, reason
from oktopk.lab.compare.setting import Links, Setting
from oktopk.lab.compare.statistics import Difference, Measure, half_width, student_quantile
from oktopk.lab.compare.trained import Result, Trained
from oktopk.lab.network import unavailable
from oktopk.train.config.recipes import recipe
from oktopk.train.metrics_file import read_metrics

needs_network = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))
TINY = (
    *("width=16", "depth=1", "heads=1", "window=16", "epoch_windows=64", "batch_size=4"),
    *("dense_below=0", "examples=0"),
)


def grid_of(line: str) -> Grid:
    """What `oktopk compare` makes of its arguments."""
    parser = _Parser("compare")
    command.add_arguments(parser)
    return check(parser.parse_args(line.split()))


# The grid.


def test_knobs_multiply_only_those_that_have_them() -> None:
    found = grid_of(
        "text --compressors dense,oktopk,gaussiank --densities 0.01,0.02 --warmups 5,6 "
        "--sigma-scales 2,3 --seeds 2"
    )
    counts = {
        name: sum(variant.compressor == name for variant in found.variants)
        for name in ("dense", "oktopk", "gaussiank")
    }
    assert counts == {"dense": 1, "oktopk": 2 * 2, "gaussiank": 2 * 2 * 2}
    cells = found.cells()
    assert len({cell.name for cell in cells}) == len(cells) == 2 * 13
    assert [cell.seed for cell in cells] == [1] * 13 + [2] * 13
    assert cells[0].name == "dense-seed1"
    assert cells[1].name == "oktopk-d0.01-w5-seed1"
    assert cells[12].name == "gaussiank-d0.02-w6-s3.0-seed1"


def test_a_cell_is_a_configuration_of_train() -> None:
    found = grid_of(
        "text --compressors oktopk:wire=int4,lr=0.5,gaussiank --sigma-scales 3 --warmups 7 "
        "--seeds 9, --set width=64 clip=2 --max-steps 30 --data-dir book.txt --nworkers 3"
    )
    first, second = (cell.config(found.setting) for cell in found.cells())
    shared: dict[str, Any] = {"width": 64, "clip": 2.0, "max_steps": 30, "data_dir": "book.txt"}
    shared |= {"nworkers": 3, "seed": 9, "warmup_steps": 7, "report_to": "none", "page": False}
    assert first == recipe("text", **shared, compressor="oktopk", wire="int4", lr=0.5)
    assert second == recipe("text", **shared, compressor="gaussiank", sigma_scale=3.0)


def test_values_come_from_the_recipe_unless_they_are_given() -> None:
    found = grid_of("text")
    assert [variant.name for variant in found.variants] == ["dense", "oktopk-d0.02-w128"]
    assert found.seeds == [1]
    assert found.setting.links == Links(2)


def test_commas_stand_between_compressors_and_between_their_options() -> None:
    words = ["Dense, OkTopk:wire=int4,lr=0.002,gtopk", "topka"]
    assert grid.split(words) == ["dense", "oktopk:wire=int4,lr=0.002", "gtopk", "topka"]


def test_a_knob_of_ones_own_is_not_multiplied() -> None:
    found = grid_of("text --compressors oktopk:density=0.05 --densities 0.01,0.02 --warmups 1")
    assert [variant.density for variant in found.variants] == [0.05]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [1, 2, 3]), ("4,7", [4, 7]), ("7,", [7]), ("0,0,2", [0, 2]), ("1", [1])],
)
def test_seeds_are_counted_or_named(text: str, seeds: Sequence[int]) -> None:
    assert grid.read_seeds(text) == seeds


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("txt", "unknown recipe 'txt'; did you mean text?"),
        ("text --compressors oktpk", "unknown 'oktpk'; did you mean oktopk?"),
        ("--compressors dense text", "the recipe comes first"),
        ("text --compressors oktopk:", "no options follow the colon"),
        ("text --compressors ,", "--compressors has no name"),
        ("text --compressors oktopk:widht=3", "there is no option 'widht'"),
        ("text --compressors dense:density=0.1", "dense has no density"),
        ("text --compressors oktopk:lr=much", "lr must be a number, not 'much'"),
        ("text --compressors oktopk:wire=int3", "--wire is 'int3'"),
        ("text --densities 0.01,2", "2 is not above 0 and at most 1"),
        ("text --max-steps 100", "oktopk-d0.02-w128 would take no sparse step"),
        ("text --densities ,", "',' has no value"),
        ("text --warmups=-1", "-1 is not a whole number of at least 0"),
        ("text --sigma-scales 0", "0 is not above 0"),
        ("text --seeds 0", "--seeds 0: take 1 to"),
        ("text --seeds 1,x", "--seeds 1,x: write how many"),
        ("text --seeds -1", "--seeds -1: write how many"),
        ("text --seeds 1,-2", "each is a whole number"),
        ("text --seeds 9999 --warmups 1,2,3", "at most 10000 are trained"),
        ("text --set widht=3", "there is no 'widht'; did you mean width?"),
        ("text --set density=0.1", "--set density=0.1: write it as --densities"),
        ("text --set max-stpes=3", "did you mean max_steps?"),
        ("text --nworkers 1000", "1000 is too much, 256 is the most"),
        ("text --set width=wide", "width must be a whole number"),
        ("text --set width=30", "--width 30 must be a multiple of --heads 4"),
        ("text --rate 1gbit", "need --hosts"),
        ("text --hosts 2 --nworkers 2", "leave out --nworkers"),
        ("text --hosts 300", "no network of 300 hosts"),
        ("text --hosts 2 --rate fast", "'fast' is no rate"),
        ("text --timeout 0", "0 is not a number of seconds above 0"),
        ("text --target-loss nan", "nan is not a finite number"),
        ("--report-only nowhere", "--report-only nowhere: no comparison is there"),
        ("text --widht 3", "unrecognized arguments: --widht 3"),
    ],
)
def test_a_mistake_is_one_line_and_trains_nothing(
    line: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *line.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_baseline_that_is_not_in_the_grid_is_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    several = ["compare", "text", "--densities", "0.1,0.2", "--dir", str(tmp_path / "c")]
    assert main([*several, "--baseline", "gtopk"]) == 2
    assert "--baseline gtopk is not in the grid" in capsys.readouterr().err
    assert main([*several, "--baseline", "oktopk"]) == 2
    assert "could be each of oktopk-d0.1-w128, oktopk-d0.2-w128" in capsys.readouterr().err


def test_a_launcher_must_not_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="without torchrun"):
        command.run(_parsed("text", "--dir", str(tmp_path / "c")))
    assert list(tmp_path.iterdir()) == []


def _parsed(*arguments: str) -> Any:
    parser = _Parser("compare")
    command.add_arguments(parser)
    return parser.parse_args(list(arguments))


def test_a_folder_with_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert main(["compare", "text", "--dir", str(tmp_path)]) == 2
    assert "has other files in it" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["compare", "text", "--dir", str(tmp_path / "file")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "does not hold results of oktopk compare"),
        ('{"format": "oktopk compare", "version": 99}', "has version 99, but must have 1"),
        ('{"format": "oktopk compare", "version": 1}', "setting is missing"),
    ],
)
def test_a_damaged_file_is_told(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "comparison.json").write_text(content)
    for line in (["--report-only", str(tmp_path)], ["text", "--dir", str(tmp_path)]):
        assert main(["compare", *line]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


def test_two_commands_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Folder(tmp_path / "c").locked():
        assert main(["compare", "text", "--dir", str(tmp_path / "c")]) == 2
    assert "another `oktopk compare` is at work there" in capsys.readouterr().err


# Statistics.


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of published tables, 97.5 %
    [
        *((1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058)),
        *((9, 2.26216), (10, 2.22814), (30, 2.04227), (99, 1.98422)),
    ],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-6 * quantile)


def test_the_interval_of_a_known_sample() -> None:
    # Gosset's sleep data: ten paired differences, 95 % interval 0.70 to 2.46 (R: t.test).
    values = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    half = half_width(values)
    assert half is not None
    mean = sum(values) / len(values)
    assert mean - half == pytest.approx(0.7001142, abs=1e-6)
    assert mean + half == pytest.approx(2.4598858, abs=1e-6)


def test_differences_are_paired_by_seed() -> None:
    found = Difference.of({1: 2.0, 2: 4.0, 9: 100.0}, {2: 1.0, 1: 1.0, 3: 50.0})
    assert found is not None
    assert found.by_seed == {"1": 1.0, "2": 3.0}
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(12.7062, abs=1e-3)
    assert not found.clear
    assert Difference.of({1: 1.0}, {2: 1.0}) is None


def test_one_seed_has_no_spread_and_no_interval() -> None:
    assert Measure.of({3: 5.0}) == Measure(5.0, None, {"3": 5.0})
    assert Difference.of({3: 5.0}, {3: 4.0}) == Difference(1.0, None, {"3": 1.0})
    assert Measure.of({}) is None


# Tables.


DENSE, SPARSE = Variant("dense"), Variant("oktopk", density=0.01, warmup_steps=5)
SETTING = Setting.of(recipe("text"), Links(2))


def _trained(loss: float, *, speed: float = 1.0, **changes: Any) -> Trained:
    """A run whose mean loss falls by 1 a step to the given one."""
    result = Result(
        steps=4,
        sparse_steps=2,
        training_loss=loss,
        window=2,
        validation={"loss": loss + 1, "bits_per_byte": (loss + 1) / math.log(2)},
        seconds=4 / speed,
        samples_per_second=16 * speed,
        bytes_a_step=1e6,
        dense_bytes_a_step=1e6,
        compression_ratio=1.0,
        parameters=1000,
        versions={"oktopk": "1", "torch": "2"},
    )
    curve = [((step + 1) / speed, loss + 3 - step) for step in range(4)]
    return Trained(replace(result, **changes), curve)


def _compared(
    results: dict[Variant, dict[int, Trained]], target: float | None = None
) -> Comparison:
    records, trained = [], {}
    for variant, by_seed in results.items():
        for seed, its in by_seed.items():
            record = CellRecord(Cell(variant, seed).name, variant, seed)
            records.append(record)
            trained[record.name] = its
    return compare(SETTING, records, trained, None, target)


def _rows(comparison: Comparison) -> list[dict[str, str]]:
    """The rows of all tables, by title of the column."""
    return [
        dict(zip(each.columns, row, strict=True))
        for each in tables.tables(comparison)
        for row in each.rows
    ]


def test_tables_say_what_was_found() -> None:
    sparse = {"bytes_a_step": 1e4, "compression_ratio": 100.0}
    found = _compared(
        {
            DENSE: {1: _trained(2.0), 2: _trained(2.2)},
            SPARSE: {
                1: _trained(2.1, speed=2.0, **sparse),
                2: _trained(2.3, speed=2.0, **sparse),
            },
        },
        target=2.25,
    )
    dense, sparse_row, difference, cost, sparse_cost = _rows(found)
    assert dense["compressor"] == "dense"
    assert dense["density"] == "-"
    assert dense["training loss"] == "2.100 ± 0.141"
    assert sparse_row["density"] == "0.01"
    assert sparse_row["warm-up"] == "5"
    assert sparse_row["val loss"] == "3.200 ± 0.141"
    assert difference["pairs"] == "2"
    assert difference["training loss"].startswith("+0.100 ± ")
    assert difference["training loss"].endswith(" worse")
    assert cost["samples/s"] == "16"
    assert cost["to target"] == "4.0s"
    assert sparse_cost["bytes a step"] == "10.0 kB"
    assert sparse_cost["x fewer"] == "100x"
    assert sparse_cost["ratio"] == "100x"
    assert sparse_cost["to target"] == "2.0s (1)"
    text = tables.report(found)
    assert "the target is a training loss of 2.25" in text
    assert text.splitlines()[0].endswith("1,000 parameters, 4 steps; 4 of 4 cells finished")


def test_the_target_is_the_final_loss_of_the_baseline_with_that_seed() -> None:
    found = _compared(
        {
            DENSE: {1: _trained(2.0), 2: _trained(5.0)},
            SPARSE: {1: _trained(2.5, speed=2.0), 2: _trained(4.0, speed=2.0)},
        }
    )
    by_name = {record.name: record for record in found.cells}
    assert by_name["dense-seed2"].target_loss == 5.0
    assert by_name["dense-seed2"].seconds_to_target == 4.0
    assert by_name["oktopk-d0.01-w5-seed1"].seconds_to_target is None
    assert by_name["oktopk-d0.01-w5-seed2"].seconds_to_target == 1.5
    rows = {row.name: row for row in found.rows}
    # Larger by 0.5 with one seed, smaller by 1 with the other: nobody can tell.
    difference = rows["oktopk-d0.01-w5"].differences["training_loss"]
    assert difference.by_seed == {"1": 0.5, "2": -1.0}
    assert not difference.clear
    assert rows["dense"].differences == {}


def test_one_seed_is_told() -> None:
    text = tables.report(_compared({DENSE: {1: _trained(2.0)}, SPARSE: {1: _trained(2.1)}}))
    assert "no interval with one seed" in text
    assert "one seed: no standard deviation" in text
    differences = text.split("difference to dense")[1].split("cost")[0]
    assert "+0.100" in differences
    assert "±" not in differences.split("\n", 1)[1]


def test_without_a_baseline_there_is_no_difference() -> None:
    found = _compared({SPARSE: {1: _trained(2.0)}})
    assert found.baseline is None
    assert "difference" not in tables.report(found)


def test_notes_warn_of_what_readers_would_miss() -> None:
    never = _trained(2.0, sparse_steps=0)
    older = _trained(2.0, versions={"oktopk": "0", "torch": "2"})
    found = _compared({DENSE: {1: older}, SPARSE: {1: never}})
    assert any("oktopk-d0.01-w5 took no sparse step" in note for note in found.notes)
    assert any("oktopk 0, torch 2; oktopk 1, torch 2" in note for note in found.notes)
    empty = compare(SETTING, [CellRecord("dense-seed1", DENSE, 1)], {}, None, None)
    assert tables.tables(empty) == []
    assert "1 cell of 1 not finished" in tables.report(empty)


# Progress.


def _followed(monkeypatch: Any, *, terminal: bool) -> str:
    """What is shown of a grid of three cells, of which the first was finished before."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    with GridProgress(3, 1, console) as shown:
        for name in ("oktopk-seed1", "oktopk-seed2"):
            shown.begin(name)
            for seconds, done in ((8, 10), (62, 40)):
                now[0] += seconds
                shown.stepped(Step(done, 50, 2.5))
            now[0] += 10
            shown.end("training loss 1.500", failed=name.endswith("2"))
    return out.getvalue()


def test_progress_is_plain_lines_without_a_terminal(monkeypatch: Any) -> None:
    # The start takes 8 seconds with 10 steps, 30 more take 62: 40 would take 82.7.
    assert _followed(monkeypatch, terminal=False).splitlines() == [
        "[1/3] oktopk-seed1: step 40/50, loss 2.500; 1m51s left",
        "[2/3] oktopk-seed1: training loss 1.500, 1m20s; 1m20s left",
        "[2/3] oktopk-seed2: step 40/50, loss 2.500; 10.0s left",
        "[3/3] oktopk-seed2: training loss 1.500, 1m20s",
    ]


def test_progress_is_bars_on_a_terminal(monkeypatch: Any) -> None:
    shown = _followed(monkeypatch, terminal=True)
    assert "10/50" in shown
    assert "1/3" in shown
    assert "step 40/50, loss 2.500; 1m51s left" in shown
    assert "[3/3] oktopk-seed2: training loss 1.500" in shown


# Failures.


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ("[1] hello\noktopk: error: --lr is 0\nterminate called\n", -signal.SIGABRT, "--lr is 0"),
        ("oktopk: error: --lr is 0\n", 2, "--lr is 0"),
        ("hello\n", -signal.SIGKILL, "rank 3 was ended by SIGKILL: if memory ran out"),
        ("hello\n", -signal.SIGSEGV, "rank 3 was ended by SIGSEGV ("),
        ("oktopk: worker 3 failed\nTraceback\nValueError: x\n", 1, "rank 3 failed: ValueError: x"),
        ("", 7, "rank 3 failed: exit code 7"),
        ("hello\n", None, "no step came for too long"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(
    said: str, code: int | None, why: str, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    before = "oktopk: error: of an earlier attempt\n"
    log.write_text(before + said)
    found = reason(log, len(before), 3, code)
    assert found.startswith(why)
    assert "\n" not in found


# Real grids.


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is quick to read and easy to learn."""
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 500)
    return path


def arguments(book: Path, folder: Path, *more: str, steps: int = 8) -> list[str]:
    return [
        *("compare", "text", "--data-dir", str(book), "--dir", str(folder)),
        *("--max-steps", str(steps), "--warmups", "3", "--nworkers", "2"),
        *("--set", *TINY, *more),
    ]


@pytest.fixture(scope="module")
def finished(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small grid: dense and oktopk, two seeds; and a cell that diverges."""
    folder = tmp_path_factory.mktemp("compare") / "grid"
    line = arguments(book, folder)
    assert main([*line, "--compressors", "dense,oktopk", "--densities", "0.1", "--seeds", "2"]) == 0
    return folder


def _stamps(folder: Path) -> dict[str, int]:
    return {
        path.parent.name: path.stat().st_mtime_ns for path in folder.glob("cells/*/summary.json")
    }


def test_a_grid_is_trained(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = json.loads((finished / "comparison.json").read_text())
    assert kept["format"] == "oktopk compare"
    assert kept["baseline"] == "dense"
    assert kept["setting"]["values"]["width"] == 16
    assert kept["setting"]["links"]["workers"] == 2
    names = ["dense-seed1", "oktopk-d0.1-w3-seed1", "dense-seed2", "oktopk-d0.1-w3-seed2"]
    assert [cell["name"] for cell in kept["cells"]] == names
    assert {cell["state"] for cell in kept["cells"]} == {"finished"}
    for cell in kept["cells"]:
        steps, epochs, *_ = read_metrics(finished / "cells" / cell["name"])
        result = cell["result"]
        assert [step["step"] for step in steps] == list(range(8))
        assert result["window"] == 4
        assert result["training_loss"] == pytest.approx(sum(s["loss"] for s in steps[-4:]) / 4)
        assert result["validation"] == epochs[-1]["validation"]
        assert result["sparse_steps"] == (5 if cell["name"].startswith("oktopk") else 0)
        assert result["versions"]["oktopk"]
    dense, sparse = kept["rows"]
    assert sparse["measures"]["fewer_bytes"]["mean"] > 3
    assert sparse["measures"]["compression_ratio"]["mean"] == pytest.approx(10, rel=0.05)
    assert set(sparse["differences"]) >= {"training_loss", "validation/bits_per_byte"}
    by_seed = {c["seed"]: c["result"]["training_loss"] for c in kept["cells"][::2]}
    assert dense["measures"]["training_loss"]["by_seed"] == {str(s): x for s, x in by_seed.items()}
    assert (finished / "report.html").read_text().count("oktopk-d0.1-w3") > 0
    assert not list(finished.glob("cells/*/report.html"))
    assert main(["compare", "--report-only", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "text: 2 workers on loopback" in shown
    assert "4 of 4 cells finished" in shown
    assert "difference to dense, seed by seed" in shown
    assert main(["compare", "--report-only", str(finished), "--baseline", "oktopk"]) == 0
    assert "difference to oktopk-d0.1-w3" in capsys.readouterr().out


def test_the_same_seed_trains_the_same_model(finished: Path) -> None:
    losses = {
        name: [step["loss"] for step in read_metrics(finished / "cells" / name)[0]]
        for name in _stamps(finished)
    }
    # The warm-up is dense; the first loss after the first sparse step differs.
    assert losses["dense-seed1"][:4] == losses["oktopk-d0.1-w3-seed1"][:4]
    assert losses["dense-seed1"] != losses["oktopk-d0.1-w3-seed1"]
    assert losses["dense-seed1"] != losses["dense-seed2"]


def test_other_settings_are_refused(
    finished: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "comparison.json").read_text()
    for line, says in (
        (arguments(book, finished, steps=9), "max_steps = 8, not 9"),
        (arguments(book, finished, "lr=0.5"), "lr = 0.003, not 0.5"),
        ([*arguments(book, finished), "--nworkers", "3"], "2 workers on loopback, not 3 workers"),
        (["compare", "spoken", "--dir", str(finished)], "the recipe text, not spoken"),
    ):
        assert main(line) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    assert (finished / "comparison.json").read_text() == before


def test_a_cell_of_other_settings_is_never_overwritten(
    finished: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    cell = folder / "cells" / "dense-seed1"
    values = (cell / "config.toml").read_text()
    (cell / "config.toml").write_text(values.replace("lr = 0.003", "lr = 0.5"))
    for line in (arguments(book, folder), ["compare", "--report-only", str(folder)]):
        assert main(line) == 2
        error = capsys.readouterr().err
        assert f"{cell} was trained with lr = 0.5, not 0.003" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content", "code", "says"),
    [
        ("summary.json", "{}", 0, "1 cell of 4 not finished"),
        ("summary.json", None, 0, "1 cell of 4 not finished"),
        ("metrics.jsonl", "{}\n{}\n", 2, "line 1 of "),
        ("metrics.jsonl", None, 0, "1 cell of 4 not finished"),
        ("metrics.jsonl", "a step less", 2, "has 7 steps, but the run took 8"),
        ("metrics.jsonl", "no total", 2, "has no total seconds"),
        ("environment.json", "[]", 2, "environment.json is damaged"),
        ("config.toml", "lr = ", 2, "and the cell is trained anew"),
    ],
)
def test_damaged_cells_are_told(
    file: str,
    content: str | None,
    code: int,
    says: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    path = folder / "cells" / "dense-seed2" / file
    lines = path.read_text().splitlines(keepends=True)
    if content == "a step less":
        content = "".join(lines[1:])
    elif content == "no total":
        content = "".join(lines).replace('"total": ', '"all": ')
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert main(["compare", "--report-only", str(folder)]) == code
    said = capsys.readouterr()
    assert says in (said.err if code else said.out)
    assert said.err.count("\n") == (1 if code else 0)


def test_a_longer_grid_reuses_cells_and_survives_one_that_fails(
    finished: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _stamps(finished)
    line = [*arguments(book, finished), "--densities", "0.1", "--seeds", "2"]
    bad = "oktopk:lr=1e30"
    assert main([*line, "--compressors", f"dense,oktopk,{bad}", "--seeds", "2,"]) == 1
    said = capsys.readouterr()
    failed = "oktopk-lr=1e30-d0.1-w3-seed2"
    [told] = [each for each in said.err.splitlines() if failed in each]
    assert told.startswith(f"[3/3] {failed}: failed: training diverged in step ")
    assert f"{failed} failed: training diverged" in said.out
    after = _stamps(finished)
    assert {name: after[name] for name in before} == before
    kept = json.loads((finished / "comparison.json").read_text())
    assert {c["name"]: c["state"] for c in kept["cells"]}[failed] == "failed"
    # Without it, all is well; nothing is trained.
    assert main([*line, "--compressors", "dense,oktopk"]) == 0
    assert _stamps(finished) == after


def test_a_cell_that_cannot_be_written_does_not_stop_others(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "grid"
    (folder / "cells").mkdir(parents=True)
    (folder / "cells" / "dense-seed1").write_text("")
    line = [*arguments(book, folder), "--compressors", "Dense", "--seeds", "2"]
    assert main(line) == 1
    said = capsys.readouterr()
    assert "dense-seed1: File exists: make room, or move it away" in said.out
    assert "Traceback" not in said.err
    kept = json.loads((folder / "comparison.json").read_text())
    assert {c["name"]: c["state"] for c in kept["cells"]} == {
        "dense-seed1": "failed",
        "dense-seed2": "finished",
    }


def test_a_mistake_that_took_no_step_can_be_corrected(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "grid"
    assert main(arguments(tmp_path / "nowhere", folder)) == 2
    assert "nowhere: No such file or directory" in capsys.readouterr().err
    assert main([*arguments(book, folder, "pretrain=nowhere"), "--compressors", "dense"]) == 1
    assert (
        "dense-seed1 failed: --pretrain nowhere: there is no such file" in capsys.readouterr().out
    )
    assert main([*arguments(book, folder), "--compressors", "dense"]) == 0
    assert "1 of 1 cell finished" in capsys.readouterr().out


def start(line: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "oktopk", *line],
            stdout=file,
            stderr=file,
            start_new_session=True,
            # Ignored where a shell started the tests in the background.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line has the folder."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                line = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in line:
                found.append(int(name))
    return found


def checkpointed(cell: Path) -> bool:
    """Whether a run has a checkpoint, and steps after it."""
    metrics = cell / "metrics.jsonl"
    done = metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0
    return (cell / "checkpoint" / "manifest.json").exists() and done > 15


@pytest.fixture
def interrupted(
    book: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[list[str], Path, str, int]:
    """A grid of one cell that got a signal in its middle: its command, cell, output, exit code."""
    folder, log = tmp_path / "grid", tmp_path / "log"
    line = arguments(book, folder, "checkpoint_every=10", "max_epochs=1000", steps=200)
    line += ["--compressors", "oktopk", "--densities", "0.1"]
    cell = folder / "cells" / "oktopk-d0.1-w3-seed1"
    process = start(line, log)
    try:
        wait_for(lambda: checkpointed(cell) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        process.send_signal(request.param)
        code = process.wait(60)
        wait_for(lambda: not processes_of(folder), 30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not (cell / "summary.json").exists()
    return line, cell, log.read_text(), code


@pytest.mark.parametrize("interrupted", [signal.SIGINT], indirect=True)
def test_an_interrupted_cell_goes_on_from_its_checkpoint(
    interrupted: tuple[list[str], Path, str, int],
) -> None:
    line, cell, said, code = interrupted
    assert code == 130
    assert "interrupted; 0 of 1 cell are finished, and the same command goes on" in said
    assert "Traceback" not in said
    assert main(line) == 0
    assert "resumed at step" in (cell / "train.log").read_text()
    assert [step["step"] for step in read_metrics(cell)[0]] == list(range(200))


@pytest.mark.parametrize("interrupted", [signal.SIGKILL], indirect=True)
def test_a_killed_cell_with_a_damaged_checkpoint_begins_anew(
    interrupted: tuple[list[str], Path, str, int],
) -> None:
    line, cell, _, code = interrupted
    assert code == -signal.SIGKILL
    (cell / "checkpoint" / "manifest.json").write_text("{}")
    assert main(line) == 0
    assert "resumed" not in (cell / "train.log").read_text()
    assert [step["step"] for step in read_metrics(cell)[0]] == list(range(200))


@needs_network
def test_a_grid_in_the_emulated_network(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [each for each in arguments(book, tmp_path / "grid") if each != "--nworkers"]
    line.remove("2")
    line += ["--hosts", "2", "--rate", "100mbit", "--delay", "1ms", "--drop-checkpoints"]
    assert main([*line, "--compressors", "oktopk", "--densities", "0.1"]) == 0
    assert "text: 2 hosts, 100mbit, 1ms delay" in capsys.readouterr().out
    cell = tmp_path / "grid" / "cells" / "oktopk-d0.1-w3-seed1"
    steps, *_ = read_metrics(cell)
    # A step exchanges twice, and no message arrives sooner than after the delay.
    assert min(step["seconds"]["total"] for step in steps) > 0.001
    assert not (cell / "checkpoint").exists()
    assert json.loads((tmp_path / "grid" / "comparison.json").read_text())["setting"]["links"] == {
        "workers": 2,
        "emulated": True,
        "rate": "100mbit",
        "delay": "1ms",
        "loss": 0.0,
    }
    assert processes_of(tmp_path) == []
