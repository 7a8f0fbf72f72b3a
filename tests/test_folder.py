"""What is kept of a run: each step once, whatever killed it, and readable by others."""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.common.errors import UserError
from oktopk.common.format import toml
from oktopk.common.values import build
from oktopk.core.detail import BucketDetail, Histogram, Magnitudes, MessageCount, Staleness
from oktopk.train.config.config import Config
from oktopk.train.folders import latest_run, new_run_folder
from oktopk.train.metrics_file import METRICS, previous_epochs, read_metrics, read_records
from oktopk.train.records import (
    BucketTiming,
    DetailRecord,
    EpochRecord,
    Observer,
    Outcome,
    Plan,
    StepRecord,
)
from oktopk.train.reporters import TensorBoard, Tracker, check_reporters
from oktopk.train.run_folder import RunFolder, times_resumed
from oktopk.train.run_folder import settings as settings_of

TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

PER_EPOCH = 4
VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)


def plan(first_step: int = 0, config: Config | None = None) -> Plan:
    return Plan(
        config or Config(), "runs/x", 2, "cpu", 1000, 80, 3, PER_EPOCH, 12, first_step, 4, 4000
    )


def step(place: int) -> StepRecord:
    seconds = {"data": 0.1, "total": 0.5}
    return StepRecord(
        place, place // PER_EPOCH + 1, 3.2, 1e-5, 1.0, 16, "sparse", 0.98, 50.0, 80, 80, seconds
    )


def epoch(place: int) -> EpochRecord:
    validation = {"loss": 3.1, "wer": 0.5} if place != 2 else {}
    examples = (
        ({"reference": "YES | NO", "hypothesis": ""}, {"reference": "süß", "hypothesis": "sus"})
        if validation
        else ()
    )
    return EpochRecord(
        place, place * PER_EPOCH, 3.3, 0.01, "sparse", 0.98, 50.0, 320, 2.0, 8.0, 0.4, validation,
        examples,
    )  # fmt: skip


def detail(place: int) -> DetailRecord:
    buckets = (
        BucketDetail(0, 1000, 20, 20, 18, 0.5, 0.4, 0.6, (10, 8), Magnitudes(-9, (900, 99, 1))),
        BucketDetail(1, 10, 10, 10, 10, 0.0, 0.0, 0.0, (), Magnitudes(-3, (10,))),
    )
    waits = Staleness(2.5, 7, 9, 8.5, 20, Histogram((0, 1, 2, 4, 8, 16), (9, 5, 2, 1, 1)))
    return DetailRecord(place, "sparse", buckets, waits, (MessageCount("alltoall", 44, 6),))


def go(observer: Observer, first: int, last: int) -> None:
    """Steps from `first` until before `last`, with a look into every third, and the epochs that
    they end."""
    observer.started(plan(first))
    for place in range(first, last):
        observer.stepped(step(place))
        if place % 3 == 0:
            observer.detailed(detail(place))
        if (place + 1) % PER_EPOCH == 0:
            observer.epoch_ended(epoch((place + 1) // PER_EPOCH))


def outcome() -> Outcome:
    bucket = BucketTiming(("a", "b"), 1000, "oktopk", 0.98, 80.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    return Outcome(
        plan(), (epoch(1),), 12, 8, 0.98, 50.0, 960, 48000, 9.0, {"total": 0.5}, (bucket,), {}
    )


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    log = logging.getLogger("oktopk")
    before = log.level, list(log.handlers)
    yield
    assert (log.level, list(log.handlers)) == before


@settings(max_examples=40)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=5))
def test_toml_gives_back_what_was_written(values: dict[str, Any]) -> None:
    read = TOML.loads(toml(values))
    assert read == values
    assert [type(x) for x in read.values()] == [type(x) for x in values.values()]


def test_a_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bin/oktopk", "train", "--lr", "1e-5"])
    config = Config.of(lr=1e-5, width=64, data_dir='/a "b"\\c\x7f\n')
    folder = RunFolder(tmp_path / "run")
    folder.started(plan(config=config))
    folder.stepped(step(0))
    assert len(read_metrics(folder.path)[0]) == 1  # at once, not when it is closed
    folder.epoch_ended(epoch(1))
    logging.getLogger("oktopk").warning("something %s", "odd")
    folder.finished(outcome())
    folder.close()
    folder.close()

    saved = TOML.loads((folder.path / "config.toml").read_text())
    assert saved == settings_of(config)
    assert config.as_dict().keys() - saved.keys() == {"resume", "run_dir"}
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["command"] == ["oktopk", "train", "--lr", "1e-5"]
    assert set(environment["versions"]) == {"python", "oktopk", "torch", "numpy", "numba"}
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["plan"]["config"] == Config().as_dict()
    assert summary["buckets"][0]["total"] == pytest.approx(1.5)
    assert previous_epochs(folder.path, 2) == (epoch(1),)
    log = (folder.path / "train.log").read_text()
    assert "started at step 0 of 12: 2 workers on cpu" in log
    assert "epoch 1, step 4: loss 3.300; validation loss 3.100, wer 0.500; sparse" in log
    assert "WARNING something odd" in log
    assert "finished after 12 steps, 8 of them sparse" in log
    assert not list(folder.path.glob("*.part"))


def test_warnings_are_still_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # pytest's own, which a program does not have
    try:
        folder = RunFolder(tmp_path)
        folder.started(plan())
        logging.getLogger("oktopk").warning("look here")
        logging.getLogger("oktopk").info("for the file")
        folder.close()
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == "look here\n"
    assert "for the file" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize("torn", [0, 1, 30, 200])
@pytest.mark.parametrize(("died", "resumed"), [(10, 8), (10, 6), (3, 0), (8, 8), (12, 12)])
def test_each_step_is_there_once_after_kill_and_resume(
    tmp_path: Path, died: int, resumed: int, torn: int
) -> None:
    folder = RunFolder(tmp_path)
    go(folder, 0, died)
    folder.close()
    half = json.dumps({"kind": "step", "step": died, "text": "x" * 300})[:torn]
    with open(tmp_path / METRICS, "a") as file:
        file.write(half)
    assert len(read_metrics(tmp_path)[0]) == died
    goes_on = resumed // PER_EPOCH + 1
    assert previous_epochs(tmp_path, goes_on) == tuple(map(epoch, range(1, goes_on)))
    again = RunFolder(tmp_path, resume_step=resumed, resume_epoch=goes_on)
    go(again, resumed, 12)
    again.close()
    steps, epochs = read_metrics(tmp_path / METRICS)
    assert [record["step"] for record in steps] == list(range(12))
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    details = read_records(tmp_path)["detail"]
    assert [build(DetailRecord, record) for record in details] == [detail(n) for n in (0, 3, 6, 9)]
    assert previous_epochs(tmp_path, 4) == (epoch(1), epoch(2), epoch(3))


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    go(folder, 0, 2)
    folder.close()
    with pytest.raises(UserError, match="holds a run already: `--resume auto"):
        RunFolder(tmp_path).started(plan())
    assert len(read_metrics(tmp_path)[0]) == 2


def damaged_lines() -> Iterator[tuple[str, str]]:
    """Lines that no run has written, and the complaint about each."""
    whole = {"kind": "epoch", **asdict(epoch(1))}
    for name in ("epoch", "loss", "validation"):
        yield json.dumps({key: whole[key] for key in whole if key != name}), f"{name} is missing"
    for name, value, says in (
        ("epoch", "1", 'epoch is "1", but must be a whole number'),
        ("epoch", True, "epoch is true"),
        ("loss", None, "loss is null, but must be a number"),
        ("loss", math.nan, "loss is NaN"),
        ("validation", [0.5], "validation is a list, but must be an object"),
        ("validation", {"wer": "bad"}, 'validation.wer is "bad"'),
        ("examples", [{"reference": 1}], r"examples\[0\].reference is 1, but must be text"),
        ("examples", ["YES"], r'examples\[0\] is "YES", but must be an object'),
        ("kind", "phase", "none of step, detail, epoch"),
    ):
        yield json.dumps({**whole, name: value}), says
    yield json.dumps({"kind": "step", "step": 3}), "epoch is missing"
    yield '{"kind": "step", ', "Expecting"
    yield "[1, 2]", "not an object"
    yield "7", "not an object"
    yield '"\xff"', "can't decode"
    yield '{"kind": ' * 100_000, "nested too deeply"


@pytest.mark.parametrize(("line", "says"), list(damaged_lines()))
def test_damage_in_the_middle_is_told(tmp_path: Path, line: str, says: str) -> None:
    """When it is read, and when the run is resumed; the file is left as it was."""
    folder = RunFolder(tmp_path)
    go(folder, 0, 4)
    folder.close()
    metrics = tmp_path / METRICS
    lines = metrics.read_bytes().splitlines()
    lines[1:1] = [line.encode("latin-1")]
    metrics.write_bytes(b"\n".join(lines))
    damaged = metrics.read_bytes()
    again = RunFolder(tmp_path, resume_step=4, resume_epoch=2)
    for read in (
        lambda: read_metrics(tmp_path),
        lambda: previous_epochs(tmp_path, 5),
        lambda: again.started(plan(4)),
    ):
        with pytest.raises(UserError, match=rf"line 2 of .* is damaged \(.*{says}") as raised:
            read()
        assert "\n" not in str(raised.value)
    again.close()
    assert metrics.read_bytes() == damaged
    lines[1:2] = []
    metrics.write_bytes(b"\n".join(lines))
    assert previous_epochs(tmp_path, 5) == (epoch(1),)


def test_metrics_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a run's folder"):
        read_metrics(tmp_path / "other")
    assert previous_epochs(tmp_path / "other", 5) == ()
    (tmp_path / METRICS).mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        previous_epochs(tmp_path, 5)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        folder = RunFolder(path)
        with pytest.raises(UserError, match=r"cannot write to .* --run-dir") as raised:
            folder.started(plan())
        folder.close()
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="cannot write to"):
        new_run_folder("an4", tmp_path / "file")
    for number, name in enumerate(("summary.json/x", "checkpoint")):
        place = tmp_path / str(number) / name
        place.parent.mkdir(parents=True)
        place.touch()
        folder = RunFolder(tmp_path / str(number))
        with pytest.raises(UserError, match="move it away"):
            folder.started(plan())
        folder.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_without_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody needs it; a run ends when its metrics cannot be kept. Neither is a traceback."""
    (tmp_path / "train.log").symlink_to("/dev/full")
    folder = RunFolder(tmp_path)
    go(folder, 0, 2)
    folder.close()
    (tmp_path / METRICS).unlink()
    (tmp_path / METRICS).symlink_to("/dev/full")
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="No space left on device"):
        go(folder, 0, 2)
    folder.close()
    assert capfd.readouterr().err == ""


def test_tensorboard_without_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes in a thread, which has nobody to tell but the next call."""
    pytest.importorskip("tensorboard")
    resource: Any = pytest.importorskip("resource")
    hook = threading.excepthook
    board = TensorBoard(tmp_path)
    board.started(plan())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))  # bytes of a file
    scalars = {f"train/{number}": 1.0 for number in range(1000)}
    try:
        with pytest.raises(UserError, match=r"cannot write to .*File too large"):
            board.scalars(scalars, 0)
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr().err == ""
    assert threading.excepthook == hook


def test_run_folders_are_new_and_the_latest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oktopk.train.folders.time.strftime", lambda _: "20250101-101112")
    base = tmp_path / "runs"
    assert latest_run("an4", base) is None
    made = [new_run_folder("an4", base) for _ in range(11)]
    assert [path.name for path in made[:2]] == ["an4-20250101-101112", "an4-20250101-101112-2"]
    assert latest_run("an4", base) is None  # none has a checkpoint
    others = [base / "an4-20240101-101112", base / "an4-small-20260101-101112"]
    for path in (made[8], made[10], *others):  # 11 is later than 9, though not as text
        (path / "checkpoint").mkdir(parents=True)
        (path / "checkpoint" / "manifest.json").write_text("{}")
    assert latest_run("an4", base) == made[10]
    assert latest_run("an4-small", base) == others[1]


def test_without_tensorboard_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    folder = RunFolder(tmp_path)
    go(folder, 0, 4)
    folder.close()
    board = TensorBoard(tmp_path)
    go(board, 0, 4)
    board.close()
    assert "pip install tensorboard" in caplog.text
    assert len(read_metrics(tmp_path)[0]) == 4


def test_tensorboard_reads_the_run_and_its_resumption(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, last in ((None, 10), (8, 12)):
        board = TensorBoard(tmp_path, resume_step)
        go(board, resume_step or 0, last)
        board.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {
        "train/loss", "train/lr", "train/grad_norm", "communication/sparsity",
        "communication/ratio", "communication/bytes_sent", "time/data", "time/total",
        "epoch/loss", "validation/loss", "validation/wer", "staleness/mean", "staleness/p99",
        "staleness/max", "threshold/local/bucket0", "threshold/exact/bucket0",
        "threshold/global/bucket0",
    } == set(events.Tags()["scalars"])  # fmt: skip
    assert [event.step for event in events.Scalars("train/loss")] == list(range(12))
    # The checkpoint was made after epoch 2, so that epoch is not purged.
    assert [event.step for event in events.Scalars("epoch/loss")] == [3, 7, 11]
    assert events.Tags()["tensors"] == ["validation/examples/text_summary"]


def test_runs_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Their steps have fewer fields, and nobody looked into them."""
    old = asdict(step(0))
    for name in ("target", "offered", "applied", "overflow", "skipped", "stages", "busy"):
        del old[name]
    (tmp_path / METRICS).write_text(json.dumps({"kind": "step", **old}) + "\n")
    records = read_records(tmp_path)
    assert [record["step"] for record in records["step"]] == [0]
    assert "busy" not in records["step"][0]
    assert records["detail"] == []
    again = RunFolder(tmp_path, resume_step=1, resume_epoch=1)
    go(again, 1, 4)
    again.close()
    assert [record["step"] for record in read_metrics(tmp_path)[0]] == [0, 1, 2, 3]


def test_resumptions_are_counted(tmp_path: Path) -> None:
    assert times_resumed(tmp_path) == 0
    for count in (0, 1, 2):
        assert times_resumed(tmp_path) == count
        folder = RunFolder(tmp_path, resume_step=0)
        folder.started(replace(plan(), resumed=count))
        folder.close()
    for content in ("{", "[]", '{"resumed": -4}', '{"resumed": true}', "{}"):
        (tmp_path / "environment.json").write_text(content)
        assert times_resumed(tmp_path) == 1


MODULE = """
import json

def _note(*what):
    with open(__file__ + ".calls", "a") as file:
        file.write(json.dumps(what) + "\\n")

def init(project, name=None, group=None, config=None):
    _note("init", project, name, group, config["lr"])

def log(metrics, step=None):
    _note("log", metrics, step)

def finish():
    _note("finish")
"""


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes a module that takes the calls of wandb and trackio, and writes them to a file."""
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("WANDB_DIR", "WANDB_CONSOLE", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.setenv(variable, "x")  # so that it is restored, whoever sets it
        monkeypatch.delenv(variable)
    before = {name: sys.modules.pop(name, None) for name in ("wandb", "trackio")}

    def make(name: str, content: str = MODULE) -> Path:
        (tmp_path / f"{name}.py").write_text(content)
        return tmp_path / f"{name}.py.calls"

    yield make
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_same_series(
    tmp_path: Path, tracker: Callable[[str], Path], name: str
) -> None:
    calls = tracker(name)
    reporter = Tracker(name, tmp_path / "text-1")
    go(reporter, 0, 5)
    reporter.close()
    reporter.close()
    again = Tracker(name, tmp_path / "text-1")
    again.started(replace(plan(4), resumed=2))
    again.close()
    made = [json.loads(line) for line in calls.read_text().splitlines()]
    assert made[0] == ["init", "oktopk", "text-1", "text-1", 0.01]
    logged = [call for call in made if call[0] == "log"]
    assert [call[2] for call in logged] == [0, 0, 1, 2, 3, 3, 3, 4]
    assert logged[0][1]["train/loss"] == 3.2
    assert logged[1][1] == {
        "staleness/mean": 2.5, "staleness/p99": 7, "staleness/max": 9,
        "threshold/local/bucket0": 0.5, "threshold/exact/bucket0": 0.4,
        "threshold/global/bucket0": 0.6,
    }  # fmt: skip
    assert logged[6][1] == {"epoch/loss": 3.3, "validation/loss": 3.1, "validation/wer": 0.5}
    assert made[9:] == [
        ["finish"],
        ["init", "oktopk", "text-1-resumed-2", "text-1", 0.01],
        ["finish"],
    ]


def test_a_tracker_that_fails_is_left_out(
    tmp_path: Path, tracker: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    calls = tracker("trackio", MODULE + "    raise RuntimeError('the disk\\nis full')\n")
    reporter = Tracker("trackio", tmp_path)
    go(reporter, 0, 1)
    reporter.close()
    assert "trackio gets no more of this run, as it failed: the disk is full" in caplog.text
    assert calls.read_text().splitlines()[-1] == '["finish"]'
    del sys.modules["trackio"]
    tracker("trackio", MODULE.replace('_note("init"', 'raise OSError(config, "init"'))
    with pytest.raises(UserError, match=r"--report-to trackio cannot begin: .*train without$"):
        Tracker("trackio", tmp_path).started(plan())


def test_a_missing_package_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("tensorboard", "torch.utils.tensorboard"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        run = Config.of(report_to=name).run
        with pytest.raises(UserError, match=f"--report-to {name} needs .*pip install {name} "):
            check_reporters(run)
        assert check_reporters(run, rank=1)
        assert check_reporters(Config().run)  # nobody asked


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("tensorboard",)),
        ({"tensorboard": False}, ()),
        ({"report_to": "none"}, ()),
        ({"report_to": "wandb"}, ("wandb",)),
        ({"report_to": "wandb, tensorboard wandb"}, ("wandb", "tensorboard")),
        ({"report_to": "wandb tensorboard", "tensorboard": False}, ("wandb",)),
    ],
)
def test_where_series_go(given: dict[str, Any], names: tuple[str, ...]) -> None:
    assert Config.of(**given).run.reporters == names


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of wandb without a server, read back from its file."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    for variable, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    reporter = Tracker("wandb", tmp_path)
    go(reporter, 0, 5)
    reporter.close()
    [written] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = written.read_bytes()
    for name in (b"train/loss", b"staleness/p99", b"validation/wer"):
        assert name in content
