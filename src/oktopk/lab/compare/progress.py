"""How far a grid is: bars on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ...common.format import duration, number
from .running import Step

_REFRESH = 0.25
_PLAIN_SECONDS = 30.0
"""Between two lines about one cell, where there are no bars."""


class GridProgress:
    """Shows it. Use it as a context manager.

    Args:
        total: cells of the grid.
        done: those that were finished before.
    """

    def __init__(self, total: int, done: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._animated = self._console.is_terminal and not self._console.is_dumb_terminal
        self._total, self._done, self._before = total, done, done
        self._name, self._step = "", Step(0, None, 0.0)
        self._began = self._cell_began = time.monotonic()
        self.shown_at = 0.0
        """When the cell's step was shown last."""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            console=self._console,
            expand=True,
        )
        self._grid: TaskID = self._bars.add_task("cells", total=total, completed=done)
        self._cell: TaskID | None = None
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_renderable=self._picture,
        )

    def __enter__(self) -> GridProgress:
        if self._animated:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._animated:
            self._live.stop()

    def begin(self, name: str) -> None:
        """A cell begins."""
        self._name, self._step = name, Step(0, None, 0.0)
        self._cell_began = self.shown_at = time.monotonic()
        if self._animated:
            self._cell = self._bars.add_task(name, total=None)
            self._live.refresh()

    def stepped(self, step: Step) -> None:
        self._step = step
        now = time.monotonic()
        if now - self.shown_at < (_REFRESH if self._animated else _PLAIN_SECONDS):
            return
        self.shown_at = now
        if self._cell is not None:
            self._bars.update(self._cell, completed=step.done, total=step.planned)
            self._live.refresh()
        elif not self._animated:
            self._print(f"{self._name}: {self._where()}{self._left()}")

    def end(self, text: str, *, failed: bool = False) -> None:
        """The cell is finished, or has failed; the text says how it went."""
        self._done += 1
        took = duration(time.monotonic() - self._cell_began)
        self._step = Step(0, None, 0.0)
        self._cell_began = time.monotonic()
        self._print(f"{self._name}: {text}, {took}{self._left()}", "bold red" if failed else "")
        if self._cell is not None:
            self._bars.remove_task(self._cell)
            self._cell = None
            self._bars.update(self._grid, completed=self._done)
            self._live.refresh()

    def _print(self, text: str, style: str = "") -> None:
        line = Text(f"[{self._done}/{self._total}] {text}", style)
        self._console.print(line, soft_wrap=True)

    def _where(self) -> str:
        step = self._step
        if not step.done:
            return "starting"
        planned = f"/{step.planned}" if step.planned else ""
        return f"step {step.done}{planned}, loss {number(step.loss)}"

    def _left(self) -> str:
        seconds = self._seconds_left()
        return "" if seconds is None else f"; {duration(seconds)} left"

    def _seconds_left(self) -> float | None:
        """By the mean time of cells until now; the one that is being trained counts in parts."""
        step, now = self._step, time.monotonic()
        part = step.done / step.planned if step.planned else 0.0
        trained = self._done - self._before + part
        if trained <= 0 or self._done >= self._total:
            return None
        return (now - self._began) / trained * (self._total - self._before - trained)

    def _picture(self) -> RenderableType:
        return Group(self._bars, Text(f"{self._where()}{self._left()}", "dim"))
