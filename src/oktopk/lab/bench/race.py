"""The race: for each number of hosts, for each link, every contender in its turn.

Each of these settings gets a network of its own, and one rank on each host. The ranks stay for all
contenders.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from ...common.host import cores
from ..network import Loopback, Network
from . import results
from .messages import Answer, Job, RawJob, TrainingJob
from .plan import Bench
from .ranks import Ranks, RanksError
from .results import Result, Setting
from .status import Status


@dataclass(frozen=True)
class Group:
    """The results of one setting."""

    results: list[Result]
    """Dense first."""
    notes: list[str]
    """On contenders without a result."""
    whole: bool = False
    """No more contenders follow."""


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
            cores=len(cores()),
            threads=bench.threads,
        )
        status.show(f"P = {size}, {setting.link}: starting ranks")
        with (
            Loopback(size) if bench.loopback else Network(size, link) as hosts,
            Ranks(
                hosts, counts=not bench.loopback, threads=bench.threads, timeout=bench.timeout
            ) as ranks,
        ):
            race = _train if bench.workload == "train" else _raw
            group = Group([], [])
            for found in race(bench, setting, _Runner(ranks, status, setting)):
                baseline = bench.contenders[0].spec
                compared = results.compare(found.results, bench.target_loss, baseline)
                group = Group(compared, list(found.notes))
                yield group
        yield replace(group, whole=True)


class _Runner:
    """Hands jobs to ranks, and shows how far they are."""

    def __init__(self, ranks: Ranks, status: Status, setting: Setting) -> None:
        self._ranks, self._status = ranks, status
        self.where = f"P = {setting.hosts}, {setting.link}"

    def __call__(self, job: Job) -> list[Answer]:
        title = f"{self.where}: {job.contender}"
        self._status.show(title)
        try:
            return self._ranks.run(
                job, lambda said: self._status.show(f"{title}, step {said.step} of {said.steps}")
            )
        except RanksError as error:
            raise RanksError(f"{title}: {error}") from None

    def finished(self) -> None:
        self._status.finished()


def _raw(bench: Bench, setting: Setting, run: _Runner) -> Iterator[Group]:
    """All contenders, with pieces of dense before, between and after them.

    So other work on the machine slows down dense as much as the others.
    """
    entries = bench.entries()
    pieces = len(entries) + 1
    steps = bench.steps or 20
    job = RawJob(
        contender=bench.contenders[0].spec,
        density=None,
        numel=bench.numel,
        seed=bench.seed,
        first=0,
        settle=1,
        skip=1,
        steps=-(-steps // pieces),
        least=-(-3 // pieces),
        seconds=bench.seconds / pieces,
    )
    dense = [run(job)]
    found: list[Result] = []

    def group() -> Group:
        return Group([results.summarize(setting, job.contender, None, dense), *found], [])

    for contender, density in entries:
        settle = contender.settling()
        answers = run(
            replace(
                job,
                contender=contender.spec,
                density=density,
                settle=settle,
                skip=max(settle, bench.skip) if contender.own else settle,
                steps=steps,
                least=3,
                seconds=bench.seconds,
            )
        )
        found.append(results.summarize(setting, contender.spec, density, [answers]))
        run.finished()
        yield group()
        done = sum(len(piece[0].steps) for piece in dense)
        dense.append(run(replace(job, first=done, settle=0, skip=0)))
    run.finished()
    yield group()


def _train(bench: Bench, setting: Setting, run: _Runner) -> Iterator[Group]:
    """All contenders, dense first."""
    group = Group([], [])
    for contender, density in [(bench.contenders[0], None), *bench.entries()]:
        answers = run(
            TrainingJob(
                contender=contender.spec,
                density=density,
                recipe=bench.recipe,
                values=dict(bench.values),
                steps=bench.steps or 0,
                seconds=bench.seconds,
                warmup_steps=bench.warmup_steps,
            )
        )
        course, count = answers[0].course, len(answers[0].steps)
        assert course is not None
        if count:
            # Neither dense steps at the start nor the first sparse step tell about the others.
            steady_from = min(course.dense_steps + 1, count - 1)
            result = results.summarize(setting, contender.spec, density, [answers], steady_from)
            group.results.append(results.add_training(result, answers))
        else:
            name = results.full_name(contender.spec, density)
            group.notes.append(f"{run.where}: {name}: {course.failed}")
        run.finished()
        yield group
