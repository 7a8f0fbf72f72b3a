"""The view of a run: its plan, bars while it goes on, a row for each epoch, a summary.

On a terminal, bars are redrawn in place at most four times a second, with no thread of their own.
Anywhere else, such as a log file, there are plain lines now and then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...common.format import byte_size, count, duration, number, percent, ratio
from ...workloads.base import Example, Metric
from ..records import DetailRecord, EpochRecord, Outcome, Plan, StepRecord
from .bars import Bars
from .plan import configuration, plan_lines, when_sparse
from .summary import metric, metrics, summary

_REFRESH = 0.25
"""Seconds between two pictures of the bars."""
_PLAIN_SECONDS, _PLAIN_SHARE = 10.0, 0.05
"""Where there are no bars: a line after so many seconds, or so much of the run."""
_PHASE = {"dense": "cyan", "sparse": "green", "mixed": "yellow"}


class View:
    """Shows a run on a console. An Observer.

    Args:
        console: by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _Console()
        self._animated = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bars: Bars | None = None
        self._plan: Plan
        self._columns: list[_Column] = []
        self._metrics: tuple[Metric, ...] = ()
        self._last: StepRecord | None = None
        self._loss, self._speed = _Smooth(), _Smooth()
        self._shown_at, self._shown_step = 0.0, 0
        self._sparse_seen = self._finished = False

    def started(self, plan: Plan) -> None:
        self._plan = plan
        print_ = self._console.print
        print_(Text("configuration", style="bold"))
        print_(configuration(plan.config, self._console.width, self._safe))
        print_(Text("plan", style="bold"))
        text, warning = when_sparse(plan)
        for line in plan_lines(plan):
            print_(Text(self._safe(line)))
        print_(Text("WARNING: " + text, style="bold yellow") if warning else Text(text))
        print_()

    def stepped(self, record: StepRecord) -> None:
        self._last = record
        self._loss.add(record.loss)
        if record.seconds.get("total", 0) > 0:
            self._speed.add(record.samples / record.seconds["total"])
        steps, per_epoch = self._plan.steps, self._plan.steps_per_epoch
        now, done = time.monotonic(), record.step + 1
        waited, first_or_last = now - self._shown_at, self._shown_at == 0 or done >= steps
        first_sparse = record.phase == "sparse" and not self._sparse_seen
        self._sparse_seen |= first_sparse
        if self._animated:
            # Bars stand still while an epoch is validated, so they must be right at its end.
            if first_or_last or done % per_epoch == 0 or waited >= _REFRESH:
                self._shown_at = now
                self._open_bars().step(record, self._fields(record))
            return
        many = record.step - self._shown_step >= _PLAIN_SHARE * steps
        if first_or_last or first_sparse or many or waited >= _PLAIN_SECONDS:
            self._shown_at, self._shown_step = now, record.step
            place = f"step {record.step}/{steps} epoch {record.epoch} "
            # Not wrapped, and without colours: a line that grep finds whole.
            self._console.print(Text(place + self._fields(record).plain), soft_wrap=True)

    def detailed(self, record: DetailRecord) -> None:
        """Not shown."""

    def validating(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._animated and (done in (0, total) or now - self._shown_at >= _REFRESH):
            self._shown_at = now
            self._open_bars().validate(done, total)

    def epoch_ended(self, record: EpochRecord) -> None:
        if self._bars is not None:
            self._bars.validate(0, 0)
        new_names = record.validation and not self._metrics
        if not self._columns or new_names:
            self._metrics = metrics(self._plan, [record])
            self._columns = self._make_columns()
            heading = " ".join(column.heading.rjust(column.width) for column in self._columns)
            self._console.print(Text(heading, style="bold"), soft_wrap=True)
        row = Text(" ").join(column.cell(record) for column in self._columns)
        self._console.print(row, soft_wrap=True)
        if record.examples and record.validation:
            self._console.print(self._examples(record.examples))

    def finished(self, outcome: Outcome) -> None:
        self._finished = True
        self._stop()
        self._console.print()
        self._console.print(Text("summary", style="bold"))
        for part in summary(outcome):
            self._console.print(Padding(part, (0, 0, 1, 2), expand=False))
        folder = Text.assemble("results are in ", (self._safe(outcome.plan.folder), "bold"))
        self._console.print(folder, soft_wrap=True)

    def close(self) -> None:
        self._stop()
        if self._last is not None and not self._finished:
            self._finished = True  # said once
            done = self._last.step + 1
            self._console.print(f"stopped after step {done} of {self._plan.steps}", highlight=False)

    def _fields(self, record: StepRecord) -> Text:
        fields = Text.assemble(
            f"loss {number(self._loss.value)} ",
            (record.phase, _PHASE.get(record.phase, "")),
            f" sparsity {percent(record.sparsity)} ratio {ratio(record.compression_ratio)}"
            f" sent {byte_size(record.bytes_sent)}",
        )
        if self._speed.count:
            fields.append(f" {_rate(self._speed.value)} samples/s")
        return fields

    def _examples(self, examples: Iterable[Example]) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for label, text in (item for example in examples for item in example.items()):
            lines = map(self._safe, text.expandtabs(4).split("\n"))
            shown = Text("\n".join(lines)) if text.strip() else None
            nothing = Text("(nothing)", style="dim italic")
            grid.add_row(Text(f"{label}:", style="dim"), shown or nothing)
        return Padding(grid, (0, 0, 0, 6), expand=False)

    def _make_columns(self) -> list[_Column]:
        """The columns of an epoch's row, as many as there is room for."""
        digits = len(str(self._plan.steps))
        columns = [
            _Column("epoch", 5, lambda x: str(x.epoch)),
            _Column("steps", max(5, digits), lambda x: str(x.steps)),
            _Column("loss", 6, lambda x: number(x.loss)),
            *(_metric_column(each) for each in self._metrics),
            _Column("sparsity", 8, lambda x: percent(x.sparsity), by_phase=True),
            _Column("ratio", 5, lambda x: ratio(x.compression_ratio)),
            _Column("sent", 7, lambda x: byte_size(x.bytes_sent)),
            _Column("samples/s", 9, lambda x: _rate(x.samples_per_second)),
            _Column("time", 6, lambda x: duration(x.seconds)),
        ]
        # A file is as wide as it must be; a hundred columns are read well.
        room = self._console.width if self._animated else max(100, self._console.width)
        for expendable in ("steps", "samples/s", "ratio", "sent"):
            if _width(columns) <= room:
                break
            columns = [column for column in columns if column.heading != expendable]
        # Room that is left makes the gaps wider.
        if _width(columns) + len(columns) - 1 <= room:
            columns[1:] = [dataclasses.replace(x, width=x.width + 1) for x in columns[1:]]
        return columns

    def _open_bars(self) -> Bars:
        if self._bars is None:
            self._bars = Bars(self._console, self._plan)
        return self._bars

    def _stop(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _safe(self, text: str) -> str:
        """Only characters that the console can write: any other would end the run."""
        encoding = self._console.encoding
        text = "".join(x if x.isprintable() else "?" for x in text)
        return text.encode(encoding, "replace").decode(encoding, "replace")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process, behind the back of the other workers."""
        raise BrokenPipeError


class _Smooth:
    """A mean that forgets: steady enough to read, quick enough to follow."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 5)


@dataclass(frozen=True)
class _Column:
    heading: str
    width: int
    text: Callable[[EpochRecord], str]
    by_phase: bool = False

    def cell(self, record: EpochRecord) -> Text:
        style = _PHASE.get(record.phase, "") if self.by_phase else ""
        return Text(self.text(record).rjust(self.width), style=style)


def _metric_column(what: Metric) -> _Column:
    return _Column(what.label, max(5, len(what.label)), lambda record: metric(record, what))


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def _rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)
