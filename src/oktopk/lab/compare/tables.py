"""A comparison as tables of plain text, for the terminal and for the report page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...common.format import NOTHING, byte_size, count, digits, duration, plural, ratio, table
from ...report import Table
from ...workloads.base import Metric
from .results import TRAINING_LOSS, VALIDATION, Comparison, Row
from .statistics import Difference, Measure
from .trained import Result


def tables(comparison: Comparison) -> list[Table]:
    """Qualities, differences to the baseline, and costs; a row for each variant."""
    rows = _finished(comparison)
    if not rows:
        return []
    found = [_qualities(comparison, rows)]
    if comparison.baseline and any(row.differences for row in rows):
        found.append(_differences(comparison, rows))
    return [*found, _costs(comparison, rows)]


def report(comparison: Comparison) -> str:
    """All of it as text: a heading, the tables, and notes."""
    lines = [heading(comparison)]
    for each in tables(comparison):
        left = len(_knobs(_finished(comparison)))
        lines += ["", each.title, *table([each.columns, *each.rows], left=left)]
        lines += [each.note] if each.note else []
    if comparison.notes:
        lines += ["", *comparison.notes]
    return "\n".join(lines)


def _finished(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.seeds]


def heading(comparison: Comparison) -> str:
    done = comparison.finished()
    parts = [f"{comparison.setting.recipe}: {comparison.setting.links}"]
    if done and done[0].result:
        parts.append(
            f"{count(done[0].result.parameters)} parameters, {plural(done[0].result.steps, 'step')}"
        )
    parts.append(f"{len(done)} of {plural(len(comparison.cells), 'cell')} finished")
    return "; ".join(parts)


def _qualities(comparison: Comparison, rows: Sequence[Row]) -> Table:
    metrics = comparison.metrics()
    return _table(
        comparison,
        "final values, mean ± standard deviation over seeds",
        ["seeds", *(each.label for each in metrics.values())],
        rows,
        lambda row: [
            str(len(row.seeds)),
            *(spread(row.measures.get(name), each) for name, each in metrics.items()),
        ],
        "" if any(len(row.seeds) > 1 for row in rows) else "one seed: no standard deviation",
    )


def _differences(comparison: Comparison, rows: Sequence[Row]) -> Table:
    metrics = comparison.metrics()
    others = [row for row in rows if row.name != comparison.baseline]
    lacking = [row for row in others if _pairs(row) < 2]
    note = ""
    if lacking:
        note = "no interval with one seed: --seeds 3 gives one"
        if len(lacking) < len(others):
            note = f"no interval for {', '.join(row.name for row in lacking)}: it needs two seeds"
    return _table(
        comparison,
        f"difference to {comparison.baseline}, seed by seed: mean ± half of its 95 % interval",
        ["pairs", *(each.label for each in metrics.values())],
        others,
        lambda row: [
            str(_pairs(row)),
            *(difference(row.differences.get(name), each) for name, each in metrics.items()),
        ],
        note,
    )


def _costs(comparison: Comparison, rows: Sequence[Row]) -> Table:
    target = comparison.target_loss
    note = f"the target is a training loss of {target:g}" if target is not None else ""
    if target is None and comparison.baseline:
        note = f"the target is the final training loss of {comparison.baseline}, seed by seed"
    return _table(
        comparison,
        "cost, mean over seeds",
        ["samples/s", "bytes a step", "x fewer", "ratio", "to target"],
        rows,
        lambda row: [
            digits(_mean(row, "samples_per_second")),
            _shown(_mean(row, "bytes_a_step"), byte_size),
            _shown(_mean(row, "fewer_bytes"), ratio),
            _shown(_mean(row, "compression_ratio"), ratio),
            _to_target(row),
        ],
        note,
    )


def _table(
    comparison: Comparison,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    cells: Callable[[Row], list[str]],
    note: str,
) -> Table:
    knobs = _knobs(_finished(comparison))
    return Table(
        title,
        [*knobs, *columns],
        [[*(knobs[name](row) for name in knobs), *cells(row)] for row in rows],
        note,
    )


def _knobs(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """The columns that name a variant, without those that nobody has."""

    def shown(value: float | None) -> str:
        return NOTHING if value is None else f"{value:g}"

    columns: dict[str, Callable[[Row], str]] = {"compressor": lambda row: row.variant.compressor}
    if any(row.variant.density is not None for row in rows):
        columns["density"] = lambda row: shown(row.variant.density)
    if any(row.variant.warmup_steps is not None for row in rows):
        columns["warm-up"] = lambda row: shown(row.variant.warmup_steps)
    if any(row.variant.sigma_scale is not None for row in rows):
        columns["sigma"] = lambda row: shown(row.variant.sigma_scale)
    return columns


def spread(measure: Measure | None, metric: Metric) -> str:
    """`1.874 ± 0.003`."""
    if measure is None:
        return NOTHING
    text = metric.format(measure.mean)
    return text if measure.deviation is None else f"{text} ± {metric.format(measure.deviation)}"


def difference(found: Difference | None, metric: Metric) -> str:
    """`+0.031 ± 0.012 worse`."""
    if found is None:
        return NOTHING
    text = f"{'-' if found.mean < 0 else '+'}{metric.format(abs(found.mean))}"
    if found.half_width is None:
        return text
    text += f" ± {metric.format(found.half_width)}"
    if not found.clear:
        return text
    return f"{text} {'better' if (found.mean < 0) == metric.lower_is_better else 'worse'}"


def _pairs(row: Row) -> int:
    return max((len(each.by_seed) for each in row.differences.values()), default=0)


def _mean(row: Row, name: str) -> float | None:
    measure = row.measures.get(name)
    return None if measure is None else measure.mean


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return NOTHING if value is None else form(value)


def _to_target(row: Row) -> str:
    measure = row.measures.get("seconds_to_target")
    if measure is None:
        return NOTHING
    reached = len(measure.by_seed)
    return duration(measure.mean) + (f" ({reached})" if reached < len(row.seeds) else "")


def qualities_line(result: Result, metrics: Mapping[str, Metric]) -> str:
    """The qualities of one cell: `training loss 1.874, val loss 1.9`."""
    values = {f"{VALIDATION}{name}": value for name, value in result.validation.items()}
    values[TRAINING_LOSS] = result.training_loss
    named = {name: each for name, each in metrics.items() if name in values}
    return ", ".join(f"{each.label} {each.format(values[name])}" for name, each in named.items())
