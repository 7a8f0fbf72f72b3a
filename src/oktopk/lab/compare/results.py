"""A comparison: its cells, and a row for each variant."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ...common.errors import UserError
from ...common.flags import did_you_mean
from ...common.format import plural
from ...workloads import workload_for
from ...workloads.base import Metric
from ..machine import Machine, this_machine
from .grid import Cell, Variant
from .setting import Setting
from .statistics import Difference, Measure
from .trained import Result, Trained

FINISHED, FAILED, UNFINISHED = "finished", "failed", "unfinished"
BASELINE = "dense"
"""Unless --baseline names another variant."""
_LONG = 160
TRAINING_LOSS = "training_loss"
VALIDATION = "validation/"
"""Comes before the names of the workload's metrics."""


@dataclass(frozen=True)
class CellRecord:
    """A cell, and how far it is."""

    name: str
    """Of its folder in `cells`."""
    variant: Variant
    seed: int
    state: str = UNFINISHED
    """finished, failed, or unfinished."""
    why: str = ""
    """It failed."""
    result: Result | None = None
    target_loss: float | None = None
    seconds_to_target: float | None = None
    """None if the target was not reached."""

    @property
    def cell(self) -> Cell:
        return Cell(self.variant, self.seed)


@dataclass(frozen=True)
class Row:
    """A variant over its finished seeds."""

    name: str
    variant: Variant
    seeds: list[int]
    measures: dict[str, Measure]
    """training_loss; validation/NAME for each metric; samples_per_second, bytes_a_step,
    fewer_bytes (a dense step's bytes by these), compression_ratio, seconds_to_target."""
    differences: dict[str, Difference]
    """To the baseline, of the same quantities; empty for the baseline itself."""


@dataclass(frozen=True)
class Comparison:
    """All that is known of a grid. Saved as comparison.json."""

    setting: Setting
    cells: list[CellRecord]
    baseline: str | None = None
    """The name of a variant."""
    target_loss: float | None = None
    """As asked for; None: the baseline's final training loss, seed by seed."""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: Machine | None = None
    """Where the command ran last."""
    when: str = ""

    def finished(self) -> list[CellRecord]:
        return [record for record in self.cells if record.state == FINISHED]

    def metrics(self) -> dict[str, Metric]:
        """The qualities of a model, in the order in which they are shown."""
        workload = workload_for({**self.setting.values, "recipe": self.setting.recipe})
        there = [r.result.validation for r in self.cells if r.result is not None]
        names = dict.fromkeys(name for validation in there for name in validation)
        order = [each.name for each in workload.metrics if each.name in names]
        order += [name for name in names if name not in order]
        found = {TRAINING_LOSS: Metric(TRAINING_LOSS, "training loss")}
        return found | {f"{VALIDATION}{name}": workload.metric(name) for name in order}


def compare(
    setting: Setting,
    records: Sequence[CellRecord],
    trained: Mapping[str, Trained],
    baseline: str | None,
    target_loss: float | None,
) -> Comparison:
    """Put all together.

    Args:
        records: all cells, with their states.
        trained: those that are finished, by name.
        baseline: as --baseline names it; None takes dense where it is in the grid.
        target_loss: as --target-loss gives it.
    """
    variants = list(dict.fromkeys(record.variant for record in records))
    chosen = choose_baseline(variants, baseline)
    finals = {
        record.seed: trained[record.name].result.training_loss
        for record in records
        if record.variant == chosen and record.name in trained
    }
    done = []
    for record in records:
        target = finals.get(record.seed) if target_loss is None else target_loss
        done.append(_completed(record, trained.get(record.name), target))
    by_variant = {
        variant: [r for r in done if r.variant == variant and r.state == FINISHED]
        for variant in variants
    }
    of_baseline = _by_seed(by_variant[chosen]) if chosen else {}
    rows = [
        _row(variant, its, {} if variant == chosen else of_baseline)
        for variant, its in by_variant.items()
    ]
    return Comparison(
        setting=setting,
        cells=done,
        baseline=chosen.name if chosen else None,
        target_loss=target_loss,
        rows=rows,
        notes=list(_notes(done, rows, setting)),
        machine=this_machine(),
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def choose_baseline(variants: Sequence[Variant], wanted: str | None) -> Variant | None:
    """The variant with this name, or the only one of the compressor with this name."""
    name = wanted or BASELINE
    fitting = [each for each in variants if name == each.name]
    fitting = fitting or [each for each in variants if name == each.compressor]
    if len(fitting) == 1:
        return fitting[0]
    names = [each.name for each in variants]
    if fitting:
        among = ", ".join(each.name for each in fitting)
        raise UserError(f"--baseline {name} could be each of {among}: name one")
    if wanted:
        close = did_you_mean(name, names) or f"; there are {', '.join(names)}"
        raise UserError(f"--baseline {name} is not in the grid{close}")
    return None


def _completed(record: CellRecord, trained: Trained | None, target: float | None) -> CellRecord:
    if trained is None:
        return record
    return CellRecord(
        record.name,
        record.variant,
        record.seed,
        FINISHED,
        result=trained.result,
        target_loss=target,
        seconds_to_target=trained.seconds_to(target),
    )


def _row(
    variant: Variant, records: Sequence[CellRecord], baseline: Mapping[str, Mapping[int, float]]
) -> Row:
    values = _by_seed(records)
    measures = {name: Measure.of(by_seed) for name, by_seed in values.items()}
    differences = {
        name: Difference.of(by_seed, baseline.get(name, {})) for name, by_seed in values.items()
    }
    return Row(
        variant.name,
        variant,
        sorted(record.seed for record in records),
        {name: each for name, each in measures.items() if each},
        {name: each for name, each in differences.items() if each},
    )


def _by_seed(records: Sequence[CellRecord]) -> dict[str, dict[int, float]]:
    """The values of each quantity, where there are any."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in _quantities(record).items():
            if value is not None:
                found.setdefault(name, {})[record.seed] = value
    return found


def _quantities(record: CellRecord) -> dict[str, float | None]:
    result = record.result
    assert result is not None
    sent = result.bytes_a_step
    return {
        TRAINING_LOSS: result.training_loss,
        **{f"{VALIDATION}{name}": value for name, value in result.validation.items()},
        "samples_per_second": result.samples_per_second,
        "bytes_a_step": sent,
        "fewer_bytes": result.dense_bytes_a_step / sent if sent else None,
        "compression_ratio": result.compression_ratio,
        "seconds_to_target": record.seconds_to_target,
    }


def _notes(records: Sequence[CellRecord], rows: Sequence[Row], setting: Setting) -> Iterator[str]:
    """What a reader of the table must know."""
    waiting = sum(record.state == UNFINISHED for record in records)
    if waiting:
        yield f"{plural(waiting, 'cell')} of {len(records)} not finished: the same command goes on"
    for record in records:
        if record.state == FAILED:
            yield f"{record.name} failed: {first_sentence(record.why)}"
    for row in rows:
        done = [r.result for r in records if r.variant == row.variant and r.result]
        if done and row.variant.density is not None and not any(r.sparse_steps for r in done):
            yield (
                f"{row.name} took no sparse step: give fewer --warmups, more steps, or, for small "
                "models, --set dense_below=0"
            )
    known = list(dict.fromkeys(_versions(r.result) for r in records if r.result))
    if len(known) > 1:
        yield f"cells were trained with several versions: {'; '.join(known)}"
    if not setting.links.emulated:
        yield "on loopback bytes cost next to nothing: on a real network, dense is slower"


def first_sentence(why: str) -> str:
    """Enough of a message to know what went wrong; comparison.json has all of it."""
    return textwrap.shorten(why.partition(". ")[0], _LONG, placeholder=" ...")


def _versions(result: Result) -> str:
    names = ("oktopk", "torch")
    return ", ".join(f"{name} {result.versions.get(name, 'unknown')}" for name in names)
