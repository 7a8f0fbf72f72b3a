"""What can be proven of the code for GPUs without one.

- Fake tensors on "cuda" have no content, so whatever asks for a value fails. The default mode runs
  under them from its first operation to its one read.
- Claimed tensors (claimed.py) have content, and follow the rules of devices. All algorithms run
  with them on real ranks, and give bit for bit what they give on a CPU.

Both use the reference kernels, which are the specification of all others.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    UnsupportedFakeTensorException,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import oktopk
import oktopk.kernels
from claimed import Claimed, Claims, DeviceMismatch, guard
from fleet import plan_of
from gradients import PATTERNS
from oktopk.algorithms.oktopk import OkTopkState
from oktopk.core import transport
from oktopk.core.buckets import Options
from oktopk.core.reducer import AllReducer
from oktopk.core.reduction import Progress
from oktopk.core.transport import NonFiniteGradientError, Rider, Transport
from oktopk.core.worker import worker
from oktopk.kernels import Kernels, Step
from oktopk.kernels.plan import Vectors
from oktopk.wire.message import FORMATS
from ranks import Rank, Ranks
from streams import Stream, Streams

GPU = torch.device("cuda", 0)


def reference() -> Any:
    """The reference kernels on all devices."""
    return mock.patch.object(oktopk.kernels, "for_type", return_value=Kernels)


# The default mode under fake tensors.


@dataclass(frozen=True)
class Phases:
    """A step of one rank, as Ok-Topk calls it."""

    numel: int = 3000
    size: int = 3
    k: int = 60
    parts: tuple[int, ...] = (3000,)
    wire: str = "int8"
    dtype: torch.dtype = torch.float32
    kind: torch.dtype = torch.float32
    momentum: float = 0.0
    factor: float = 1.0
    scale: float = 1.0

    def vectors(self, device: torch.device) -> Vectors:
        def new(dtype: torch.dtype, numel: int = self.numel) -> Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        velocity = (self.momentum, new(self.dtype), new(self.dtype)) if self.momentum else ()
        return Vectors(
            [new(self.kind, numel) for numel in self.parts],
            [new(self.kind, numel) for numel in self.parts],
            new(self.dtype),
            new(self.dtype),
            self.factor,
            self.scale,
            *velocity,
        )

    def run(self, kind: type[Step] = Step, device: torch.device = GPU) -> Step:
        """All but the read at the end."""
        size = self.size
        span = -(-self.numel // size)
        plan = plan_of(self.numel, size, 1, self.k, span, self.parts, self.wire, self.dtype)
        step, vectors = kind(plan, self.dtype, device), self.vectors(device)
        thresholds = [1, 0, 1, 0]
        step.begin([*thresholds, *[min(self.numel, span * j) for j in range(size + 1)]])
        step.prepare(vectors, self.k, 1000)
        step.received.copy_(step.send)
        step.combine()
        step.gathered.copy_(step.reply)
        step.apply(vectors)
        return step


CUT = (1500, 0, 700, 800)
PHASES = {
    **{wire: Phases(wire=wire) for wire in FORMATS},
    "parts": Phases(parts=CUT),
    "bfloat16": Phases(kind=torch.bfloat16, parts=CUT, factor=0.5, scale=2.0),
    "float16": Phases(kind=torch.float16, wire="float16"),
    "float64": Phases(dtype=torch.float64, kind=torch.float64, wire="plain"),
    "momentum": Phases(momentum=0.9, parts=CUT),
    "density 1": Phases(k=3000, wire="float32"),
    "two ranks": Phases(size=2, wire="int4"),
    "dense entries": Phases(k=1500, wire="bfloat16"),
}


@contextlib.contextmanager
def fake() -> Iterator[None]:
    """Tensors on "cuda" without content. A value that is asked for, or a shape that depends on
    values, is an error, and so are tensors of two devices."""
    guard()
    with FakeTensorMode(), reference():
        yield


@pytest.mark.parametrize("case", PHASES)
def test_no_phase_of_a_step_waits_for_the_device_or_mixes_devices(case: str) -> None:
    with fake():
        step = PHASES[case].run()
        assert step.after.device == GPU


def test_a_step_waits_for_the_device_in_its_read() -> None:
    with fake():
        step = Phases().run()
        with pytest.raises((DataDependentOutputException, UnsupportedFakeTensorException)):
            step.read()


class ReadsAValue(Step):
    def combine(self) -> None:
        self._counts[0].item()
        super().combine()


class AsksForACount(Step):
    def combine(self) -> None:
        self._mine.nonzero()
        super().combine()


class ForgetsTheDevice(Step):
    def combine(self) -> None:
        super().combine()
        self._errors += torch.ones(self.plan.most)


@pytest.mark.parametrize("kind", [ReadsAValue, AsksForACount, ForgetsTheDevice])
def test_a_phase_that_waits_or_mixes_devices_fails_under_fake_tensors(kind: type[Step]) -> None:
    with fake(), pytest.raises(Exception, match=r"_local_scalar_dense|nonzero|[Dd]evice"):
        Phases().run(kind)
    Phases().run(kind, torch.device("cpu"))  # the mistake is none on a CPU


class Reached(Exception):
    """The one read of a step."""


@contextlib.contextmanager
def pretended_group(size: int) -> Iterator[None]:
    """A process group of this process alone, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("with_rider", [False, True])
def test_a_whole_step_of_the_default_mode_waits_only_in_its_read(
    dtype: torch.dtype, momentum: float, with_rider: bool
) -> None:
    """From `attempt` on: plan, phases, collectives, and the small parameters that ride along.

    Not the agreement of ranks at construction, and not the first sparse step, which looks where
    entries are.
    """
    numel, parts = 3000, [1500, 700, 800]
    together = (mock.patch.object(Transport, name) for name in ("meet", "agree"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretended_group(3))
        stack.enter_context(fake())
        for patch in together:
            stack.enter_context(patch)
        reduction = oktopk.SparseAllreduce(
            oktopk.OkTopk(density=0.02), numel, dtype=dtype, device=GPU, momentum=momentum
        )
        boundaries = (0, 900, 2000, numel)
        reduction._now = Progress(step=5, state=OkTopkState(5, boundaries=boundaries))
        gradient = torch.empty(numel, dtype=dtype, device=GPU)
        pieces = gradient.split(parts)
        rider = Rider(torch.empty(100, device=GPU), 3) if with_rider else None
        stack.enter_context(mock.patch.object(Step, "read", side_effect=Reached))
        with pytest.raises(Reached):
            reduction.attempt(pieces, pieces, factor=0.5, scale=2.0, point=7, rider=rider)
        assert rider is None or rider.summed


# All algorithms with claimed tensors.


def test_claimed_tensors_follow_the_rules_of_devices() -> None:
    with Claims() as device:
        vector = device.take(torch.arange(4.0))
        assert vector.is_cuda
        assert vector[1:].device == GPU
        assert isinstance(torch.zeros(4, device="cuda"), Claimed)
        assert isinstance(torch.tensor([1, 2]).to(GPU, non_blocking=True), Claimed)
        assert not isinstance(torch.zeros(4), Claimed)
        vector[1:] *= 2.0
        vector.add_(torch.tensor(1.0))  # a number
        vector[:1] = 5.0
        assert device.uploads == 1
        assert device.waits.total() == 0
        mixing: list[Callable[[], Any]] = [
            lambda: torch.ones(4) * vector,
            lambda: vector[torch.tensor([0])],
            lambda: torch.cat([vector, torch.ones(4)]),
            lambda: torch.add(vector, vector, out=torch.empty(4)),
            lambda: torch.ones(4).add_(vector),
            lambda: torch.searchsorted(vector, torch.ones(2)),
            lambda: vector.index_add_(0, torch.zeros(1, device="cuda").long(), torch.ones(1)),
            lambda: vector.numpy(),
        ]
        for mix in mixing:
            with pytest.raises(DeviceMismatch):
                mix()
        assert device.waits.total() == 0
        waiting: list[Callable[[], Any]] = [
            lambda: vector.tolist(),
            lambda: float(vector.sum()),
            lambda: bool(vector.any()),
            lambda: vector.nonzero(),
            lambda: vector[vector > 2],
            lambda: vector.cpu(),
            lambda: torch.empty(4).copy_(vector),
            lambda: torch.equal(vector, vector),
            # Copies to the device that the host waits for, too.
            lambda: torch.tensor([1, 2], device=GPU),
            lambda: vector.__setitem__(0, 5.0),
        ]
        for number, wait in enumerate(waiting):
            before = device.waits.total()
            wait()
            assert device.waits.total() == before + 1, f"number {number}: {device.waits}"
        assert vector.tolist() == [5.0, 3.0, 5.0, 7.0]


@dataclass(frozen=True)
class Case:
    """Steps of one algorithm."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    pattern: str = "drifting"
    dtype: torch.dtype = torch.float32
    momentum: float = 0.0

    def algorithm(self) -> oktopk.Algorithm:
        return oktopk.algorithm(self.name, density=0.02, warmup_steps=WARM_UP, **self.options)


WARM_UP, STEPS, NUMEL, PARTS = 2, 8, 3001, [1500, 701, 800]
CASES = {
    **{name: Case(name) for name in oktopk.names() if name != "auto"},  # it runs two of them
    "oktopk bfloat16": Case("oktopk", {"wire": "bfloat16"}, dtype=torch.bfloat16),
    "oktopk momentum": Case("oktopk", {"wire": "int4"}, momentum=0.9),
    "oktopk equal": Case("oktopk", {"wire": "float16"}, "all_equal"),
    "oktopk density 1": Case("oktopk", {"ramp": (1.0,), "ramp_steps": 3}),
    "oktopk-variable balanced": Case(
        "oktopk-variable", {"balance_trigger": 1.0, "wire": "plain"}, "ascending"
    ),
    "oktopk-variable equal": Case(
        "oktopk-variable", {"threshold_interval": 1, "wire": "float32"}, "all_equal"
    ),
    "oktopk-variable momentum": Case("oktopk-variable", {"wire": "float16"}, momentum=0.9),
    "topkdsa float64": Case("topkdsa", {"wire": "plain"}, dtype=torch.float64),
    "gtopk bfloat16": Case("gtopk", {"wire": "bfloat16"}, dtype=torch.bfloat16),
    "gaussiank zero": Case("gaussiank", {"wire": "int4"}, "one_rank_zero"),
}


MOST_WAITS = {
    "dense": 2.0,
    "topka": 65.0,
    "topka2": 70.0,
    "topkaopt": 65.0,
    "topkdsa": 115.0,
    "gtopk": 70.0,
    "gaussiank": 50.0,
    "oktopk": 8.0,
    "oktopk-variable": 140.0,
}
"""How often the host may wait in a sparse step of two or three ranks, on average: half as much
again as was counted. Each is a time in which the device has nothing to do."""


@dataclass
class Ran:
    """What a rank has seen."""

    content: list[list[Tensor]] = field(default_factory=list)
    """Averages, residual and velocity after each step."""
    phases: list[str] = field(default_factory=list)
    waits: list[dict[str, int]] = field(default_factory=list)
    """Why the host waited in each step."""
    operations: int = 0


def drive(rank: Rank, case: Case, claimed: bool) -> Ran:
    """Steps in three parts, with a factor and a scale."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reference())
        # Small allreduces on a CPU have another order of sums.
        stack.enter_context(mock.patch.object(transport, "_SMALL", 0))
        device = stack.enter_context(Claims()) if claimed else None
        return _steps(rank, case, device)


def _steps(rank: Rank, case: Case, device: Claims | None) -> Ran:
    ran, where = Ran(), "cpu" if device is None else "cuda"
    reduction = oktopk.SparseAllreduce(
        case.algorithm(), NUMEL, rank.group, dtype=case.dtype, device=where, momentum=case.momentum
    )
    assert reduction.residual.device.type == where
    for step in range(STEPS):
        gradient = PATTERNS[case.pattern](rank.rank, rank.size, NUMEL, step).to(case.dtype)
        vector = gradient if device is None else device.take(gradient)
        parts = vector.split(PARTS)
        before = None if device is None else device.waits.copy()
        attempt = reduction.attempt(parts, parts, factor=0.5, scale=2.0, point=step)
        assert attempt.finite
        reduction.commit(attempt)
        if device is not None and before is not None:
            ran.waits.append(dict(device.waits - before))
            ran.operations = device.operations.total()
        assert reduction.last is not None
        ran.phases.append(reduction.last.phase)
        kept = (vector, reduction.residual, reduction.velocity)
        ran.content.append([tensor.cpu().clone() for tensor in kept])
    return ran


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(whole), other.view(whole))


def _means(ran: Sequence[Ran], phase: str) -> dict[str, float]:
    """Means over ranks and steps of one kind: how often the host waits in a step, and why."""
    steps = [
        waits
        for rank in ran
        for waits, its in zip(rank.waits, rank.phases, strict=True)
        if its == phase
    ]
    reasons = sorted({reason for waits in steps for reason in waits})
    means = {why: sum(waits.get(why, 0) for waits in steps) / len(steps) for why in reasons}
    return {"all": sum(means.values())} | means


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_gives_on_a_claimed_gpu_the_bits_of_a_cpu(
    ranks: Ranks, name: str, size: int
) -> None:
    case = CASES[name]
    expected: list[Ran] = ranks.run(size, drive, case, False)
    found: list[Ran] = ranks.run(size, drive, case, True)
    for rank, (cpu, gpu) in enumerate(zip(expected, found, strict=True)):
        assert cpu.phases == gpu.phases
        assert gpu.phases[WARM_UP:] == ["dense" if case.name == "dense" else "sparse"] * (
            STEPS - WARM_UP
        )
        assert gpu.operations > 100
        for step, (mine, theirs) in enumerate(zip(cpu.content, gpu.content, strict=True)):
            names = ("averages", "residual", "velocity")
            for what, a, b in zip(names, mine, theirs, strict=True):
                assert same_bits(a, b), f"{what} of rank {rank} after step {step}"
    table = {phase: _means(found, phase) for phase in dict.fromkeys(found[0].phases)}
    print(f"{name}, {size} ranks: {table}")
    for cpu_phase, bound in (("dense", 2.0), ("sparse", MOST_WAITS[case.name])):
        assert size == 1 or table.get(cpu_phase, {"all": 0.0})["all"] <= bound, table
    if case.name == "oktopk" and size > 1:
        # After the first sparse step: its one read.
        for waits in [waits for rank in found for waits in rank.waits[WARM_UP + 1 :]]:
            assert waits == {"copy to the CPU": 1} or case.options.get("ramp")


@pytest.mark.parametrize("case", PHASES)
def test_no_phase_of_a_step_puts_a_number_into_an_element(case: str) -> None:
    """`tensor[0] = 1` copies a number to the device, and waits for it. Fake tensors do not see it.
    `tensor[:1] = 1` and `tensor[0].fill_(1)` are kernels."""
    with Claims() as device, reference():
        PHASES[case].run()
        assert device.waits.total() == 0, device.waits


def on_its_own(rank: Rank) -> list[list[Tensor]]:
    """A NaN, a step that is taken back, and a state that is saved and loaded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reference())
        device = stack.enter_context(Claims())
        reduction = oktopk.SparseAllreduce(
            oktopk.OkTopk(density=0.02), 1000, rank.group, device="cuda", momentum=0.9
        )

        def step(number: int) -> None:
            reduction(device.take(PATTERNS["drifting"](rank.rank, 2, 1000, number).float()))

        def state() -> list[Tensor]:
            return [tensor.cpu() for tensor in (reduction.residual, reduction.velocity)]

        for number in range(3):
            step(number)
        seen = [state()]
        bad = torch.full((1000,), 1.0 if rank.rank else float("nan"))
        with pytest.raises(NonFiniteGradientError, match="rank 0"):
            reduction(device.take(bad))
        seen.append(state())
        saved = reduction.state_dict()
        step(3)
        reduction.discard()
        seen.append(state())
        step(4)
        reduction.load_state_dict(saved)
        seen.append(state())
        return seen


def test_errors_and_states_stay_on_the_device(ranks: Ranks) -> None:
    for first, *others in ranks.run(2, on_its_own):
        for state in others:
            assert all(same_bits(a, b) for a, b in zip(first, state, strict=True))


def test_the_benchmark_for_gpus_runs_on_a_cpu() -> None:
    program = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    small = ["--device", "cpu", "--numel", "3000", "5000", "--steps", "2", "--warmup", "1"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(program), *small],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["3,000", "5,000"], done.stdout


# Streams.


@dataclass
class Training:
    """A front end that trains on a stream of its own."""

    algorithm: oktopk.Algorithm
    way: str
    """How it waits: for the reducer, or for its futures."""
    without: str = ""
    """A rule to break: a method of `Stream` that does nothing."""
    momentum: float = 0.0


def train(rank: Rank, training: Training) -> tuple[list[str], int]:
    """Steps of a reducer; the races that there were, and the number of operations."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reference())
        streams = stack.enter_context(Streams())
        thread = worker(rank.own_group)
        thread.run(streams.enter_here)
        try:
            with streams.on(Stream()):
                _train(rank, training, streams, stack)
        finally:
            thread.run(streams.leave_here)
        return streams.races, streams.operations.total()


def _train(rank: Rank, training: Training, streams: Streams, stack: contextlib.ExitStack) -> None:
    sizes = {"a": 1000, "b": 900, "small": 20}
    named = [(name, torch.empty(numel, device=GPU)) for name, numel in sizes.items()]
    reducer = AllReducer(
        named, training.algorithm, rank.own_group, Options(dense_below=100, bucket_mb=0.004)
    )
    if training.without:
        stack.enter_context(mock.patch.object(Stream, training.without))
    for step in range(4):
        futures = []
        gradients = {}
        for name, numel in reversed(sizes.items()):
            values = PATTERNS["drifting"](rank.rank, rank.size, numel, step).float()
            gradients[name] = streams.take(values) * 1.0
            last = name == "a"
            futures.append(reducer.submit({name: gradients[name]}, gradients[name], last))
        if training.way == "reducer":
            reducer.wait()
        else:
            for future in futures:
                future.wait()
        for gradient in gradients.values():
            gradient.mul_(0.1)  # on the stream of the training thread
        if step == 2:
            state = reducer.state_dict()
            state["residual"]["a"].mul_(1.0)
            assert reducer.discard()
    reducer.wait()
    reducer.close()


@pytest.mark.parametrize("way", ["reducer", "futures"])
@pytest.mark.parametrize("name", ["dense", "topka", "oktopk", "oktopk-variable"])
def test_streams_never_race(ranks: Ranks, name: str, way: str) -> None:
    training = Training(oktopk.algorithm(name, density=0.02, warmup_steps=1), way)
    for races, operations in ranks.run(2, train, training):
        assert not races, races
        assert operations > 100


@pytest.mark.parametrize(
    ("without", "way"),
    [("wait_stream", "reducer"), ("wait_event", "reducer"), ("wait_event", "futures")],
)
def test_a_missing_wait_is_a_race(ranks: Ranks, without: str, way: str) -> None:
    training = Training(oktopk.Dense(), way, without)
    for races, _ in ranks.run(2, train, training):
        assert races
