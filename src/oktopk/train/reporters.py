"""Reporters: TensorBoard, Weights & Biases and trackio show a run while it trains. Observers.

All get the same series, by the same names.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..workloads.base import Example
from .config.config import Run
from .folders import writing
from .records import DetailRecord, EpochRecord, Outcome, Plan, StepRecord
from .run_folder import settings

log = logging.getLogger("oktopk")

_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}


def check_reporters(run: Run, rank: int = 0) -> bool:
    """Import the packages of --report-to now, before much work is done. Rank 0 needs them."""
    if rank == 0 and run.report_to:
        for name in run.reporters:
            _module(name)
    return True


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(
            f"--report-to {name} needs a package: pip install {name} ({error})"
        ) from None


def reporters(run: Run, folder: Path, resume_step: int | None) -> list[Reporter]:
    """As --report-to names them.

    Args:
        folder: of the run.
        resume_step: the step that a resumed run goes on from.
    """
    return [
        TensorBoard(folder, resume_step) if name == "tensorboard" else Tracker(name, folder)
        for name in run.reporters
    ]


def of_step(record: StepRecord) -> dict[str, float]:
    """The series that get a value in each step."""
    return {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/grad_norm": record.grad_norm,
        "communication/sparsity": record.sparsity,
        "communication/ratio": record.compression_ratio,
        "communication/bytes_sent": record.bytes_sent,
        **{f"time/{part}": seconds for part, seconds in record.seconds.items()},
    }


def of_epoch(record: EpochRecord) -> dict[str, float]:
    scalars = {f"validation/{name}": value for name, value in record.validation.items()}
    return {"epoch/loss": record.loss, **scalars}


def of_detail(record: DetailRecord) -> dict[str, float]:
    """Thresholds of each bucket, and staleness, where averages are sparse."""
    scalars: dict[str, float] = {}
    for bucket in record.buckets:
        if bucket.exact_threshold > 0:
            for kind in ("local", "exact", "global"):
                value = getattr(bucket, f"{kind}_threshold")
                scalars[f"threshold/{kind}/bucket{bucket.index}"] = value
    if record.staleness is not None:
        scalars["staleness/mean"] = record.staleness.mean
        scalars["staleness/p99"] = record.staleness.p99
        scalars["staleness/max"] = record.staleness.max
    return scalars


class Reporter:
    """Passes the series of a run on. Subclasses say how."""

    def started(self, plan: Plan) -> None:
        raise NotImplementedError

    def scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Pass on the values of one step."""
        raise NotImplementedError

    def examples(self, examples: Sequence[Example], step: int) -> None:
        """Pass on texts of a validation, or do not."""

    def close(self) -> None:
        raise NotImplementedError

    def stepped(self, record: StepRecord) -> None:
        self.scalars(of_step(record), record.step)

    def detailed(self, record: DetailRecord) -> None:
        self.scalars(of_detail(record), record.step)

    def validating(self, done: int, total: int) -> None:
        """Not passed on."""

    def epoch_ended(self, record: EpochRecord) -> None:
        # Counted as the epoch's last step, which a checkpoint at its end does not purge.
        self.scalars(of_epoch(record), record.steps - 1)
        if record.examples:
            self.examples(record.examples, record.steps - 1)

    def finished(self, outcome: Outcome) -> None:
        """Not passed on."""


class TensorBoard(Reporter):
    """Event files in the run folder. Training goes on without if the package is missing.

    Args:
        folder: of the run.
        resume_step: what was written from this step on is hidden.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        self._folder, self._resume_step = folder, resume_step
        self._writer: Any = None
        self._excepthook = threading.excepthook

    def started(self, plan: Plan) -> None:
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
            with writing(self._folder):
                self._writer = SummaryWriter(
                    str(self._folder / "tensorboard"), purge_step=self._resume_step, flush_secs=10
                )
        except UserError:
            threading.excepthook = self._excepthook
            raise

    def scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            with writing(self._folder):
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, step)

    def examples(self, examples: Sequence[Example], step: int) -> None:
        if self._writer is not None:
            with writing(self._folder):
                self._writer.add_text("validation/examples", _markdown(examples), step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # it was reported when the scalar was written
                writer.close()
            threading.excepthook = self._excepthook

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread; when that fails, our next call of it raises the same."""
        if not isinstance(failure.exc_value, OSError):
            self._excepthook(failure)


class Tracker(Reporter):
    """Weights & Biases, or trackio: a module with init, log and finish.

    A resumed run is a run of its own there, in the same group. A tracker that fails while the run
    trains is left out from then on.

    Args:
        name: of the module.
        folder: of the run.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._module: Any = None

    def started(self, plan: Plan) -> None:
        if self._name == "wandb":
            os.environ.setdefault("WANDB_DIR", str(self._folder))
            os.environ.setdefault("WANDB_CONSOLE", "off")  # progress bars need the terminal
        group = self._folder.resolve().name
        module = _module(self._name)
        try:
            module.init(
                project=os.environ.get(f"{self._name.upper()}_PROJECT", "oktopk"),
                name=f"{group}-resumed-{plan.resumed}" if plan.resumed else group,
                group=group,
                config=settings(plan.config),
            )
        except Exception as error:
            raise UserError(
                f"--report-to {self._name} cannot begin: {_one_line(error)}; leave {self._name} "
                "out of --report-to to train without"
            ) from error
        self._module = module

    def scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self._module is not None and scalars:
            try:
                self._module.log(dict(scalars), step=step)
            except Exception as error:
                self._fail(error)

    def close(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            try:
                module.finish()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._module = None
        log.warning("%s gets no more of this run, as it failed: %s", self._name, _one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _markdown(examples: Sequence[Example]) -> str:
    """A table, with a row for each example."""
    labels = list(examples[0])
    rows = ([example.get(label) or "(nothing)" for label in labels] for example in examples)
    cells = (
        " | ".join(row).replace("\n", "<br>") for row in [labels, ["---"] * len(labels), *rows]
    )
    return "\n".join(f"| {row} |" for row in cells)
