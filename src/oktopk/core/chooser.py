"""Chooser: measures the steps of an `Auto`, and decides what runs.

A round is a block of dense steps and a block of steps of Ok-Topk. Its end is a defined step, in
which all ranks gather the times of all ranks. So they decide alike, whatever their clocks say.
Decisions take effect when a step begins, because the step before can then no longer be taken back.

Of each step the longest time of any rank counts, from its first gradient to its last average. It
includes waiting for the rank that came last, which may be late because others compute on its cores.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from ..algorithms import Algorithm, Auto, Dense
from ..algorithms.auto import ANY, DENSE_STEPS, SPARSE_STEPS
from ..cost import Link, Machine, predict
from ..wire.message import FORMATS
from . import schema
from .stats import StepStats
from .transport import Transport

log = logging.getLogger("oktopk")

_LEAD = 2
"""First steps of a block, which do not count: they apply the residual, or find thresholds."""
_CLEAR = 1.5
"""A ratio of times that needs no further round."""
_SECONDS = 1.0
"""Shorter measurements do not show the machine, but what else it did just then."""
_GAIN = 0.95
"""Ok-Topk must take at most this much of the time of a dense step."""
_EXACT = 0.02
"""Most that bfloat16 may add to the time of a step with int8."""

KINDS = ("dense", "sparse", "exchange")
"""Of times."""
_TIMES = schema.several(schema.number(0))


def _wire(value: Any) -> str | None:
    known = type(value) is str and value in FORMATS
    return None if known else f" is {schema.shown(value)}, but must be a wire format"


_FIELDS = schema.record(
    {
        "reason": schema.text,
        "sparse": schema.flag,
        "wire": _wire,
        "start": schema.whole(),
        "round": schema.whole(),
        "count": schema.whole(),
        "seconds": schema.record(dict.fromkeys(KINDS, _TIMES)),
    }
)


def _whole(value: Any) -> str | None:
    """Whether all times are there that a comparison will need."""
    wrong = _FIELDS(value)
    if wrong or value["reason"]:
        return wrong
    dense, sparse, exchange = (len(value["seconds"][name]) for name in KINDS)
    later, begun = value["sparse"], value["count"] > _LEAD
    no_dense = (later or begun) and not dense
    no_sparse = later and begun and not sparse
    if sparse != exchange or no_dense or no_sparse:
        return '["seconds"] lacks times'
    return None


SAVED = schema.empty_or(_whole)
"""Checks a saved state. It is empty where there is nothing to choose."""


class Chooser:
    """What an `Auto` runs, and the times that this follows from.

    Args:
        numel: elements of the gradient that may be sparse.
        saved: a state that was saved for such an `Auto`; empty to measure anew.
    """

    def __init__(self, auto: Auto, numel: int, saved: Mapping[str, Any]) -> None:
        self.reason = str(saved.get("reason", ""))
        """What was decided, and why; empty until then."""
        self._auto, self.numel = auto, numel
        self._sparse = bool(saved.get("sparse", False))
        self._wire = str(saved.get("wire", "int8")) if auto.wire == ANY else auto.wire
        self._start = int(saved.get("start", 0))
        """The step in which a ramp begins."""
        self._round = int(saved.get("round", 0))
        self._count = int(saved.get("count", 0))
        """Steps of this block so far."""
        seconds = saved.get("seconds", {})
        self._seconds = {name: [*seconds.get(name, ())] for name in KINDS}
        """Of the steps that count: dense and sparse ones, and of the latter the exchanges alone."""
        self._before: tuple[int, dict[str, list[float]]] | None = None
        """Count and seconds before the last step, if it was noted."""
        self.running = self._made()
        """What the next step runs."""

    def begin(self, taken: int, transport: Transport) -> Algorithm:
        """A step begins: what does it run? Collective, and in some steps ranks gather times.

        Args:
            taken: steps before this one that were not skipped.
        """
        if not self.reason:
            self._advance(taken, transport)
        return self.running

    def note(self, seconds: float, stats: StepStats | None) -> None:
        """A step was committed. It took so long from its first gradient to its last average."""
        if self.reason or stats is None:
            return
        self._before = self._count, {name: [*times] for name, times in self._seconds.items()}
        self._count += 1
        if self._count <= _LEAD:
            return
        if self._sparse:
            exchange = stats.seconds["exchange"] + stats.seconds["gather"]
            self._seconds["sparse"].append(seconds)
            self._seconds["exchange"].append(exchange)
        else:
            dense, most = self._seconds["dense"], DENSE_STEPS - _LEAD
            dense.append(seconds)
            del dense[self._round * most : -most]  # of a long warm-up only the last steps count

    def rewind(self) -> None:
        """Exchange the present with that before the last step. Twice changes nothing."""
        if self._before is not None:
            now = self._count, self._seconds
            (self._count, self._seconds), self._before = self._before, now

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "reason": self.reason,
            "sparse": self._sparse,
            "wire": self._wire,
            "start": self._start,
            "round": self._round,
            "count": self._count,
            "seconds": {name: list(times) for name, times in self._seconds.items()},
        }

    def agreed(self) -> str:
        """A summary that must be the same for the saved states of all ranks."""
        counts = [len(times) for times in self._seconds.values()]
        return f"{self.running}, {self._round}, {self._count}, {counts}, {self.reason}"

    def _advance(self, taken: int, transport: Transport) -> None:
        if transport.size == 1:
            self._decide(transport, "dense: there is only one rank", sparse=False)
        elif self._auto.target(self.numel) >= self.numel:
            self._decide(transport, "dense: all elements are to be applied", sparse=False)
        elif self._sparse and self._count >= SPARSE_STEPS:
            self._compare(taken, transport)
        elif not self._sparse and self._count >= DENSE_STEPS and taken >= self._auto.warmup_steps:
            self._turn(sparse=True)

    def _turn(self, sparse: bool) -> None:
        """Begin a block."""
        self._sparse, self._count, self._before = sparse, 0, None
        self.running = self._made()

    def _made(self) -> Algorithm:
        if not self._sparse:
            return Dense()
        auto, wire = self._auto, self._wire
        return auto.ramped(wire, self._start) if self.reason else auto.sparse(wire)

    def _compare(self, taken: int, transport: Transport) -> None:
        """A round is over: decide, or begin another one."""
        seconds = self._gather(transport)
        dense, sparse, exchange = map(statistics.median, seconds.values())
        far = not dense / _CLEAR < sparse < dense * _CLEAR
        long = sum(seconds["dense"]) + sum(seconds["sparse"]) > _SECONDS
        self._round += 1
        if self._round < self._auto.rounds and not (far and long):
            self._turn(sparse=False)
        elif sparse > dense * _GAIN:
            why = f"dense: Ok-Topk takes {_ms(sparse)} here, a dense step {_ms(dense)}"
            self._decide(transport, why, sparse=False)
        else:
            self._wire, self._start = self._wire_for(sparse, exchange, transport.size), taken
            why = f"{self._wire}: a dense step takes {_ms(dense)} here, Ok-Topk {_ms(sparse)}"
            self._decide(transport, f"sparse, {why}", sparse=True)

    def _decide(self, transport: Transport, reason: str, *, sparse: bool) -> None:
        self.reason = reason
        self._turn(sparse)
        self._seconds = {name: [] for name in self._seconds}
        if transport.rank == 0:
            log.info("auto: %s", reason)

    def _gather(self, transport: Transport) -> dict[str, list[float]]:
        """For each step the longest time of all ranks, but of exchanges the shortest: the others
        include waiting. Collective."""
        own = [second for times in self._seconds.values() for second in times]
        row = torch.tensor(own, dtype=torch.float64, device=transport.device)
        rows = [each.tolist() for each in transport.all_gather(row)]
        columns = zip(*rows, strict=True)
        found = {}
        for name, times in self._seconds.items():
            pick = min if name == "exchange" else max
            found[name] = [pick(next(columns)) for _ in times]
        return found

    def _wire_for(self, sparse: float, exchange: float, size: int) -> str:
        """The more exact format, if it costs next to nothing, by the cost model.

        Exchanges of int8 have shown the rate of the link. bfloat16 has more bytes.
        """
        if self._auto.wire != ANY:
            return self._auto.wire
        exact, short = (self._nbytes(wire, size) for wire in ("bfloat16", "int8"))
        link = Link(rate=short / max(exchange, 1e-9), latency=0)
        return "bfloat16" if link.seconds(exact - short) <= sparse * _EXACT else "int8"

    def _nbytes(self, wire: str, size: int) -> float:
        """Bytes that a rank sends in a step of Ok-Topk."""
        k = self._auto.target(self.numel)
        any_link, any_machine = Link(rate=1, latency=0), Machine()
        return predict("oktopk", self.numel, k, size, wire, any_link, any_machine).bytes_sent


def chooser_for(
    algorithm: Algorithm, numel: int, saved: Mapping[str, Any] | None = None
) -> Chooser | None:
    """The chooser of an algorithm; None if there is nothing to choose."""
    return Chooser(algorithm, numel, saved or {}) if isinstance(algorithm, Auto) else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
