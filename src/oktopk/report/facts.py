"""What the page says in words and tables: the summary, settings, environment, faults, examples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.format import (
    NOTHING,
    byte_size,
    count,
    digits,
    duration,
    number,
    percent,
    plural,
    ratio,
)
from ..lab.losses import window_of
from ..train.config.config import sections
from ..workloads import WORKLOADS, workload_for
from .runs import Run
from .subjects import Subject


@dataclass(frozen=True)
class Value:
    """A fact about one subject."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Fact:
    """A fact about every subject."""

    title: str
    values: Sequence[Value]

    @property
    def note(self) -> str:
        """What is true of all subjects; empty if their notes differ."""
        notes = {value.note for value in self.values if value.text != NOTHING}
        return notes.pop() if len(notes) == 1 else ""


@dataclass(frozen=True)
class Row:
    """A row of a table with a column for each subject."""

    name: str
    cells: Sequence[str]
    differs: bool = False
    """Whether subjects have different values."""
    marked: bool = False
    """Whether a value is not the default."""


def lead(run: Run) -> str:
    """A run in one line."""
    config, parts = run.config, []
    if "compressor" in config:
        dense = not config.get("compression", True) or config["compressor"] == "dense"
        parts.append(
            "dense" if dense else f"{config['compressor']}, density {config.get('density')}"
        )
    if run.ending:
        plan = run.ending.plan
        parts += [plural(plan.workers, "worker"), plural(plan.parameters, "parameter")]
    else:
        parts.append("not finished: it is still going on, or it was stopped")
    started = str(run.environment.get("started", "")).replace("T", " ").removesuffix("+00:00")
    return " · ".join([*parts, f"started {started} UTC"] if started else parts)


def summary(subjects: Sequence[Subject]) -> list[Fact]:
    """The cards at the top."""
    facts = [
        _fact("Training loss", subjects, _loss, number, _loss_note),
        *_metrics(subjects),
        _fact("Sparsity", subjects, _sparsity, percent, _asked),
        _fact(
            "Compression",
            subjects,
            _ratio,
            ratio,
            lambda run: "fewer entries, dense steps included",
        ),
        _fact("Sent a step", subjects, _sent, byte_size, _sent_note),
        _fact("Samples a second", subjects, _speed, digits, _step_time),
        _fact(
            "Hidden", subjects, _hidden, percent, lambda run: "of communication, behind backward"
        ),
        _fact("Steps", subjects, lambda run: float(len(run.steps)), count, _steps_note),
        _fact(
            "Time",
            subjects,
            _seconds,
            duration,
            lambda run: "with validation" if run.ending else "of steps",
        ),
        _fact(
            "Memory",
            subjects,
            _memory,
            lambda x: byte_size(x * 1e6),
            lambda run: "peak of a worker",
        ),
    ]
    return [fact for fact in facts if any(value.text != NOTHING for value in fact.values)]


def _fact(
    title: str,
    subjects: Sequence[Subject],
    of: Callable[[Run], float | None],
    show: Callable[[float], str],
    note: Callable[[Run], str],
) -> Fact:
    return Fact(title, [_value(subject, of, show, note) for subject in subjects])


def _value(
    subject: Subject,
    of: Callable[[Run], float | None],
    show: Callable[[float], str],
    note: Callable[[Run], str],
) -> Value:
    numbers = subject.numbers(of)
    if not numbers:
        return Value(NOTHING)
    if len(subject.runs) == 1:
        return Value(show(numbers[0]), note(subject.first))
    text = show(statistics.fmean(numbers))
    if len(set(numbers)) > 1:
        text += f" ± {show(statistics.stdev(numbers))}"
    notes = {note(run) for run in subject.runs if of(run) is not None}
    of_runs = f"mean of {plural(len(numbers), 'run')}"
    return Value(text, f"{notes.pop()}; {of_runs}" if len(notes) == 1 else of_runs)


def _metrics(subjects: Sequence[Subject]) -> list[Fact]:
    runs = [run for subject in subjects for run in subject.runs]
    last = [(run, run.validations[-1]["validation"]) for run in runs if run.validations]
    names = dict.fromkeys(name for _, values in last for name in values)
    facts = []
    for name in names:
        metric = next(run for run, values in last if name in values).metric(name)
        title = "Validation loss" if name == "loss" else metric.label
        facts.append(_fact(title, subjects, _final(name), metric.format, _best(name)))
    return facts


def _final(name: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        return run.validations[-1]["validation"].get(name) if run.validations else None

    return of


def _best(name: str) -> Callable[[Run], str]:
    def note(run: Run) -> str:
        metric = run.metric(name)
        having = [each for each in run.validations if name in each["validation"]]
        choose = min if metric.lower_is_better else max
        best = choose(having, key=lambda each: each["validation"][name])
        if best is having[-1]:
            return "its best"
        return f"best {metric.format(best['validation'][name])}, epoch {best['epoch']}"

    return note


def _loss(run: Run) -> float | None:
    return float(run.column("loss")[-_window(run) :].mean())


def _loss_note(run: Run) -> str:
    steps = min(_window(run), len(run.steps))
    return "the last step" if steps == 1 else f"mean of the last {count(steps)} steps"


def _window(run: Run) -> int:
    """Steps of the mean, as in `oktopk compare`; some of the last in a run that is not finished."""
    if run.ending is None:
        return 20
    return window_of(run.ending.plan.steps_per_epoch, run.ending.plan.steps)


def _sparsity(run: Run) -> float | None:
    return float(run.column("sparsity")[run.sparse].mean()) if run.sparse.any() else None


def _asked(run: Run) -> str:
    density = run.config.get("density")
    asked = f"; asked for {100 * (1 - density):.4g}%" if isinstance(density, float) else ""
    return "of sparse steps" + asked


def _ratio(run: Run) -> float | None:
    if run.ending:
        return run.ending.compression_ratio
    return float(1 / max(1e-12, (1 - run.column("sparsity")).mean()))


def _sent(run: Run) -> float | None:
    sent = run.column("bytes_sent")
    return float(sent[run.sparse].mean() if run.sparse.any() else sent.mean())


def _sent_note(run: Run) -> str:
    if not run.sparse.any():
        return "dense"
    if not run.ending or not run.ending.plan.dense_bytes:
        return "in a sparse step"
    dense, sent = run.ending.plan.dense_bytes, _sent(run) or 0
    return f"in a sparse step; dense {byte_size(dense)}, {ratio(dense / max(1, sent))} as much"


def _speed(run: Run) -> float | None:
    seconds = run.elapsed[-1]
    return float(run.column("samples").sum() / seconds) if seconds > 0 else None


def _step_time(run: Run) -> str:
    return f"{1000 * run.elapsed[-1] / len(run.steps):.1f} ms a step"


def _hidden(run: Run) -> float | None:
    """Of the communication thread's work, the share that took no time of the training thread."""
    busy = np.nan_to_num(run.column("busy"))
    hidden = np.maximum(busy - np.nan_to_num(run.part("synchronise")), 0)
    return float(hidden.sum() / busy.sum()) if busy.sum() > 0 else None


def _steps_note(run: Run) -> str:
    sparse = plural(int(run.sparse.sum()), "sparse step").replace(" steps", "").replace(" step", "")
    if run.ending is None:
        return f"{sparse}; not finished"
    planned = run.ending.plan.steps
    return sparse if planned == run.ending.steps else f"{sparse}; planned {count(planned)}"


def _seconds(run: Run) -> float | None:
    return run.ending.seconds if run.ending else float(run.elapsed[-1])


def _memory(run: Run) -> float | None:
    return run.ending.memory.get("peak_rss") if run.ending else None


def settings(subjects: Sequence[Subject]) -> list[Row]:
    """The configurations, those first that differ."""
    defaults = _defaults(subjects[0].first.config)
    names = dict.fromkeys(name for each in subjects for run in each.runs for name in run.config)
    rows = []
    for name in names:
        cells = [_cell([run.config.get(name) for run in each.runs], name) for each in subjects]
        changed = _changed(name, subjects, defaults)
        rows.append(Row(name, cells, len(set(cells)) > 1, changed))
    return sorted(rows, key=lambda row: not row.differs)


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        workload = workload_for(config)
    except Exception:  # of another version, or somebody else's
        workload = WORKLOADS[0]
    kinds = sections(workload).values()
    return {name: each.default for kind in kinds for name, each in kind.options().items()}


def _changed(name: str, subjects: Sequence[Subject], defaults: Mapping[str, Any]) -> bool:
    runs = [run for subject in subjects for run in subject.runs]
    return any(
        name in run.config and (name not in defaults or run.config[name] != defaults[name])
        for run in runs
    )


def environment(subjects: Sequence[Subject]) -> list[Row]:
    """Versions and the machine, those first that differ."""
    flat = [[_flat(run.environment) for run in each.runs] for each in subjects]
    names = dict.fromkeys(name for runs in flat for facts in runs for name in facts)
    rows = []
    for name in names:
        cells = [_cell([facts.get(name) for facts in runs], name) for runs in flat]
        differs = len(set(cells)) > 1 and name not in ("started", "command")
        rows.append(Row(name, cells, differs))
    return sorted(rows, key=lambda row: not row.differs)


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    found = dict[str, str]()
    for name, value in environment.items():
        if isinstance(value, Mapping):
            found |= {str(key): _text(each) for key, each in value.items()}
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list) else _text(value)
    return found


def _cell(values: Sequence[Any], name: str) -> str:
    """The values of the runs of one subject; many are counted."""
    texts = list(dict.fromkeys(_text(value) for value in values))
    if name in ("started", "command") and len(texts) > 1:
        return f"{len(texts)} different ones"
    return ", ".join(texts) if len(texts) <= 6 else f"{texts[0]}, ... ({len(texts)} values)"


def _text(value: Any) -> str:
    if value is None:
        return NOTHING
    if value == "":
        return "(empty)"
    return "yes" if value is True else "no" if value is False else str(value)


FAULTS = {
    "resumed": "Restarts: the run was resumed from a checkpoint",
    "skipped_steps": "Skipped steps: a gradient had a NaN or an infinity",
    "discarded_steps": "Discarded steps: their averages were not used",
    "skipped_samples": "Skipped samples: the workload could not use them",
}


def faults(subjects: Sequence[Subject]) -> list[Row]:
    """What did not go as planned; empty if that was not recorded."""
    found = [[run.ending.faults for run in each.runs if run.ending] for each in subjects]
    known = [[each for each in faults if each is not None] for faults in found]
    if not any(known):
        return []
    rows = []
    for name, title in FAULTS.items():
        cells = [_sum([getattr(each, name) for each in faults]) for faults in known]
        rows.append(Row(title, cells, marked=any(cell not in ("0", NOTHING) for cell in cells)))
    return rows


def _sum(values: Sequence[int]) -> str:
    return count(sum(values)) if values else NOTHING


def examples(subjects: Sequence[Subject]) -> list[tuple[str, Sequence[Mapping[str, str]]]]:
    """The texts of each subject's last validation."""
    found = []
    for subject in subjects:
        having = [each["examples"] for each in subject.first.validations if each.get("examples")]
        if having:
            found.append((subject.label, having[-1][:3]))
    return found
