"""The question of `oktopk plan`, and its answer: a row for each algorithm and wire format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.format import byte_size, percent, ratio
from ...cost import Cost, Link, Machine, Nodes, Step, predict, step_time
from ...cost.algorithms import WITHOUT_WIRE

BASELINE = "dense"
SLOWEST, FASTEST = 1e4, 1e14
"""Bits a second between which a break-even is looked for."""
ALWAYS, NEVER = "always", "never"
_WORTH_IT = 1.05
"""Below this many times dense, sparse is not worth the trouble."""
_PARTS = 64
"""Rates that are tried for a break-even, before the interval is halved."""


@dataclass(frozen=True)
class Question:
    """What is trained, on what. All values have been checked."""

    numel: int
    size: int
    """Ranks, P."""
    link: Link
    """Of a node."""
    machine: Machine
    densities: Sequence[float] = (0.02,)
    algorithms: Sequence[str] = ("dense", "fp16", "oktopk")
    wires: Sequence[str] = ("int8",)
    nodes: Nodes | None = None
    compute: float = 0.0
    """Seconds of a step without its reduction; 0: not known."""
    samples: int = 0
    """Of a rank in a step; 0: not known."""
    buckets: int = 1

    def at(self, bits: float) -> Question:
        """The same question at another rate."""
        return dataclasses.replace(self, link=Link.of(bits, self.link.latency))

    def of(self, size: int) -> Question:
        """The same question for another number of ranks."""
        return dataclasses.replace(self, size=size)


@dataclass(frozen=True)
class Row:
    """One way to average gradients, and what it takes."""

    algorithm: str
    wire: str | None
    density: float | None
    cost: Cost
    """Of all buckets together."""
    step: Step
    speedup: float
    """Times dense."""
    samples_per_second: float | None

    @property
    def name(self) -> str:
        options = [self.wire or "", f"{self.density:g}" if self.density else ""]
        return " ".join([self.algorithm, *filter(None, options)])

    @property
    def sparse(self) -> bool:
        return self.algorithm not in WITHOUT_WIRE


@dataclass(frozen=True)
class Answer:
    """All rows, and what to do."""

    rows: Sequence[Row]
    best: Row
    sparse: Row | None
    """The best sparse one; None if there is none."""
    break_even: float | str | None
    """Bits a second below which `sparse` is faster than dense; ALWAYS or NEVER."""


def answer(question: Question) -> Answer:
    """Predict all rows, and compare."""
    rows = rows_of(question)
    sparse = min((row for row in rows if row.sparse), key=_seconds, default=None)
    break_even = None if sparse is None else break_even_of(question, sparse)
    return Answer(rows, min(rows, key=_seconds), sparse, break_even)


def rows_of(question: Question) -> list[Row]:
    """Every algorithm with every wire format and density; dense first."""
    rows = [predicted(question, BASELINE)]
    for name in question.algorithms:
        if name in WITHOUT_WIRE:
            rows += [predicted(question, name)] if name != BASELINE else []
            continue
        rows += [
            predicted(question, name, wire, density)
            for density in question.densities
            for wire in question.wires
        ]
    dense = rows[0].step.seconds
    return [
        dataclasses.replace(row, speedup=dense / row.step.seconds if row.step.seconds else 1.0)
        for row in rows
    ]


def predicted(
    question: Question, name: str, wire: str | None = None, density: float | None = None
) -> Row:
    """One row; its speed-up is not known yet.

    Buckets are equal: the cost of all is that of one, times their number.
    """
    numel = max(1, question.numel // question.buckets)
    k = max(1, round((density or 1.0) * numel))
    one = predict(
        name,
        numel,
        k,
        question.size,
        wire or "float32",
        question.link,
        question.machine,
        question.nodes,
    )
    cost = Cost(*(question.buckets * value for value in dataclasses.astuple(one)))
    step = step_time(question.compute, cost, question.buckets)
    known = question.compute and question.samples
    samples = question.samples * question.size / step.seconds if known else None
    return Row(name, wire, density, cost, step, 1.0, samples)


def break_even_of(question: Question, sparse: Row) -> float | str:
    """The rate below which a sparse row is faster than dense.

    Seconds of dense and sparse cross where bytes cost as much as compression does. The highest
    crossing is found by halving an interval of rates.
    """

    def pays(bits: float) -> bool:
        there = question.at(bits)
        mine = predicted(there, sparse.algorithm, sparse.wire, sparse.density)
        return _seconds(mine) < _seconds(predicted(there, BASELINE))

    low, high = math.log(SLOWEST), math.log(FASTEST)
    tried = [math.exp(low + (high - low) * part / _PARTS) for part in range(_PARTS + 1)]
    if pays(tried[-1]):
        return ALWAYS
    last = next((part for part in reversed(range(_PARTS)) if pays(tried[part])), None)
    if last is None:
        return NEVER
    low, high = math.log(tried[last]), math.log(tried[last + 1])
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(math.exp(middle)) else (low, middle)
    return math.exp(low)


def recommendation(question: Question, found: Answer) -> str:
    """One sentence."""
    best, dense = found.best, found.rows[0]
    if question.size == 1:
        return "Recommendation: none; one rank has nobody to average with."
    if best.speedup < _WORTH_IT:
        sure = "" if best.algorithm == BASELINE else f" ({best.name} would be {_times(best)})"
        return f"Recommendation: dense; nothing is much faster here{sure}."
    if not best.sparse:
        return (
            f"Recommendation: {best.name}, {_times(best)}: it sends {_bytes(best)} a step instead "
            f"of {_bytes(dense)}, and here compression takes longer than it saves."
        )
    known = " for the whole step" if question.compute else " for the reduction alone"
    return (
        f"Recommendation: {best.name}, {_times(best)}{known}: it sends {_bytes(best)} a step "
        f"instead of {_bytes(dense)}."
    )


def break_even_sentence(question: Question, found: Answer) -> str:
    """In words; empty if no row is sparse, or if there is one rank."""
    if question.size == 1 or found.sparse is None or found.break_even is None:
        return ""
    name = found.sparse.name
    if found.break_even == ALWAYS:
        return f"Break-even: {name} is always faster than dense, at any rate up to 100 Tbit/s."
    if found.break_even == NEVER:
        return f"Break-even: {name} is never faster than dense, not even at 10 kbit/s."
    assert isinstance(found.break_even, float)
    return f"Break-even: {name} is faster than dense below {rate(found.break_even)}."


def rate(bits: float) -> str:
    """`940 Mbit/s`"""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def _times(row: Row) -> str:
    return f"{ratio(row.speedup)} as fast as dense"


def _bytes(row: Row) -> str:
    return byte_size(row.cost.bytes_sent)


def _seconds(row: Row) -> float:
    return row.step.seconds


def share(row: Row) -> str:
    """Of communication in the step."""
    return percent(row.step.share)
