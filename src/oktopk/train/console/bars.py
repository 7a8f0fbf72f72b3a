"""The bars at the foot of a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..records import Plan, StepRecord


class Bars:
    """The bars at the foot of a terminal, and the line of fields below them."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._plan = plan
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            speed_estimate_period=120,
            expand=True,
        )
        self._run = self._progress.add_task("run", total=plan.steps, completed=plan.first_step)
        self._epoch = self._progress.add_task("epoch", total=plan.steps_per_epoch)
        self._validation: TaskID | None = None
        self._fields = Text()
        # Drawn by us alone: a thread that draws would be inherited by forked loaders of data.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, get_renderable=self._picture
        )
        self._live.start()

    def step(self, record: StepRecord, fields: Text) -> None:
        done, plan = record.step + 1, self._plan
        before = (record.epoch - 1) * plan.steps_per_epoch
        self._progress.update(self._run, completed=done)
        self._progress.update(
            self._epoch,
            description=f"epoch {record.epoch}/{plan.epochs}",
            total=max(1, min(plan.steps_per_epoch, plan.steps - before)),
            completed=max(0, done - before),
        )
        self._fields = fields
        self._live.refresh()

    def validate(self, done: int, total: int) -> None:
        """Show how far validation is; without a total, no longer."""
        if total:
            if self._validation is None:
                self._validation = self._progress.add_task("validation")
            self._progress.update(self._validation, completed=done, total=total)
        elif self._validation is not None:
            self._progress.remove_task(self._validation)
            self._validation = None
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()

    def _picture(self) -> RenderableType:
        return Group(self._progress, self._fields)
