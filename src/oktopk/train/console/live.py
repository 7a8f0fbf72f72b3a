"""What a person sees of a run: its plan, the bars while it goes on, a row an epoch, a summary.

On a terminal, bars are redrawn in place at most four times a second, with no thread of their own.
Anywhere else, such as a log file, there are plain lines now and then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ...common.format import byte_size, count, duration, number, percent, plural, ratio
from ..config.config import Config
from ..records import EpochRecord, Example, Outcome, Plan, StepRecord
from .summary import HEADINGS, dense_by_choice, metric, summary

_REFRESH = 0.25
"""Seconds between two pictures of the bars."""
_PLAIN_SECONDS, _PLAIN_SHARE = 10.0, 0.05
"""Where there are no bars: a line after so many seconds, or so much of the run."""
_LONG = 26
"""Characters of a value that gets a line of its own in the configuration."""
_PHASE = {"dense": "cyan", "sparse": "green", "mixed": "yellow"}


class View:
    """Shows a run on a console. An Observer.

    Args:
        console: by default standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _Console()
        self._animated = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bars: _Bars | None = None
        self._plan: Plan | None = None
        self._columns: list[_Column] = []
        self._metrics: tuple[str, ...] = ()
        self._last: StepRecord | None = None
        self._loss, self._speed = _Smooth(), _Smooth()
        self._shown_at, self._shown_step = 0.0, 0
        self._sparse_seen = self._finished = False

    def started(self, plan: Plan) -> None:
        self._plan = plan
        print_ = self._console.print
        print_(Text("configuration", style="bold"))
        print_(_configuration(plan.config, self._console.width, self._safe))
        print_(Text("plan", style="bold"))
        text, warning = _when_sparse(plan)
        for line in _plan(plan):
            print_(Text(self._safe(line)))
        print_(Text("WARNING: " + text, style="bold yellow") if warning else Text(text))
        print_()

    def stepped(self, record: StepRecord) -> None:
        self._last = record
        self._loss.add(record.loss)
        if record.seconds.get("total", 0) > 0:
            self._speed.add(record.samples / record.seconds["total"])
        plan = self._plan
        if plan is None:
            return
        first_sparse = record.phase == "sparse" and not self._sparse_seen
        self._sparse_seen |= first_sparse
        now = time.monotonic()
        waited = now - self._shown_at
        first, last = self._shown_at == 0, record.step + 1 >= plan.steps
        if self._animated:
            # Bars that stand still while an epoch is validated have to be right.
            epoch_ends = (record.step + 1) % plan.steps_per_epoch == 0
            if first or last or epoch_ends or waited >= _REFRESH:
                self._show_at(now, record.step)
                self._open_bars(plan).step(record, self._fields(record))
        elif (
            first
            or last
            or first_sparse
            or waited >= _PLAIN_SECONDS
            or record.step - self._shown_step >= _PLAIN_SHARE * plan.steps
        ):
            self._show_at(now, record.step)
            place = f"step {record.step}/{plan.steps} epoch {record.epoch} "
            # Not wrapped, and without colours: a line that grep finds whole.
            self._console.print(Text(place + self._fields(record).plain), soft_wrap=True)

    def validating(self, done: int, total: int) -> None:
        if not self._animated or self._plan is None:
            return
        now = time.monotonic()
        if done in (0, total) or now - self._shown_at >= _REFRESH:
            self._shown_at = now
            self._open_bars(self._plan).validate(done, total)

    def epoch_ended(self, record: EpochRecord) -> None:
        if self._bars is not None:
            self._bars.validate(0, 0)
        new_names = record.validation and not self._metrics
        if not self._columns or new_names:
            self._metrics = tuple(record.validation)
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
        if self._last is not None and self._plan is not None and not self._finished:
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
        for example in examples:
            grid.add_row(Text("ref:", style="dim"), Text(self._safe(example.reference)))
            said = Text(self._safe(example.hypothesis)) if example.hypothesis.strip() else None
            grid.add_row(Text("hyp:", style="dim"), said or Text("(nothing)", style="dim italic"))
        return Padding(grid, (0, 0, 0, 6), expand=False)

    def _make_columns(self) -> list[_Column]:
        """The columns of an epoch's row, as many as there is room for."""
        digits = len(str(self._plan.steps)) if self._plan else 0
        columns = [
            _Column("epoch", 5, lambda x: str(x.epoch)),
            _Column("steps", max(5, digits), lambda x: str(x.steps)),
            _Column("loss", 6, lambda x: number(x.loss)),
            *(_metric_column(name) for name in self._metrics),
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
        # What room is left makes the gaps wider.
        if _width(columns) + len(columns) - 1 <= room:
            columns[1:] = [dataclasses.replace(x, width=x.width + 1) for x in columns[1:]]
        return columns

    def _open_bars(self, plan: Plan) -> _Bars:
        if self._bars is None:
            self._bars = _Bars(self._console, plan)
        return self._bars

    def _show_at(self, now: float, step: int) -> None:
        self._shown_at, self._shown_step = now, step

    def _stop(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _safe(self, text: str) -> str:
        """What the console can write: a run must not end at a letter that it cannot."""
        encoding = self._console.encoding
        text = "".join(x if x.isprintable() else "?" for x in text)
        return text.encode(encoding, "replace").decode(encoding, "replace")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process, behind the back of the other workers."""
        raise BrokenPipeError


class _Bars:
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


def _metric_column(name: str) -> _Column:
    heading = HEADINGS.get(name, name)
    return _Column(heading, max(5, len(heading)), lambda record: metric(record, name))


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def _rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)


def _configuration(config: Config, width: int, safe: Callable[[str], str]) -> RenderableType:
    """Names and values in as many columns as fit; what is not the default has a star."""
    defaults = Config()
    short: list[tuple[Text, Text, Text]] = []
    long: list[tuple[Text, Text, Text]] = []
    for name, value in config.as_dict().items():
        if value == "":
            continue
        changed = value != getattr(defaults, name)
        style = "bold" if changed else ""
        text = safe(str(value))
        row = Text("* " if changed else "  ", style), Text(name, style or "dim"), Text(text, style)
        (long if len(text) > _LONG else short).append(row)
    mark, names, values = (max((len(row[i]) for row in short), default=1) for i in range(3))
    across = max(1, min(4, (width + 2) // (mark + names + values + 4)))
    down = -(-len(short) // across)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for line in range(down):
        cells = []
        for row in short[line::down]:
            cells += [Text.assemble(row[0], row[1]), row[2]]
        grid.add_row(*cells)
    rest = [Text.assemble(row[0], row[1].append("  "), row[2]) for row in long]
    return Group(grid, *rest, Text("  * not the default", "dim"), "")


def _plan(plan: Plan) -> list[str]:
    ended = plan.config.max_steps == plan.steps
    lines = [
        f"{plural(plan.workers, 'worker')} on {plan.device}, "
        f"{plural(plan.parameters, 'parameter')}, {plural(plan.samples, 'sample')}",
        f"{plural(plan.epochs, 'epoch')} of {plural(plan.steps_per_epoch, 'step')}, "
        f"{plural(plan.steps, 'step')} in all" + (" (--max-steps)" if ended else ""),
    ]
    if plan.first_step:
        source = f", from {plan.weights_from}" if plan.weights_from else ""
        lines.append(f"resumed at step {plan.first_step}{source}")
    elif plan.weights_from:
        lines.append(f"begins with the weights of {plan.weights_from}")
    return lines


def _when_sparse(plan: Plan) -> tuple[str, bool]:
    """When sparsity begins, and whether that needs a warning."""
    dense, steps = plan.dense_steps, plan.steps
    if dense_by_choice(plan):
        return "gradients are averaged densely", False
    if dense >= steps:
        longer = "--max-steps" if plan.config.max_steps == steps else "--max-epochs"
        return (
            f"this run has {plural(steps, 'step')}, but sparsity begins only after {dense}: no "
            f"step will be sparse. `--warmup-steps {steps // 2}` begins sooner, more `{longer}` "
            f"go on longer",
            True,
        )
    if dense == 0:
        return "every step is sparse", False
    if plan.first_step >= dense:
        return f"warm-up ended at step {dense}: every step from here is sparse", False
    warm_up = "step 0 is dense" if dense == 1 else f"steps 0 to {dense - 1} are dense"
    epoch = dense // plan.steps_per_epoch + 1
    return (
        f"{warm_up} (warm-up), sparsity begins at step {dense} of {steps} (epoch {epoch})",
        False,
    )
