"""Results of `oktopk bench` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.format import NOTHING, count, digits, duration, number, plural, table
from .results import Result

COLUMNS = """columns
  ms            median time of a step, the slowest rank
  quartiles     a quarter of the steps took no longer than the first, and a quarter no less than
                the second
  x dense       how many times as fast as dense, by the medians; in training, by the medians of
                the steps that both took after their dense warm-up
  compute       ms of a step that ranks compute; ranks that share cores need more than they would
                on machines of their own
  network       ms that ranks exchange messages and wait for each other; in training, the time of
                backward after the last gradient is computed, compression included
  cpu           ms of a core that a rank used: all threads, and the system's work for them
  MB counted    MB that a rank sends in a step, by our count (2m(P-1)/P for an allreduce of m
                bytes)
  MB sent       the same by its network interface, protocols included; none on loopback
training
  samples/s     over the whole run, dense warm-up included
  loss          mean of the last epoch's steps, or of the last half of the run; of all ranks
  to target     seconds until that mean reaches the target: --target-loss, or the last loss of
                dense
  x to target   how many times as soon as dense
"""


def report(results: Sequence[Result]) -> str:
    """The results of one setting: a heading, a table, the stages, and notes."""
    first = results[0]
    setting = first.setting
    noun = "parameters" if setting.workload == "train" else "elements"
    lines = [
        f"{setting.workload}: P = {setting.hosts}, {setting.link}, {count(first.numel)} {noun}, "
        f"{plural(setting.threads, 'thread')} a rank"
    ]
    if setting.shares_cores:
        lines.append(
            f"{setting.hosts} ranks share {plural(setting.cores, 'core')}: computing takes longer "
            "than on hosts of their own"
        )
    if setting.loopback:
        lines.append("on loopback bytes cost next to nothing: a real network is slower")
    training = setting.workload == "train"
    lines += _lines([_training_row(r) if training else _row(r) for r in results])
    if training and first.target_loss is not None:
        lines.append(f"target loss {number(first.target_loss)}")
    stages = list(dict.fromkeys(stage for result in results for stage in result.stages))
    if stages:
        lines += ["", *_lines([_stages(r, stages) for r in results if r.stages])]
    notes = [f"{result.name}: {note}" for result in results for note in result.notes]
    return "\n".join([*lines, *notes])


def _row(result: Result) -> dict[str, str]:
    return {**_times(result), **_bytes(result)}


def _training_row(result: Result) -> dict[str, str]:
    to_target = result.seconds_to_target
    return {
        **_times(result),
        **_bytes(result),
        "samples/s": digits(result.samples_per_second),
        "seconds": digits(result.total_seconds),
        "loss": NOTHING if result.final_loss is None else number(result.final_loss),
        "to target": NOTHING if to_target is None else duration(to_target),
        "x to target": digits(result.target_speedup),
    }


def _times(result: Result) -> dict[str, str]:
    spread = result.seconds
    return {
        "contender": result.name,
        "steps": count(result.steps),
        "ms": _ms(spread.median),
        "quartiles": f"{_ms(spread.lower)}..{_ms(spread.upper)}",
        "x dense": digits(result.speedup),
        "compute": _ms(result.compute),
        "network": _ms(result.communication),
        "cpu": _ms(result.cpu),
    }


def _bytes(result: Result) -> dict[str, str]:
    sent = result.bytes_sent
    return {
        "MB counted": digits(result.bytes_counted / 1e6),
        "MB sent": digits(None if sent is None else sent / 1e6),
    }


def _stages(result: Result, stages: Sequence[str]) -> dict[str, str]:
    cells = {stage: _ms(result.stages[stage]) for stage in stages if stage in result.stages}
    return {"ms of the stages": result.name} | {stage: cells.get(stage, "") for stage in stages}


def _lines(rows: Sequence[dict[str, str]]) -> list[str]:
    return table([list(rows[0]), *(list(row.values()) for row in rows)])


def _ms(seconds: float) -> str:
    return digits(1000 * seconds)
