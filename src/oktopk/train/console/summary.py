"""The end of a run as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...algorithms import Dense
from ...common.format import NOTHING, byte_size, count, duration, number, percent, plural, ratio
from ..records import BucketTiming, EpochRecord, Outcome, Plan

_MANY_EPOCHS = 12
"""With more epochs than this, the summary shows only those that were validated."""
HEADINGS = {"loss": "val loss", "wer": "WER", "cer": "CER"}
_HIGHER_IS_BETTER = {"accuracy"}


def summary(outcome: Outcome) -> Iterable[RenderableType]:
    epochs = outcome.epochs
    if len(epochs) > _MANY_EPOCHS:
        epochs = tuple(record for record in epochs if record.validation)
    if epochs:
        yield _epochs(epochs)
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(outcome):
        facts.add_row(Text(name, style="dim"), text)
    yield facts
    if outcome.step_seconds.get("total", 0) > 0:
        yield _parts(outcome.step_seconds)
    if outcome.buckets:
        yield _buckets(outcome.buckets)
        yield _timings(outcome.buckets)


def _epochs(epochs: Sequence[EpochRecord]) -> Table:
    names = list(dict.fromkeys(name for record in epochs for name in record.validation))
    table = _table("epoch", "loss", *(HEADINGS.get(name, name) for name in names))
    for record in epochs:
        metrics = (metric(record, name) for name in names)
        table.add_row(str(record.epoch), number(record.loss), *metrics)
    return table


def _facts(outcome: Outcome) -> Iterable[tuple[str, str]]:
    validated = [record for record in outcome.epochs if record.validation]
    for name in validated[-1].validation if validated else ():
        if name == "loss":
            continue
        having = [record for record in validated if name in record.validation]
        choose = max if name in _HIGHER_IS_BETTER else min
        best = choose(having, key=lambda record: record.validation[name])
        text = f"{metric(having[-1], name)} at the end"
        text += f", best {metric(best, name)} (epoch {best.epoch})"
        if name == "wer":
            text += "; WER counts inserted words too, so it can exceed 1"
        yield HEADINGS.get(name, name), text
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
    config, steps, dense = outcome.plan.config, outcome.steps, outcome.plan.dense_steps
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


def metric(record: EpochRecord, name: str) -> str:
    return number(record.validation[name]) if name in record.validation else NOTHING


def dense_by_choice(plan: Plan) -> bool:
    return isinstance(plan.config.make_algorithm(), Dense)
