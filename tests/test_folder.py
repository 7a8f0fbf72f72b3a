"""What is kept of a run: each step once, whatever killed it, and readable by others."""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.common.errors import UserError
from oktopk.common.format import toml
from oktopk.train.config.config import Config
from oktopk.train.folders import latest_run, new_run_folder
from oktopk.train.metrics_file import METRICS, previous_epochs, read_metrics
from oktopk.train.records import BucketTiming, EpochRecord, Outcome, Plan, StepRecord
from oktopk.train.run_folder import RunFolder
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


def go(folder: RunFolder, first: int, last: int) -> None:
    """Steps from `first` until before `last`, with the epochs that they end."""
    folder.started(plan(first))
    for place in range(first, last):
        folder.stepped(step(place))
        if (place + 1) % PER_EPOCH == 0:
            folder.epoch_ended(epoch((place + 1) // PER_EPOCH))


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
    folder = RunFolder(tmp_path / "run", tensorboard=False)
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
        folder = RunFolder(tmp_path, tensorboard=False)
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
    folder = RunFolder(tmp_path, tensorboard=False)
    go(folder, 0, died)
    folder.close()
    half = json.dumps({"kind": "step", "step": died, "text": "x" * 300})[:torn]
    with open(tmp_path / METRICS, "a") as file:
        file.write(half)
    assert len(read_metrics(tmp_path)[0]) == died
    goes_on = resumed // PER_EPOCH + 1
    assert previous_epochs(tmp_path, goes_on) == tuple(map(epoch, range(1, goes_on)))
    again = RunFolder(tmp_path, tensorboard=False, resume_step=resumed, resume_epoch=goes_on)
    go(again, resumed, 12)
    again.close()
    steps, epochs = read_metrics(tmp_path / METRICS)
    assert [record["step"] for record in steps] == list(range(12))
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    assert previous_epochs(tmp_path, 4) == (epoch(1), epoch(2), epoch(3))


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tensorboard=False)
    go(folder, 0, 2)
    folder.close()
    with pytest.raises(UserError, match="holds a run already: `--resume auto"):
        RunFolder(tmp_path, tensorboard=False).started(plan())
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
    folder = RunFolder(tmp_path, tensorboard=False)
    go(folder, 0, 4)
    folder.close()
    metrics = tmp_path / METRICS
    lines = metrics.read_bytes().splitlines()
    lines[1:1] = [line.encode("latin-1")]
    metrics.write_bytes(b"\n".join(lines))
    damaged = metrics.read_bytes()
    again = RunFolder(tmp_path, tensorboard=False, resume_step=4, resume_epoch=2)
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
        folder = RunFolder(path, tensorboard=False)
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
        folder = RunFolder(tmp_path / str(number), tensorboard=False)
        with pytest.raises(UserError, match="move it away"):
            folder.started(plan())
        folder.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_without_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody needs it; a run ends when its metrics cannot be kept. Neither is a traceback."""
    (tmp_path / "train.log").symlink_to("/dev/full")
    folder = RunFolder(tmp_path, tensorboard=False)
    go(folder, 0, 2)
    folder.close()
    (tmp_path / METRICS).unlink()
    (tmp_path / METRICS).symlink_to("/dev/full")
    folder = RunFolder(tmp_path, tensorboard=False)
    with pytest.raises(UserError, match="No space left on device"):
        go(folder, 0, 2)
    folder.close()
    assert capfd.readouterr().err == ""


def test_tensorboard_without_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes in a thread, which has nobody to tell but the next call."""
    pytest.importorskip("tensorboard")
    resource: Any = pytest.importorskip("resource")
    hook = threading.excepthook
    folder = RunFolder(tmp_path)
    folder.started(plan())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))  # bytes of a file
    scalars = {f"train/{number}": 1.0 for number in range(1000)}
    try:
        with pytest.raises(UserError, match=r"cannot write to .*File too large"):
            folder._scalars(scalars, 0)
        folder.close()
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
    assert "pip install tensorboard" in caplog.text
    assert len(read_metrics(tmp_path)[0]) == 4


def test_tensorboard_reads_the_run_and_its_resumption(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder(tmp_path)
    go(folder, 0, 10)
    folder.close()
    again = RunFolder(tmp_path, resume_step=8, resume_epoch=3)
    go(again, 8, 12)
    again.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {
        "train/loss", "train/lr", "train/grad_norm", "communication/sparsity",
        "communication/ratio", "communication/bytes_sent", "time/data", "time/total",
        "epoch/loss", "validation/loss", "validation/wer",
    } == set(events.Tags()["scalars"])  # fmt: skip
    assert [event.step for event in events.Scalars("train/loss")] == list(range(12))
    # The checkpoint was made after epoch 2, so that epoch is not purged.
    assert [event.step for event in events.Scalars("epoch/loss")] == [3, 7, 11]
    assert events.Tags()["tensors"] == ["validation/examples/text_summary"]
