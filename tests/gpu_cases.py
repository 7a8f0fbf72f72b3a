"""The phases of Triton kernels against those of the reference, in Triton's interpreter.

`test_gpu_kernels.py` runs this file in a process of its own: the interpreter is chosen when triton
is imported.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from fleet import Fleet
from oktopk.kernels.gpu.loops import choosing
from oktopk.kernels.gpu.rehearsal import rehearse
from oktopk.kernels.gpu.step import GpuStep
from oktopk.kernels.layout import ELIAS_FANO
from oktopk.kernels.plan import COUNT, DAMAGED, FLAGS
from oktopk.kernels.reference.step import Step, _seal

assert isinstance(choosing.scan, interpreter.InterpretedFunction), "see test_gpu_kernels.py"
FEW = 6
EXAMPLES = int(os.environ.get("OKTOPK_GPU_EXAMPLES", FEW))
"""Of each property; more of them take minutes."""
Damage = Callable[[Step, str], None]
WHOLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class SmallStep(GpuStep):
    """Blocks so small that tiny vectors have several."""

    BLOCK, WORDS, CHUNK = 64, 4, 1 << 13


class SmallestStep(GpuStep):
    BLOCK, WORDS = 16, 2


class WideStep(GpuStep):
    BLOCK, WORDS, CHUNK = 1 << 15, 256, 1 << 13


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(WHOLE[tensor.dtype]) if tensor.is_floating_point() else tensor


def same(one: Tensor, other: Tensor, what: str) -> None:
    if one.dtype != other.dtype or not torch.equal(bits(one), bits(other)):
        places = (bits(one) != bits(other)).nonzero().flatten().tolist()[:9]
        pytest.fail(f"{what}: other values at {places}: {one} and {other}")


def plain(values: Tensor) -> Tensor:
    """One zero, as the reference adds zeros to the first element; and one NaN, as a step that has
    any is dropped."""
    return torch.where(values.isnan(), math.nan, values + 0.0)


def entries(step: Step) -> list[Tensor]:
    """What the last phase needs of this rank's own entries."""
    return [step._indices, step._sent, step._counts, step._mine, step._errors]


turns = itertools.count()


class Pair:
    """Two fleets with the same gradients. In the second one a rank runs Triton, in turn: messages
    are the same, so the others may be the reference."""

    def __init__(self, kind: type[GpuStep] = SmallStep, **settings: Any) -> None:
        kinds = [Step] * settings["size"]
        kinds[next(turns) % len(kinds)] = kind
        self.fleets = Fleet(Step, **settings), Fleet(kinds, **settings)

    def run(self, gradients: Sequence[Tensor], damage: Damage | None = None, **how: Any) -> None:
        one, other = self.fleets
        for fleet in self.fleets:
            fleet.begin(gradients, **how)
        for rank, (mine, its) in enumerate(zip(one.steps, other.steps, strict=True)):
            for owner in range(one.size):
                if owner != rank:
                    same(mine.send[owner], its.send[owner], f"{rank} sends to {owner}")
            same(mine.after, its.after, f"record of {rank} after prepare")
            for number in range(2):
                same(entries(mine)[number], entries(its)[number], f"offer of {rank}")
            same(mine._counts[:-1], its._counts[:-1], f"counts of {rank}")
        self._damage(damage, "received")
        for fleet in self.fleets:
            fleet.combine()
        for rank, (mine, its) in enumerate(zip(one.steps, other.steps, strict=True)):
            same(mine.after, its.after, f"record of {rank} after combine")
            for number, (a, b) in enumerate(zip(entries(mine), entries(its), strict=True)):
                same(a, b, f"entries {number} of {rank}")
            same(mine.reply, its.reply, f"reply of {rank}")
        self._damage(damage, "gathered")
        averages = [fleet.apply() for fleet in self.fleets]
        for rank in range(one.size):
            same(one.steps[rank].after, other.steps[rank].after, f"record of {rank}")
            same(averages[0][rank], averages[1][rank], f"averages of {rank}")
            for kept in ("residuals", "velocities"):
                a, b = (plain(getattr(f, kept)[rank]) for f in self.fleets)
                same(a, b, f"{kept} of {rank}")

    def _damage(self, damage: Damage | None, where: str) -> None:
        for step in [step for fleet in self.fleets for step in fleet.steps]:
            if damage is not None:
                damage(step, where)


def gaussian(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3


def patch_once() -> None:
    """The interpreter replaces Triton's functions in each call. Once is enough in this process, and
    it takes half of the time."""
    replace, done = interpreter._patch_lang, interpreter._LangPatchScope()
    modules = set()

    def patch(function: Any) -> Any:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            replace(function)
        return done

    vars(interpreter)["_patch_lang"] = patch


patch_once()


@pytest.mark.parametrize(("kind", "wire"), [(SmallStep, "int4"), (SmallestStep, "int8")])
def test_steps(kind: type[GpuStep], wire: str) -> None:
    """Thresholds are carried from step to step."""
    numel = 400 if kind is SmallStep else 130
    pair = Pair(kind, numel=numel, size=2, k=numel // 12, parts=(numel - 100, 0, 100), wire=wire)
    for step in range(3):
        pair.run([gaussian(numel, 10 * step + rank) for rank in range(2)])


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits(gradient: torch.dtype) -> None:
    pair = Pair(
        numel=500, size=2, k=40, parts=(1, 499), gradient_dtype=gradient, momentum=0.9, wire="int4"
    )
    for step in range(3):
        gradients = [gaussian(500, 10 * step + rank) * 1e-3 for rank in range(2)]
        pair.run(gradients, factor=1 / 3, scale=0.7 if step else 3e8)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_values_that_are_not_finite(bad: float) -> None:
    pair = Pair(numel=300, size=2, k=20, parts=(300,), momentum=0.5)
    gradients = [gaussian(300, rank) for rank in range(2)]
    gradients[1][77] = bad
    pair.run(gradients)
    assert not any(record[0] for record in pair.fleets[1].records())


def test_density_1() -> None:
    pair = Pair(numel=90, size=2, k=90, parts=(50, 40))
    for step in range(2):
        gradients = [gaussian(90, 10 * step + rank) for rank in range(2)]
        gradients[0][:80] = 0
        pair.run(gradients)


@pytest.mark.parametrize(
    ("numel", "k", "low"),
    [(150, 60, -1), (99_000, 12, 12), (600_000, 1, 16)],
)
def test_codes_of_positions(numel: int, k: int, low: int) -> None:
    pair = Pair(WideStep, numel=numel, size=2, k=k, parts=(numel,))
    pair.run([gaussian(numel, rank) for rank in range(2)])
    found = {vars(phases).get("_low_bits") for phases in pair.fleets[1].steps}
    assert found - {None} == {low}


def damages(seed: int, where: str, rank: int) -> Damage:
    """Change some bytes of a message, and sometimes make its checksum right again."""

    def damage(step: Step, now: str) -> None:
        if now != where or step.plan.rank != rank:
            return
        random, plan = torch.Generator().manual_seed(seed), step.plan

        def draw(below: int) -> int:
            return int(torch.randint(below, (1,), generator=random))

        for _ in range(1 + draw(2)):
            message = getattr(step, now)[draw(plan.size), : plan.room]
            words = message.view(torch.int64)
            what = draw(6)
            if what == 0:
                words[COUNT] = (-1, plan.most, plan.most + 1, 1 << 62, -(1 << 63), 0)[draw(6)]
            elif what == 1:
                words[FLAGS] = draw(1 << 12)
            elif what == 2:
                message[plan.positions_at + draw(plan.room - plan.positions_at)] ^= 1 << draw(8)
            elif what == 3:
                message[plan.positions_at :] = draw(256)
            elif what == 4:
                noise = torch.randint(256, (plan.room - 40,), generator=random).to(torch.uint8)
                message[40:] = noise
            else:
                message[draw(plan.room)] ^= 1 << draw(8)
            if draw(3):
                _seal(message, words[4].clone())

    return damage


@pytest.mark.parametrize(("where", "wire"), [("received", "int8"), ("gathered", "int4")])
@settings(max_examples=EXAMPLES // 2, derandomize=EXAMPLES == FEW)
@given(seed=st.integers(0, 1 << 30))
def test_damaged_messages(where: str, wire: str, seed: int) -> None:
    size, numel = 2 + seed % 2, 40 + seed % 300
    pair = Pair(numel=numel, size=size, k=max(1, numel // 8), parts=(numel,), wire=wire)
    gradients = [gaussian(numel, seed + rank) for rank in range(size)]
    if seed % 3 == 0:
        pair.run(gradients)
    pair.run(gradients, damages(seed, where, seed % size))


@pytest.mark.parametrize("where", ["received", "gathered"])
def test_positions_that_repeat(where: str) -> None:
    """Without their low bits, offsets are in order, but some are equal."""

    def damage(step: Step, now: str) -> None:
        message = getattr(step, now)[1, : step.plan.room]
        if now == where and step.plan.rank == 0:
            message[step.plan.positions_at + step.plan.bitmap :] = 0
            _seal(message, 1000)

    pair = Pair(WideStep, numel=500, size=2, k=40, parts=(500,), rider=24)
    pair.run([gaussian(500, 0), gaussian(500, 1)], damage)
    assert pair.fleets[1].steps[0].plan.code >= ELIAS_FANO
    assert pair.fleets[1].records()[0][DAMAGED] == 2


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[Tensor]], dict[str, Any]]:
    size, numel = draw(st.integers(1, 5)), draw(st.integers(1, 200))
    k = draw(st.one_of(st.integers(1, numel), st.just(numel)))
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    parts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True))
    inner = draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1))
    setting: dict[str, Any] = {
        "numel": numel,
        "size": size,
        "k": k,
        "parts": parts,
        "wire": draw(st.sampled_from(["int8", "int4"])),
        "gradient_dtype": draw(st.sampled_from(list(WHOLE))),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "capacity": draw(st.sampled_from([0.5, 1.15])),
        "boundaries": [0, *sorted(inner), numel] if k < numel else [],
    }
    seed, shape = draw(st.integers(0, 1 << 20)), draw(st.sampled_from("gnzez"))

    def gradient(number: int) -> Tensor:
        values = gaussian(numel, seed + number)
        if shape == "e":  # equal magnitudes
            return values.sign()
        if shape == "z":  # mostly zeros
            return torch.where(values.abs() > 1.5, values, 0)
        return values * 1e-42 if shape == "n" else values

    steps = draw(st.integers(1, 2))
    gradients = [[gradient(size * step + rank) for rank in range(size)] for step in range(steps)]
    how = {
        "factor": draw(st.sampled_from([1.0, 0.3])),
        "scale": draw(st.sampled_from([1.0, 0.7, 1e6])),
        "least": draw(st.sampled_from([None, 0, numel + 1])),
    }
    return setting, gradients, how


@settings(max_examples=EXAMPLES, derandomize=EXAMPLES == FEW)
@given(situation=situations())
def test_any_situation(
    situation: tuple[dict[str, Any], list[list[Tensor]], dict[str, Any]],
) -> None:
    setting, gradients, how = situation
    pair = Pair(**setting)
    for step in gradients:
        pair.run(step, **how)


@pytest.mark.parametrize(
    "settings", [{"dtype": torch.float64}, {"wire": "plain"}, {"wire": "float16"}]
)
def test_others_run_on_the_reference(settings: dict[str, Any]) -> None:
    pair = Pair(numel=100, size=2, k=10, parts=(100,), **settings)
    for fleet in pair.fleets:
        fleet.run([gaussian(100, rank) for rank in range(2)])
    assert pair.fleets[0].records() == pair.fleets[1].records()


def test_a_rehearsal_works() -> None:
    rehearse.__wrapped__(torch.device("cpu"))
