"""The folder of a run: everything that is kept of it.

    config.toml         the final configuration; `oktopk train --config` reads it
    environment.json    versions and the machine, of the process that ran last
    metrics.jsonl       one line a step and one an epoch, from the first to the last
    train.log           what was said, with the time
    summary.json        the outcome, once there is one
    tensorboard/        the same metrics for TensorBoard
    checkpoint/         written by the trainer

A run that is killed and resumed has each step in `metrics.jsonl` exactly once: what was recorded
after the checkpoint happens again, so it is dropped when the run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ..checkpoint import MANIFEST
from ..common.errors import UserError
from ..common.format import byte_size, duration, number, percent, plural, toml
from ..common.values import build, parse, read
from ..common.version import version_of
from .config.config import Config
from .records import EpochRecord, Example, Outcome, Plan, StepRecord

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINT = "checkpoint"
log = logging.getLogger("oktopk")


class RunFolder:
    """Keeps a run in a folder. An Observer.

    Args:
        path: made if it is not there. A folder that has metrics of another run is refused.
        tensorboard: write event files for TensorBoard too.
        resume_step: the step that a resumed run goes on with, its checkpoint's; 0 begins again,
            without what is recorded in the folder.
        resume_epoch: the epoch that it goes on with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tensorboard: bool = True,
        resume_step: int | None = None,
        resume_epoch: int = 1,
    ) -> None:
        self.path = Path(path)
        self._wants_tensorboard = tensorboard
        self._resume_step = resume_step
        self._resume_epoch = resume_epoch
        self._metrics: IO[str] | None = None
        self._board: Any = None
        self._excepthook = threading.excepthook
        self._log = _LogFile()

    def started(self, plan: Plan) -> None:
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_names()
            metrics = self.path / METRICS
            if self._resume_step is not None:
                if self._resume_step == 0 and metrics.exists():
                    log.warning("%s has no checkpoint: the run begins again", self.path)
                _drop_from(metrics, self._resume_step, self._resume_epoch)
            elif metrics.exists() and metrics.stat().st_size:
                raise UserError(
                    f"{self.path} holds a run already: `--resume auto` goes on with it, another "
                    f"--run-dir begins a new one"
                )
            _replace(self.path / "config.toml", toml(settings(plan.config)).encode())
            _replace(self.path / "environment.json", _json(environment(plan)))
            # A line is written at once: what is lost in a crash is at most the line being written.
            self._metrics = open(metrics, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            self._log.open(self.path / "train.log")
        self._log.note(
            f"{'resumed' if plan.first_step else 'started'} at step {plan.first_step} of "
            f"{plan.steps}: {plural(plan.workers, 'worker')} on {plan.device}, "
            f"{plural(plan.parameters, 'parameter')}, {plural(plan.samples, 'sample')}, "
            f"dense until step {min(plan.dense_steps, plan.steps)}"
            + (f", weights from {plan.weights_from}" if plan.weights_from else "")
        )
        if self._wants_tensorboard:
            self._open_tensorboard()

    def _check_names(self) -> None:
        """Find out before training what could not be written after it."""
        summary, checkpoint = self.path / SUMMARY, self.path / CHECKPOINT
        if summary.is_dir() or (checkpoint.exists() and not checkpoint.is_dir()):
            raise UserError(
                f"{self.path} has a folder {SUMMARY} or a file {CHECKPOINT}, which a run writes as "
                "a file and a folder: move it away, or name another folder with --run-dir"
            )

    def stepped(self, record: StepRecord) -> None:
        self._record("step", record)
        scalars = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "communication/sparsity": record.sparsity,
            "communication/ratio": record.compression_ratio,
            "communication/bytes_sent": record.bytes_sent,
        }
        scalars |= {f"time/{part}": seconds for part, seconds in record.seconds.items()}
        self._scalars(scalars, record.step)

    def validating(self, done: int, total: int) -> None:
        """Nothing is kept of it."""

    def epoch_ended(self, record: EpochRecord) -> None:
        self._record("epoch", record)
        # Counted as the epoch's last step, which a checkpoint at its end does not purge.
        step = record.steps - 1
        scalars = {f"validation/{name}": value for name, value in record.validation.items()}
        self._scalars({"epoch/loss": record.loss, **scalars}, step)
        if self._board is not None and record.examples:
            with _writing(self.path):
                self._board.add_text("validation/examples", _markdown(record.examples), step)
        validation = "".join(f", {key} {number(x)}" for key, x in record.validation.items())
        self._log.note(
            f"epoch {record.epoch}, step {record.steps}: loss {number(record.loss)}"
            + (f"; validation{validation[1:]}" if validation else "")
            + f"; {record.phase}, sparsity {percent(record.sparsity)}, "
            f"{byte_size(record.bytes_sent)} sent, {duration(record.seconds)}"
        )

    def finished(self, outcome: Outcome) -> None:
        summary = dataclasses.asdict(outcome)
        summary["plan"]["config"] = outcome.plan.config.as_dict()
        for bucket, timing in zip(summary["buckets"], outcome.buckets, strict=True):
            bucket["total"] = timing.total
        with _writing(self.path):
            _replace(self.path / SUMMARY, _json(summary))
        self._log.note(
            f"finished after {plural(outcome.steps, 'step')}, {outcome.sparse_steps} of them "
            f"sparse, in {duration(outcome.seconds)}"
        )

    def close(self) -> None:
        metrics, self._metrics = self._metrics, None
        board, self._board = self._board, None
        # What could not be written has been told when it was recorded.
        with suppress(OSError):
            if metrics is not None:
                metrics.close()
        if board is not None:
            with suppress(OSError):
                board.close()
            threading.excepthook = self._excepthook
        self._log.close()

    def _record(self, kind: str, record: StepRecord | EpochRecord) -> None:
        if self._metrics is None:
            raise RuntimeError("RunFolder.started comes before what is recorded")
        line = json.dumps({"kind": kind, **dataclasses.asdict(record)}, allow_nan=False)
        with _writing(self.path):
            self._metrics.write(line + "\n")

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        if self._board is not None:
            with _writing(self.path):
                for name, value in scalars.items():
                    self._board.add_scalar(name, value, step)

    def _open_tensorboard(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.warning(
                "no files for TensorBoard are written: `pip install tensorboard` gets it, "
                "--tensorboard False does without"
            )
            return
        self._excepthook, threading.excepthook = threading.excepthook, self._thread_failed
        try:
            with _writing(self.path):
                self._board = SummaryWriter(
                    str(self.path / "tensorboard"), purge_step=self._resume_step, flush_secs=10
                )
        except UserError:
            threading.excepthook = self._excepthook
            raise

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread; when that fails, our next call of it raises the same."""
        if not isinstance(failure.exc_value, OSError):
            self._excepthook(failure)


def environment(plan: Plan) -> dict[str, Any]:
    """What a result depends on beside its configuration, without names of hosts and users."""
    packages = ("oktopk", "torch", "numpy", "numba")
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: version_of(package) for package in packages},
        },
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "workers": plan.workers,
        "device": plan.device,
    }


def read_metrics(
    path: str | os.PathLike[str],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and epochs of a run's folder, or of its metrics.jsonl, as they were recorded."""
    file = Path(path) / METRICS if os.path.isdir(path) else Path(path)
    if not os.path.isfile(file):
        raise UserError(f"{file} is not there: name a run's folder")
    records = [line.values for line in _lines(file)]
    steps = [record for record in records if record["kind"] == "step"]
    return steps, [record for record in records if record["kind"] == "epoch"]


def settings(config: Config) -> dict[str, Any]:
    """What of a configuration is worth using again: not where this run is kept."""
    values = config.as_dict()
    return {name: values[name] for name in values if name not in ("resume", "run_dir")}


def previous_epochs(path: str | os.PathLike[str], before_epoch: int) -> tuple[EpochRecord, ...]:
    """The epochs that had ended before one began, of the run in a folder."""
    metrics = Path(path) / METRICS
    if not metrics.exists():
        return ()
    records = [line.record for line in _lines(metrics)]
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    return tuple(record for record in epochs if record.epoch < before_epoch)


def new_run_folder(recipe: str, base: Path = Path("runs")) -> Path:
    """Make runs/RECIPE-YYYYMMDD-HHMMSS, or that with -2, -3 ... if it is taken."""
    name = f"{recipe or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    with _writing(base):
        base.mkdir(parents=True, exist_ok=True)
        attempt = 1
        while True:
            path = base / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(exist_ok=False)
            except FileExistsError:
                attempt += 1
            else:
                return path


def latest_run(recipe: str, base: Path = Path("runs")) -> Path | None:
    """The newest folder of a recipe's runs that has a checkpoint."""
    pattern = re.compile(re.escape(recipe or "run") + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = []
    for name in _names(base):
        match, path = pattern.fullmatch(name), base / name
        if match and os.path.isfile(path / CHECKPOINT / MANIFEST):
            found.append((match[1], int(match[2] or 1), path))
    return max(found)[2] if found else None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}") from None


class _LogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: what is recorded goes to the same folder, and its failure is told."""


class _LogFile:
    """train.log: what the package logs, and what the folder notes itself."""

    def __init__(self) -> None:
        self._handler: logging.FileHandler | None = None
        self._level: int | None = None

    def open(self, path: Path) -> None:
        self._handler = _LogHandler(
            path,
            encoding="utf-8",
            errors="backslashreplace",  # names of files
        )
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if not log.hasHandlers() and logging.lastResort is not None:
            # Nobody has set logging up. Then Python shows warnings by itself, but only as long as
            # there is no handler at all; ours must not silence them.
            log.addHandler(logging.lastResort)
            self._level = log.level
            log.setLevel(logging.INFO)
        log.addHandler(self._handler)

    def note(self, text: str) -> None:
        """To the file only: the screen has its own view of it."""
        if self._handler is not None:
            self._handler.handle(log.makeRecord(log.name, logging.INFO, "", 0, text, (), None))

    def close(self) -> None:
        if self._handler is not None:
            log.removeHandler(self._handler)
            with suppress(OSError):
                self._handler.close()
            self._handler = None
        if self._level is not None and logging.lastResort is not None:
            log.removeHandler(logging.lastResort)
            log.setLevel(self._level)
            self._level = None


@dataclass(frozen=True)
class _Line:
    """A line of metrics.jsonl."""

    text: bytes
    values: dict[str, Any]
    """As they were recorded."""
    record: StepRecord | EpochRecord


def _lines(file: Path) -> Iterator[_Line]:
    """All that was recorded. The last line may be half written, then it does not count."""
    try:
        lines = read(file).splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None
    for place, text in enumerate(lines, 1):
        try:
            values = parse(text)
        except ValueError as error:
            if place == len(lines):
                return
            raise _damaged(file, place, error) from None
        try:
            line = _Line(text, values, _record(values))
        except ValueError as error:
            raise _damaged(file, place, error) from None
        yield line


def _record(values: object) -> StepRecord | EpochRecord:
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    if values.get("kind") == "step":
        return build(StepRecord, values)
    if values.get("kind") == "epoch":
        return build(EpochRecord, values)
    raise ValueError("its kind is neither step nor epoch")


def _damaged(file: Path, place: int, error: ValueError) -> UserError:
    return UserError(
        f"line {place} of {file} is damaged ({error}): remove that line, the others can be read"
    )


def _drop_from(metrics: Path, step: int, epoch: int) -> None:
    """Keep what was recorded before a step and an epoch: they are about to happen again."""
    if not metrics.exists():
        return
    kept = []
    for line in _lines(metrics):
        record = line.record
        early = record.step < step if isinstance(record, StepRecord) else record.epoch < epoch
        if early:
            kept.append(line.text + b"\n")
    _replace(metrics, b"".join(kept))


def _markdown(examples: tuple[Example, ...]) -> str:
    rows = (f"| {x.reference} | {x.hypothesis or '(nothing)'} |" for x in examples)
    return "\n".join(("| reference | hypothesis |", "|---|---|", *rows))


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    """The old content or the new one, whenever the machine stops."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; make room or get the right to "
            f"write there, or name another folder with --run-dir"
        ) from error
