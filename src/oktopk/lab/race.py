"""The race: for each number of hosts, for each link, every contender in its turn.

For each number of hosts a network is made, and one rank started on each host. They stay for all
links, which are shaped anew, and for all contenders.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from . import results
from .network import Loopback, Network
from .plan import Bench
from .ranks import Ranks, RanksError
from .results import Result, Setting
from .status import Status


def measure(bench: Bench, status: Status) -> Generator[list[Result], None, None]:
    """The results of one setting after the other, dense first in each."""
    status.expect(len(bench.hosts) * len(bench.links) * (1 + len(bench.entries())))
    for size in bench.hosts:
        status.show(f"P = {size}: starting ranks")
        with (
            Loopback(size) if bench.loopback else Network(size) as hosts,
            Ranks(
                hosts, counts=not bench.loopback, threads=bench.threads, timeout=bench.timeout
            ) as ranks,
        ):
            for link in bench.links:
                if isinstance(hosts, Network):
                    hosts.shape(link)
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
                one = _train if bench.workload == "train" else _raw
                yield results.compare(
                    one(bench, setting, _Runner(ranks, status, setting)), bench.target_loss
                )


class _Runner:
    """Hands jobs to ranks, and shows how far they are."""

    def __init__(self, ranks: Ranks, status: Status, setting: Setting) -> None:
        self._ranks, self._status = ranks, status
        self._where = f"P = {setting.hosts}, {setting.link}"

    def __call__(self, name: str, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        number = self._status.next_number()
        title = f"{self._where}: {name}"
        self._status.show(title)
        return self._ranks.run(
            {**job, "contender": name, "number": number},
            lambda said: self._status.show(f"{title}, step {said['step']} of {said['steps']}"),
        )

    def finished(self) -> None:
        self._status.finished()


def _raw(bench: Bench, setting: Setting, run: _Runner) -> list[Result]:
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

    found = []
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
        dense_piece()
    run.finished()
    return [results.summarize(setting, name, None, dense), *found]


def _train(bench: Bench, setting: Setting, run: _Runner) -> list[Result]:
    found = []
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
        if not count:
            raise RanksError(f"{contender.spec}: {answers[0]['failed']}")
        # Dense steps at the start are no measure of the others, nor is the first of those.
        steady_from = min(answers[0]["dense_steps"] + 1, count - 1)
        result = results.summarize(setting, contender.spec, density, [answers], steady_from)
        found.append(results.add_training(result, answers))
        run.finished()
    return found
