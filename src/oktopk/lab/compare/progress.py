"""How far a grid is: bars on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import statistics
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
        self._total, self._done = total, done
        self._name, self._step = "", Step(0, None, 0.0)
        self._cell_began = 0.0
        self._took: list[float] = []
        """Seconds of cells that were trained."""
        self._first: tuple[float, int] | None = None
        """When the cell's first step was seen, and its number."""
        self._training = False
        self._shown_at = 0.0
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
        self._cell_began = self._shown_at = time.monotonic()
        self._first, self._training = None, True
        if self._animated:
            self._cell = self._bars.add_task(name, total=None)
            self._live.refresh()

    def stepped(self, step: Step) -> None:
        self._step = step
        now = time.monotonic()
        self._first = self._first or (now, step.done)
        if now - self._shown_at < (_REFRESH if self._animated else _PLAIN_SECONDS):
            return
        self._shown_at = now
        if self._cell is not None:
            self._bars.update(self._cell, completed=step.done, total=step.planned)
            self._live.refresh()
        elif not self._animated:
            self._print(f"{self._name}: {self._where()}{self._left()}")

    def end(self, text: str, *, failed: bool = False) -> None:
        """The cell is finished, or has failed; the text says how it went."""
        self._done += 1
        took = time.monotonic() - self._cell_began
        self._training = False
        if not failed:
            self._took.append(took)
        line = f"{self._name}: {text}, {duration(took)}{self._left()}"
        self._print(line, "bold red" if failed else "")
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
        """By the mean time of cells until now; in the first one, by its steps."""
        cells = self._total - self._done
        if not cells:
            return None
        whole = statistics.fmean(self._took) if self._took else self._forecast()
        spent = time.monotonic() - self._cell_began if self._training else 0.0
        return None if whole is None else max(0.0, whole - spent) + whole * (cells - 1)

    def _forecast(self) -> float | None:
        """The time of the cell that is being trained; its start takes longer than its steps."""
        if self._first is None or self._step.planned is None:
            return None
        (since, before), done = self._first, self._step.done
        if done <= before:
            return None
        a_step = (time.monotonic() - since) / (done - before)
        return since - self._cell_began + a_step * (self._step.planned - before)

    def _picture(self) -> RenderableType:
        return Group(self._bars, Text(f"{self._where()}{self._left()}", "dim"))
