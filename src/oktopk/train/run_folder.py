"""The folder of a run, with everything that is kept of it.

    config.toml         the final configuration; `oktopk train --config` reads it
    environment.json    versions and the machine, of the process that ran last
    metrics.jsonl       one line a step, a look into a step and an epoch, from first to last
    train.log           messages, with the time
    summary.json        the outcome, once there is one
    tensorboard/        the same metrics for TensorBoard; see reporters.py
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
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ..common import files
from ..common.errors import UserError
from ..common.format import byte_size, duration, number, percent, plural, toml
from ..common.values import parse, read
from ..common.version import version_of
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
        resume_step: the step of the checkpoint that a resumed run goes on from. 0 begins again and
            drops all records in the folder.
        resume_epoch: the epoch that it goes on with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_step: int | None = None,
        resume_epoch: int = 1,
    ) -> None:
        self.path = Path(path)
        self._resume_step = resume_step
        self._resume_epoch = resume_epoch
        self._metrics: IO[str] | None = None
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

    def detailed(self, record: DetailRecord) -> None:
        self._record("detail", record)

    def validating(self, done: int, total: int) -> None:
        """Not kept."""

    def epoch_ended(self, record: EpochRecord) -> None:
        self._record("epoch", record)
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
        # An error in writing was reported when the record was made.
        with suppress(OSError):
            if metrics is not None:
                metrics.close()
        self._log.close()

    def _record(self, kind: str, record: StepRecord | DetailRecord | EpochRecord) -> None:
        if self._metrics is None:
            raise RuntimeError("call RunFolder.started before anything is recorded")
        line = json.dumps({"kind": kind, **dataclasses.asdict(record)}, allow_nan=False)
        with writing(self.path):
            self._metrics.write(line + "\n")


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


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
