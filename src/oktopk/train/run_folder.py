"""The folder of a run, with everything that is kept of it.

    config.toml         the final configuration; `oktopk train --config` reads it
    environment.json    versions and the machine, of the process that ran last
    metrics.jsonl       one line a step and one an epoch, from the first to the last
    train.log           messages, with the time
    summary.json        the outcome, once there is one
    tensorboard/        the same metrics for TensorBoard
    checkpoint/         written by the trainer

A run that is killed and resumed has each step in `metrics.jsonl` exactly once. Steps after the
checkpoint happen again, so their records are dropped when the run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import sys
import threading
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ..common import files
from ..common.errors import UserError
from ..common.format import byte_size, duration, number, percent, plural, toml
from ..common.values import parse, read
from ..common.version import version_of
from ..workloads.base import Example
from .config.config import Config
from .folders import CHECKPOINT, writing
from .metrics_file import METRICS, drop_from
from .records import DetailRecord, EpochRecord, Outcome, Plan, StepRecord

SUMMARY = "summary.json"
ENVIRONMENT = "environment.json"
log = logging.getLogger("oktopk")


class RunFolder:
    """Keeps a run in a folder. An Observer.

    Args:
        path: made if it is not there. A folder that has metrics of another run is refused.
        tensorboard: write event files for TensorBoard too.
        resume_step: the step of the checkpoint that a resumed run goes on from. 0 begins again and
            drops all records in the folder.
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
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_names()
            metrics = self.path / METRICS
            if self._resume_step is not None:
                if self._resume_step == 0 and metrics.exists():
                    log.warning("%s has no checkpoint: the run begins again", self.path)
                drop_from(metrics, self._resume_step, self._resume_epoch)
            elif metrics.exists() and metrics.stat().st_size:
                raise UserError(
                    f"{self.path} holds a run already: `--resume auto` goes on with it, another "
                    f"--run-dir begins a new one"
                )
            files.write(self.path / "config.toml", toml(settings(plan.config)).encode())
            files.write(self.path / ENVIRONMENT, _json(environment(plan)))
            # Each line is written at once: a crash loses at most the line being written.
            self._metrics = open(metrics, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            self._log.open(self.path / "train.log")
        self._log.note(
            f"{'resumed' if plan.first_step else 'started'} at step {plan.first_step} of "
            f"{plan.steps}: {plural(plan.workers, 'worker')} on {plan.device}, "
            f"{plural(plan.parameters, 'parameter')}, "
            f"{plural(plan.samples, plan.config.workload.sample)}, "
            f"dense until step {min(plan.dense_steps, plan.steps)}"
            + (f", weights from {plan.weights_from}" if plan.weights_from else "")
        )
        if self._wants_tensorboard:
            self._open_tensorboard()

    def _check_names(self) -> None:
        """Find out now whether the files at the end of training can be written."""
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

    def detailed(self, record: DetailRecord) -> None:
        self._record("detail", record)

    def validating(self, done: int, total: int) -> None:
        """Not kept."""

    def epoch_ended(self, record: EpochRecord) -> None:
        self._record("epoch", record)
        # Counted as the epoch's last step, which a checkpoint at its end does not purge.
        step = record.steps - 1
        scalars = {f"validation/{name}": value for name, value in record.validation.items()}
        self._scalars({"epoch/loss": record.loss, **scalars}, step)
        if self._board is not None and record.examples:
            with writing(self.path):
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
        with writing(self.path):
            files.write(self.path / SUMMARY, _json(summary))
        self._log.note(
            f"finished after {plural(outcome.steps, 'step')}, {outcome.sparse_steps} of them "
            f"sparse, in {duration(outcome.seconds)}"
        )

    def close(self) -> None:
        metrics, self._metrics = self._metrics, None
        board, self._board = self._board, None
        # An error in writing was reported when the record was made.
        with suppress(OSError):
            if metrics is not None:
                metrics.close()
        if board is not None:
            with suppress(OSError):
                board.close()
            threading.excepthook = self._excepthook
        self._log.close()

    def _record(self, kind: str, record: StepRecord | DetailRecord | EpochRecord) -> None:
        if self._metrics is None:
            raise RuntimeError("call RunFolder.started before anything is recorded")
        line = json.dumps({"kind": kind, **dataclasses.asdict(record)}, allow_nan=False)
        with writing(self.path):
            self._metrics.write(line + "\n")

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        if self._board is not None:
            with writing(self.path):
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
            with writing(self.path):
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
    """Facts that a result depends on beside its configuration, without names of hosts or users."""
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
        "steps": plan.steps,
        "resumed": plan.resumed,
    }


def times_resumed(folder: Path) -> int:
    """How often the run in a folder has been resumed, if it is resumed now once more."""
    try:
        before = parse(read(folder / ENVIRONMENT))
    except FileNotFoundError:
        return 0  # the run begins
    except (OSError, ValueError):
        return 1
    count = before.get("resumed") if isinstance(before, dict) else 0
    return 1 + (count if type(count) is int and count > 0 else 0)


def settings(config: Config) -> dict[str, Any]:
    """The values that are worth using again: all but the place of this run."""
    values = config.as_dict()
    return {name: values[name] for name in values if name not in ("resume", "run_dir")}


class _LogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: metrics go to the same folder, and their failure is reported."""


class _LogFile:
    """train.log: messages of the package, and notes of the folder."""

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
            # If logging is not set up, Python shows warnings by itself, but only as long as there
            # is no handler at all. Ours must not silence them.
            log.addHandler(logging.lastResort)
            self._level = log.level
            log.setLevel(logging.INFO)
        log.addHandler(self._handler)

    def note(self, text: str) -> None:
        """Write to the file only; the console shows it in its own way."""
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


def _markdown(examples: tuple[Example, ...]) -> str:
    """A table, with a row for each example."""
    labels = list(examples[0])
    rows = ([example.get(label) or "(nothing)" for label in labels] for example in examples)
    cells = (
        " | ".join(row).replace("\n", "<br>") for row in [labels, ["---"] * len(labels), *rows]
    )
    return "\n".join(f"| {row} |" for row in cells)


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
