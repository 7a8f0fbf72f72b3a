"""The end of a run as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...common.format import NOTHING, byte_size, count, duration, number, percent, plural, ratio
from ...workloads.base import Metric
from ..records import BucketTiming, EpochRecord, Outcome, Plan
from .plan import dense_by_choice

_MANY_EPOCHS = 12
"""With more epochs than this, the summary shows only those that were validated."""


def summary(outcome: Outcome) -> Iterable[RenderableType]:
    epochs = outcome.epochs
    if len(epochs) > _MANY_EPOCHS:
        epochs = tuple(record for record in epochs if record.validation)
    if epochs:
        yield _epochs(epochs, metrics(outcome.plan, epochs))
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(outcome):
        facts.add_row(Text(name, style="dim"), text)
    yield facts
    if outcome.step_seconds.get("total", 0) > 0:
        yield _parts(outcome.step_seconds)
    if outcome.buckets:
        yield _buckets(outcome.buckets)
        yield _timings(outcome.buckets)


def _epochs(epochs: Sequence[EpochRecord], shown: Sequence[Metric]) -> Table:
    table = _table("epoch", "loss", *(each.label for each in shown))
    for record in epochs:
        values = (metric(record, each) for each in shown)
        table.add_row(str(record.epoch), number(record.loss), *values)
    return table


def _facts(outcome: Outcome) -> Iterable[tuple[str, str]]:
    validated = [record for record in outcome.epochs if record.validation]
    for each in metrics(outcome.plan, validated[-1:]):
        if each.name == "loss":
            continue
        having = [record for record in validated if each.name in record.validation]
        choose = min if each.lower_is_better else max
        best = choose(having, key=lambda record: record.validation[each.name])
        text = f"{metric(having[-1], each)} at the end"
        text += f", best {metric(best, each)} (epoch {best.epoch})"
        yield each.label, text + (f"; {each.note}" if each.note else "")
    if outcome.choice:
        yield "auto", outcome.choice
    yield "sparsity", _sparsity(outcome)
    if outcome.steps:
        yield "compression ratio", f"{ratio(outcome.compression_ratio)}, dense steps included"
        yield "sent", _sent(outcome)
    steps = plural(outcome.steps - outcome.plan.first_step, "step")
    yield "time", f"{duration(outcome.seconds)} for {steps}"
    names = {"peak_rss": "peak RSS of a worker"}
    memory = [
        f"{names.get(name, 'GPU ' + name)} {byte_size(megabytes * 1e6)}"
        for name, megabytes in outcome.memory.items()
    ]
    if memory:
        yield "memory", ", ".join(memory)


def _sparsity(outcome: Outcome) -> str:
    config, steps, dense = outcome.plan.config.compression, outcome.steps, outcome.plan.dense_steps
    if outcome.sparse_steps:
        of = "" if outcome.sparse_steps == steps else f" in {outcome.sparse_steps} of {steps} steps"
        real = percent(outcome.sparsity).replace("%", " %")
        return f"{real} of entries not sent{of}; asked for {100 * (1 - config.density):.4g} %"
    if dense_by_choice(outcome.plan):
        return "none: gradients were averaged densely, as configured"
    if steps <= dense:
        return (
            f"none: the run had {plural(steps, 'step')}, and sparsity begins after {dense}; "
            f"`--warmup-steps {steps // 2}` begins sooner"
        )
    return "none: no step was sparse"


def _sent(outcome: Outcome) -> str:
    sent, dense = outcome.bytes_sent, outcome.dense_bytes
    if not sent or not dense:
        return "nothing: there is nobody to send to" if outcome.plan.workers == 1 else "nothing"
    text = f"{byte_size(sent)} sent by rank 0"
    if 0.995 < dense / sent < 1.005:
        return f"{text}, as much as dense steps send"
    fewer = f"{ratio(dense / sent)} fewer" if dense > sent else f"{ratio(sent / dense)} more"
    return f"{text}, {byte_size(dense)} had it been dense: {fewer}"


def _parts(seconds: dict[str, float]) -> RenderableType:
    total = seconds["total"]
    table = _table("part of a step", "ms", "%")
    table.columns[0].justify = "left"
    for part, mean in seconds.items():
        table.add_row(part, f"{mean * 1000:.1f}", f"{100 * mean / total:.1f}")
    waited = percent(seconds.get("data", 0.0) / total).replace("%", " %")
    return Group(table, Text(f"batches were waited for {waited} of the time"))


def _buckets(buckets: Sequence[BucketTiming]) -> Table:
    table = _table("bucket", "parameters", "elements", "algorithm", "sparsity", "kB sent")
    for name in (1, 3):
        table.columns[name].justify = "left"
    table.columns[1].overflow = "fold"
    for place, bucket in enumerate(buckets):
        names = bucket.parameters
        table.add_row(
            str(place),
            " .. ".join(dict.fromkeys((names[0], names[-1]))) if names else NOTHING,
            count(bucket.numel),
            bucket.algorithm,
            percent(bucket.sparsity),
            count(bucket.bytes_sent / 1000),
        )
    return table


def _timings(buckets: Sequence[BucketTiming]) -> RenderableType:
    parts = ("backward", "merge", "compression", "allreduce", "demerge", "total")
    table = _table("bucket", *parts)
    rows = [[getattr(bucket, part) for part in parts] for bucket in buckets]
    for place, row in enumerate(rows):
        table.add_row(str(place), *(f"{1000 * mean:.2f}" for mean in row))
    if len(rows) > 1:
        sums = [sum(column) for column in zip(*rows, strict=True)]
        table.add_row("all", *(f"{1000 * mean:.2f}" for mean in sums), style="bold")
    return Group(
        table,
        Text(
            "milliseconds; means of all steps, dense ones too, as in the table above", style="dim"
        ),
    )


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def metrics(plan: Plan, epochs: Iterable[EpochRecord]) -> tuple[Metric, ...]:
    """All that epochs were validated with."""
    names = dict.fromkeys(name for record in epochs for name in record.validation)
    return tuple(map(plan.config.workload.metric, names))


def metric(record: EpochRecord, which: Metric) -> str:
    value = record.validation.get(which.name)
    return NOTHING if value is None else which.format(value)
