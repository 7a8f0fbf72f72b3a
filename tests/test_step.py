"""The fast step equals the reference, bit for bit: messages, records, residuals and averages."""

from __future__ import annotations

import cProfile
import math
import pstats
import random
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fleet import Fleet
from oktopk.kernels.cpu.step import CpuStep, _room
from oktopk.kernels.plan import (
    ALL_FINITE,
    CHECKSUM,
    COUNT,
    DAMAGED,
    FLAGS,
    POINT,
    REGIONS,
    WHAT,
)
from oktopk.kernels.reference.codes import mixed
from oktopk.kernels.reference.step import Step
from oktopk.wire.codecs import CODECS, Plain

WIRES = ("plain", "float32", "bfloat16", "float16", "int8", "int4")
STEP_MEMORY = ("send", "_indices", "_sent", "_counts", "reply", "_mine", "_errors", "after")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_same(fast: Tensor, slow: Tensor, what: str) -> None:
    """The same type and bits."""
    assert fast.dtype == slow.dtype, what
    if not torch.equal(fast.contiguous().view(torch.uint8), slow.contiguous().view(torch.uint8)):
        differ = fast.flatten() != slow.flatten()
        pytest.fail(f"{what} differs at {differ.nonzero().flatten().tolist()[:9]}: {fast}, {slow}")


class Pair:
    """The same ranks twice: with fast steps, and with the reference's."""

    def __init__(self, *args: object, **named: object) -> None:
        self.fleets = [Fleet(kind, *args, **named) for kind in (CpuStep, Step)]  # type: ignore[arg-type]

    def compare(self, phase: str) -> None:
        steps, all_vectors = (
            zip(*(getattr(fleet, name) for fleet in self.fleets), strict=True)
            for name in ("steps", "vectors")
        )
        for rank, ((fast, slow), both) in enumerate(zip(steps, all_vectors, strict=True)):
            where = f"of rank {rank} after {phase}"
            for a, b in zip(*(vectors.out for vectors in both), strict=True):
                assert_same(a, b, f"out {where}")
            if not slow.after[ALL_FINITE]:
                # A sum of two NaNs may be either, so only what the reducer reads is the same.
                size = fast.plan.size
                points = slice(REGIONS + 1 + size, REGIONS + 1 + 2 * size)
                for words in ([ALL_FINITE, DAMAGED], points):
                    assert_same(fast.after[words], slow.after[words], f"record {where}")
                continue
            for name in STEP_MEMORY:
                assert_same(getattr(fast, name), getattr(slow, name), f"{name} {where}")
            for name in ("values", "velocity_after"):
                a, b = (getattr(vectors, name) for vectors in both)
                if a is not None:
                    assert_same(a, b, f"{name} {where}")

    def begin(self, gradients: list[Tensor], *how: float | None) -> None:
        for fleet in self.fleets:
            fleet.begin(gradients, *how)  # type: ignore[arg-type]
        self.compare("prepare")

    def combine(self) -> None:
        for fleet in self.fleets:
            fleet.combine()
        self.compare("combine")

    def apply(self) -> None:
        for fleet in self.fleets:
            fleet.apply()
        self.compare("apply")

    def is_kept(self) -> bool:
        """The reducer drops a step with damage or values that are not finite, and its state."""
        records = [step.read() for step in self.fleets[0].steps]
        return all(record.finite and not record.damaged for record in records)

    def run(self, gradients: list[Tensor], *how: float | None) -> None:
        self.begin(gradients, *how)
        self.combine()
        self.apply()


def gradients_of(kind: str, size: int, numel: int, random_: torch.Generator) -> list[Tensor]:
    normal = [torch.randn(numel, generator=random_, dtype=torch.float64) for _ in range(size)]
    if kind == "zeros":
        return [torch.zeros(numel, dtype=torch.float64) for _ in normal]
    if kind == "equal":
        return [torch.full((numel,), -3.0, dtype=torch.float64) for _ in normal]
    if kind == "few":  # many ties, and zeros of both signs
        return [(values * 2).round() / 2 for values in normal]
    if kind == "wide":  # denormal numbers, and those near the largest
        return [(values * 30).sign() * 2.0 ** (values * 40).clamp(-148, 120) for values in normal]
    if kind == "one rank":
        return [normal[0], *[torch.zeros_like(values) for values in normal[1:]]]
    if kind == "not finite":
        for values in normal[1:]:
            values[torch.rand(numel, generator=random_) < 0.05] = random.choice(
                [math.inf, -math.inf, math.nan]
            )
    return normal


KINDS = ("normal", "zeros", "equal", "few", "wide", "one rank", "not finite")


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    size = draw(st.sampled_from((2, 3, 5, 8)))
    numel = draw(st.one_of(st.integers(1, 20), st.integers(1, 700)))
    k = draw(st.one_of(st.integers(1, numel), st.just(numel), st.integers(1, min(numel, 9))))
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    parts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True))
    dtype, gradient = draw(
        st.sampled_from(
            [
                (torch.float32, torch.float32),
                (torch.float32, torch.bfloat16),
                (torch.float32, torch.float16),
                (torch.float64, torch.float64),
            ]
        )
    )
    inner = sorted(draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1)))
    uneven = draw(st.booleans()) and k < numel
    return Pair(
        numel,
        size,
        k,
        parts,
        draw(st.sampled_from(WIRES)),
        dtype,
        gradient,
        draw(st.sampled_from((0.0, 0.9))),
        draw(st.sampled_from((1.0, 1.15, 3.0))),
        [0, *inner, numel] if uneven else [],
    )


@given(
    pairs(),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    st.sampled_from((1.0, 0.3, -2.5)),
    st.sampled_from((1.0, 0.7)),
    st.sampled_from((None, None, 0, 10**9)),
    st.integers(0, 2**32),
)
def test_steps(
    pair: Pair, kinds: list[str], factor: float, scale: float, least: int | None, seed: int
) -> None:
    """Over several steps, with the state that the last one left."""
    generator = torch.Generator().manual_seed(seed)
    for kind in kinds:
        fleet = pair.fleets[0]
        pair.run(gradients_of(kind, fleet.size, fleet.numel, generator), factor, scale, least)
        if not pair.is_kept():
            return


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steady_steps(wire: str, gradient: torch.dtype, momentum: float) -> None:
    """Several chunks of sums, carried thresholds, full messages."""
    pair = Pair(100_003, 3, 2000, (1, 50_001, 50_001), wire, gradient_dtype=gradient,
                momentum=momentum, capacity=1.02)  # fmt: skip
    generator, overflows = torch.Generator().manual_seed(5), []
    for step in range(4):
        gradients = gradients_of("normal", 3, 100_003, generator)
        if step == 3:  # almost all that is large is in one region, which has no room for it
            for one in gradients:
                one[:20_000] *= 10
        pair.run(gradients, 1.0, 1.0)
        overflows.append(sum(each.read().overflow for each in pair.fleets[0].steps))
    assert overflows[-1] > 1000


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_large_vectors(threads: int, gradient: torch.dtype) -> None:
    """Vectors are written past the caches, from any alignment, and by several threads."""
    torch.set_num_threads(threads)
    numel = 1_300_003
    pair = Pair(numel, 2, 5000, (7, 1_250_001, 49_995), "int8", gradient_dtype=gradient,
                momentum=0.5)  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        pair.run(gradients_of("normal", 2, numel, generator), 1.0, 1.0)


def _seal(message: Tensor) -> None:
    words = message.view(torch.int64)
    words[CHECKSUM] = mixed(words).sum()


HARM = ("flip", "flip and seal", "bytes", "head", "count", "flags", "positions", "none")


def _harm(
    message: Tensor, kind: str, values_at: int, positions_at: int, dice: random.Random
) -> None:
    """What a broken or hostile rank may send."""

    def noise(nbytes: int) -> Tensor:
        return torch.tensor([*dice.randbytes(nbytes)], dtype=torch.uint8)

    words = message.view(torch.int64)
    if kind in ("flip", "flip and seal"):
        for _ in range(dice.randint(1, 3)):
            message[dice.randrange(message.numel())] ^= 1 << dice.randrange(8)
    elif kind == "bytes":
        start = dice.choice([values_at, positions_at])
        message[start:] = noise(message.numel() - start)
    elif kind == "head":
        words[dice.choice([WHAT, COUNT, FLAGS, POINT])] = dice.choice(
            [0, -1, 1, 2**63 - 1, -(2**63), dice.randrange(2**62)]
        )
    elif kind == "count":
        words[COUNT] = max(0, int(words[COUNT]) + dice.choice([-1, 1, -2]))
    elif kind == "flags":
        words[FLAGS] = dice.choice([-1, 0, 1, 2, 3, 1 << 8, 3 << 8 | 1, 9 << 8 | 3, -256, -255])
    elif kind == "positions":
        at = dice.randrange(positions_at, message.numel())
        message[at:] = message[at:].flip(0)
    if kind != "flip":
        _seal(message)


@given(
    pairs(),
    st.lists(st.tuples(st.sampled_from(HARM), st.sampled_from(HARM)), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_hostile_messages(pair: Pair, harms: list[tuple[str, str]], seed: int) -> None:
    """Whatever others send: the same record, and nothing is written where it should not be."""
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    for first, second in harms:
        fleet = pair.fleets[0]
        pair.begin(gradients_of("normal", fleet.size, fleet.numel, generator), 1.0)
        _harm_all(pair, "received", first, dice)
        pair.combine()
        _harm_all(pair, "gathered", second, dice)
        pair.apply()
        if not pair.is_kept():
            return


def _harm_all(pair: Pair, name: str, kind: str, dice: random.Random) -> None:
    for fast, slow in zip(*(fleet.steps for fleet in pair.fleets), strict=True):
        rows, plan = getattr(fast, name), fast.plan
        for source in range(plan.size):
            if source != plan.rank and dice.random() < 0.5:
                message = rows[source, : plan.room]
                _harm(message, kind, plan.values_at, plan.positions_at, dice)
        getattr(slow, name).copy_(rows)


def test_a_codec_of_users() -> None:
    """Loops do not know it, so the reference writes and reads its messages."""

    class Halved(Plain):
        name, number = "halved", 100

        def write(self, values: Tensor, room: Tensor) -> Tensor:
            room.view(values.dtype).copy_(values / 2)
            return values

        def read(self, room: Tensor, count: int) -> Tensor:
            return super().read(room, count) * 2

    with mock.patch.dict(CODECS, {"halved": Halved}):
        pair = Pair(500, 3, 50, (200, 300), "halved")
        for _ in range(3):
            pair.run(gradients_of("normal", 3, 500, torch.Generator().manual_seed(5)), 1.0)


def test_vectors_that_loops_do_not_know() -> None:
    """The reference takes gradients of another type, and parts that are not contiguous."""
    pair = Pair(500, 3, 50, (200, 300), "int8", torch.float64, torch.float32)
    generator = torch.Generator().manual_seed(5)
    pair.run(gradients_of("normal", 3, 500, generator), 1.0)
    pair = Pair(500, 3, 50, (200, 300), "int8")
    pair.begin(gradients_of("normal", 3, 500, generator), 1.0)
    for fleet in pair.fleets:
        for step, vectors in zip(fleet.steps, fleet.vectors, strict=True):
            spread = [torch.stack([part, part], 1)[:, 0] for part in vectors.gradient]
            step.prepare(replace(vectors, gradient=spread), 10, 1000)
    pair.compare("prepare")


def test_regions_that_do_not_fit_are_an_error() -> None:
    """Loops do not check where they write, so wrong boundaries must not reach them."""
    for boundaries in ([0, 600, 500], [0, 250, 501], [1, 250, 500], [0, -1, 500], [0, 400, 500]):
        fleet = Fleet(CpuStep, 500, 2, 50, (500,))
        fleet.begin([torch.ones(500)] * 2)
        step = fleet.steps[0]
        step.begin([1, 0, 1, 0, *boundaries])
        with pytest.raises(ValueError, match="regions"):
            step.prepare(fleet.vectors[0], 10, 1000)


@pytest.mark.parametrize("parts", [1, 40])
def test_a_step_is_few_calls(parts: int) -> None:
    """Of Python, as the interpreter holds back the training thread."""
    fleet = Fleet(CpuStep, 40_000, 2, 400, (40_000 // parts,) * parts)
    fleet.run([torch.randn(40_000) for _ in range(2)])
    step, vectors = fleet.steps[0], fleet.vectors[0]
    with cProfile.Profile() as profile:
        step.prepare(vectors, 10, 1000)
        step.combine()
        step.apply(vectors)
    assert pstats.Stats(profile).total_calls <= 40  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_halves(kind: torch.dtype) -> None:
    """All 16-bit numbers are read as torch reads them, and ties between them are rounded so."""
    halves = torch.arange(2**15 - 1).to(torch.int16).view(kind).double()
    halves = halves[halves.isfinite()]
    ties = (halves[1:] + halves[:-1]) / 2
    numel = ties.numel()
    read, write = ([x[:numel], -x[:numel]] for x in (halves, ties))
    pair = Pair(numel, 2, numel, (numel,), "float32", gradient_dtype=kind)
    pair.run(read, 1.0)
    for factor in (1.0, 1 + 2**-20, 1 - 2**-20):
        pair = Pair(numel, 2, numel, (numel,), str(kind).removeprefix("torch."))
        pair.run(write, factor)
        pair = Pair(numel, 2, numel, (numel,), "float32")
        pair.begin(write, factor)
        for fleet in pair.fleets:
            for number, vectors in enumerate(fleet.vectors):
                fleet.vectors[number] = replace(
                    vectors, out=[part.to(kind) for part in vectors.out]
                )
        pair.combine()
        pair.apply()


@pytest.mark.parametrize(("k", "kept"), [(100, True), (5000, False)])
def test_scratch_memory_of_dense_steps_is_not_kept(k: int, kept: bool) -> None:
    fleet = Fleet(CpuStep, 5000, 2, k, (5000,))
    _room.arrays.clear()
    for step in range(2):
        fleet.run([torch.randn(5000, generator=torch.Generator().manual_seed(step))] * 2)
    assert bool(_room.arrays) is kept
