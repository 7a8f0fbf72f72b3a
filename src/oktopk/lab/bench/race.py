"""The race: for each number of hosts, for each link, every contender in its turn.

For each of them a network is made, and one rank started on each host. They stay for all contenders.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..network.network import Loopback, Network
from . import results
from .plan import Bench
from .ranks import Ranks, RanksError
from .results import Result, Setting
from .status import Status


@dataclass(frozen=True)
class Group:
    """What is known of one setting."""

    results: list[Result]
    """Dense first."""
    notes: list[str]
    """On contenders without a result."""
    whole: bool = False
    """No more contenders come."""


_Found = Iterator[tuple[list[Result], list[str]]]


def measure(bench: Bench, status: Status) -> Generator[Group, None, None]:
    """One setting after the other, each anew whenever one more contender is measured."""
    status.expect(len(bench.hosts) * len(bench.links) * (1 + len(bench.entries())))
    for size, link in itertools.product(bench.hosts, bench.links):
        setting = Setting(
            workload=bench.workload,
            hosts=size,
            rate=link.rate,
            bits=link.bits if link.rate else None,
            delay=link.delay,
            loss=link.loss,
            loopback=bench.loopback,
            cores=results.cores(),
            threads=bench.threads,
        )
        status.show(f"P = {size}, {setting.link}: starting ranks")
        with (
            Loopback(size) if bench.loopback else Network(size, link) as hosts,
            Ranks(
                hosts, counts=not bench.loopback, threads=bench.threads, timeout=bench.timeout
            ) as ranks,
        ):
            one = _train if bench.workload == "train" else _raw
            group = Group([], [])
            for found, notes in one(bench, setting, _Runner(ranks, status, setting)):
                baseline = bench.contenders[0].spec
                compared = results.compare(found, bench.target_loss, baseline)
                group = Group(compared, list(notes))
                yield group
        yield dataclasses.replace(group, whole=True)


class _Runner:
    """Hands jobs to ranks, and shows how far they are."""

    def __init__(self, ranks: Ranks, status: Status, setting: Setting) -> None:
        self._ranks, self._status = ranks, status
        self.where = f"P = {setting.hosts}, {setting.link}"

    def __call__(self, name: str, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        number = self._status.next_number()
        title = f"{self.where}: {name}"
        self._status.show(title)
        try:
            return self._ranks.run(
                {**job, "contender": name, "number": number},
                lambda said: self._status.show(f"{title}, step {said['step']} of {said['steps']}"),
            )
        except RanksError as error:
            raise RanksError(f"{title}: {error}") from None

    def finished(self) -> None:
        self._status.finished()


def _raw(bench: Bench, setting: Setting, run: _Runner) -> _Found:
    """All contenders; dense steps are spread over the whole time, between the others.

    So what the machine does besides slows down dense as much as the others.
    """
    entries = bench.entries()
    pieces = len(entries) + 1
    steps = bench.steps or 20
    common = {"workload": "raw", "numel": bench.numel, "seed": bench.seed}
    dense: list[list[dict[str, Any]]] = []
    name = bench.contenders[0].spec

    def dense_piece() -> None:
        done = sum(len(piece[0]["steps"]) for piece in dense)
        job = {
            "density": None,
            "first": done,
            "settle": 0 if dense else 1,
            "skip": 0 if dense else 1,
            "steps": -(-steps // pieces),
            "least": -(-3 // pieces),
            "seconds": bench.seconds / pieces,
        }
        dense.append(run(name, {**common, **job}))

    found: list[Result] = []

    def all_found() -> tuple[list[Result], list[str]]:
        return [results.summarize(setting, name, None, dense), *found], []

    dense_piece()
    for contender, density in entries:
        settle = contender.dense_steps(0) + (3 if contender.own else 1)
        job = {
            "density": density,
            "first": 0,
            "settle": settle,
            "skip": max(settle, bench.skip) if contender.own else settle,
            "steps": steps,
            "least": 3,
            "seconds": bench.seconds,
        }
        answers = run(contender.spec, {**common, **job})
        found.append(results.summarize(setting, contender.spec, density, [answers]))
        run.finished()
        yield all_found()
        dense_piece()
    run.finished()
    yield all_found()


def _train(bench: Bench, setting: Setting, run: _Runner) -> _Found:
    found: list[Result] = []
    notes: list[str] = []
    for contender, density in [(bench.contenders[0], None), *bench.entries()]:
        job = {
            "workload": "train",
            "density": density,
            "recipe": bench.recipe,
            "values": bench.values,
            "steps": bench.steps or 0,
            "seconds": bench.seconds,
            "warmup_steps": bench.warmup_steps,
        }
        answers = run(contender.spec, job)
        count = len(answers[0]["steps"])
        if count:
            # Dense steps at the start are no measure of the others, nor is the first of those.
            steady_from = min(answers[0]["dense_steps"] + 1, count - 1)
            result = results.summarize(setting, contender.spec, density, [answers], steady_from)
            found.append(results.add_training(result, answers))
        else:
            name = results.full_name(contender.spec, density)
            notes.append(f"{run.where}: {name}: {answers[0]['failed']}")
        run.finished()
        yield found, notes
