"""The contract that every algorithm keeps, on real ranks.

A new algorithm joins by a row in `ROWS`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from conftest import SIZES
from gradients import PATTERNS
from launch import Warm
from oktopk.kernels import Kernels, numbers
from oktopk.wire import message
from ranks import Rank, Ranks

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
FORMATS = tuple(message.FORMATS)
DENSITIES = (0.001, 0.02, 0.5, 1.0)
LONG = 30
"""Steps in which thresholds settle and follow."""
ROUNDING = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-5}
"""Most that conservation may be off, relative to the sum of magnitudes; bfloat16 gradients are
summed in float32, and what rounding the result costs stays in the residual."""

Steps = list[tuple[dict[str, Any], ...]]
"""For each step, what each rank reported."""


@dataclass(frozen=True)
class Row:
    """What an algorithm promises about counts, in multiples of k."""

    local: tuple[float, float]
    """Entries each rank offers, where it has that many."""
    applied: tuple[float, float] | None
    """Entries applied, where there are that many; None: up to all that were offered."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """To make it with."""


ROWS = {
    "dense": Row(local=(1, 1), applied=(1, 1)),
    "topka": Row(local=(1, 1), applied=None),
    "topka2": Row(local=(1, 1), applied=(1, 1)),
    "topkaopt": Row(local=(0.9, 1), applied=None),
    "topkdsa": Row(local=(1, 1), applied=None),
    "gtopk": Row(local=(1, 1), applied=(1, 1)),
    "gaussiank": Row(local=(0, 4 / 3), applied=None),
    # What finds no room in a message waits, so that a single step may apply few.
    "oktopk": Row(local=(0.9, 1), applied=(0, 1)),
    "oktopk-variable": Row(local=(0.9, 1), applied=(0.9, 1)),
    "auto": Row(local=(0.9, 1), applied=(0, 1), options={"rounds": 1}),
}


@dataclass(frozen=True)
class Case:
    pattern: str
    numel: int
    density: float
    dtype: str
    steps: int
    wire: str

    def __str__(self) -> str:
        return f"{self.pattern}-n{self.numel}-d{self.density}-{self.dtype}-{self.wire}"


def cases(size: int, shift: int, exhaustive: bool) -> Iterator[Case]:
    """All values of all axes for each number of ranks, in rotating combinations."""
    numels = (1, max(1, size - 1), size, 101, 1009, 10007, 100_000)
    if exhaustive:
        for pattern, numel, density, dtype, travels in itertools.product(
            PATTERNS, numels, DENSITIES, DTYPES, FORMATS
        ):
            steps = LONG if pattern == "drifting" and numel > 1000 else 4
            yield Case(pattern, numel, density, dtype, steps, travels)
        return
    one_in = 13 if size < 5 else 19  # many processes take long on few cores
    for j, (pattern, numel) in enumerate(itertools.product(PATTERNS, numels)):
        turn = j + shift + j // len(numels)
        if turn % one_in == 0:
            density = DENSITIES[(turn // one_in + j // len(numels)) % len(DENSITIES)]
            dtype = list(DTYPES)[(turn // one_in + j) % len(DTYPES)]
            travels = FORMATS[(turn // one_in + shift) % len(FORMATS)]
            yield Case(pattern, numel, density, dtype, 4, travels)
    numel, density = numels[4 + shift % 3], (0.5, 0.001, 0.02)[shift // 3 % 3]
    dtype, travels = list(DTYPES)[(shift + shift // 3) % 3], FORMATS[(shift + size) % len(FORMATS)]
    yield Case("drifting", numel, density, dtype, LONG, travels)


def make(name: str, case: Case) -> oktopk.Algorithm:
    options = ROWS[name].options
    return oktopk.algorithm(name, density=case.density, wire=case.wire, **options)


def total(rank: Rank, *values: Tensor) -> list[Tensor]:
    """The sums over ranks, in float64."""
    joined = torch.cat([value.double() for value in values])
    dist.all_reduce(joined, group=rank.group)
    return list(torch.split(joined, [value.numel() for value in values]))


def reload(reduce: oktopk.SparseAllreduce, rank: Rank) -> oktopk.SparseAllreduce:
    """Another reduction with the same state, through a file's bytes."""
    file = io.BytesIO()
    torch.save(reduce.state_dict(), file)
    file.seek(0)
    copy = oktopk.SparseAllreduce(
        reduce.algorithm, reduce.numel, rank.group, dtype=reduce.dtype, device=reduce.device
    )
    copy.load_state_dict(torch.load(file, weights_only=True))
    return copy


def check_sums(
    rank: Rank, case: Case, where: str, owed: Tensor, residual: Tensor, average: Tensor
) -> None:
    """Conservation: over all ranks, residual + average = residual before + gradient."""
    owed, kept, scale = total(rank, owed, residual, owed.abs() + residual.abs())
    tolerance = ROUNDING[case.dtype] * scale
    kept += average.double() * rank.size
    assert bool(((owed - kept).abs() <= tolerance).all()), f"{where}: not conserved"
    if case.density == 1.0:
        if case.dtype == "bfloat16":
            tolerance = 2**-8 * scale
        off = (average.double() * rank.size - owed).abs()
        assert bool((off <= tolerance).all()), f"{where}: density 1 is not the dense average"


def drive(rank: Rank, name: str, case: Case, device: str = "cpu") -> list[dict[str, Any]]:
    """Run the case, check what can be checked on the spot, return what each step reports."""
    algorithm = make(name, case)
    dtype = DTYPES[case.dtype]
    reduce = oktopk.SparseAllreduce(algorithm, case.numel, rank.group, dtype=dtype, device=device)
    copy = None
    history = []
    for step in range(case.steps):
        where = f"{name} {case} P={rank.size} step {step}"
        gradient = PATTERNS[case.pattern](rank.rank, rank.size, case.numel, step).to(device, dtype)
        before = reduce.residual.to(torch.float64, copy=True)
        if step == case.steps // 2:
            copy = reload(reduce, rank)
        average = reduce(gradient)
        assert reduce.last is not None
        assert average.dtype == dtype, where

        if step < 4 or step % 5 == 0:
            check_sums(rank, case, where, before + gradient, reduce.residual, average)
        if copy is not None:
            assert torch.equal(copy(gradient), average), f"{where}: the reloaded copy differs"
            assert torch.equal(copy.residual, reduce.residual), where

        history.append(
            reduce.last.as_dict()
            | {
                "where": where,
                "candidates": int((before + gradient != 0).sum()),
                "bits": hashlib.sha256(average.cpu().view(torch.uint8).numpy().data).hexdigest(),
                "applied": int((average != 0).sum()),
            }
        )
    return history


def check_agreement(steps: Steps) -> None:
    for records in steps:
        assert len({record["bits"] for record in records}) == 1, f"{records[0]['where']}: differ"


def check_counts(row: Row, steps: Steps) -> None:
    for records in steps:
        k, where, applied = (records[0][key] for key in ("target", "where", "selected_global"))
        assert {record["selected_global"] for record in records} == {applied}, where
        assert len({record["global_threshold"] for record in records}) == 1, where
        assert records[0]["applied"] <= applied, where
        for record in records:
            assert record["selected_local"] <= row.local[1] * k, where
            assert record["selected_local"] >= min(row.local[0] * k, record["candidates"]), where
        offered = [record["selected_local"] for record in records]
        if row.applied is None:
            assert applied <= sum(offered), where
        else:
            assert applied <= row.applied[1] * k, where
            # Fewer only where sums cancel to zero, which coarse bfloat16 values sometimes do.
            assert applied >= 0.999 * min(row.applied[0] * k, max(offered)) - 1, where


def check_steady(row: Row, case: Case, steps: Steps) -> None:
    """Near k on average, once thresholds have settled, also where single steps may fall short."""
    late = [records[0] for records in steps[10:]]
    if row.applied is not None and case.steps == LONG and late[0]["target"] >= 100:
        off = [abs(record["selected_global"] / record["target"] - 1) for record in late]
        assert sum(off) / len(off) <= 0.1, f"{steps[0][0]['where']}: {off}"


def check_bytes(name: str, case: Case, size: int, steps: Steps) -> None:
    """The cost table bounds the mean over ranks and steps. Sizes, boundaries and histograms are
    an extra that matters only where k is below some hundreds."""
    sent = [record["bytes_sent"] for records in steps for record in records]
    received = [record["bytes_received"] for records in steps for record in records]
    # Two words are an entry; but whole regions and dense steps send values only.
    word = 4.0 if case.dtype != "float64" else 8 if name in ("dense", "topkdsa", "auto") else 6
    words = make(name, case).words(case.numel, size)
    assert sum(sent) == sum(received)
    assert sum(sent) / len(sent) <= words * word + (3072 + 64 * size) * (size > 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROWS)
def test_contract(ranks: Ranks, exhaustive: bool, name: str, size: int) -> None:
    shift = list(ROWS).index(name) + SIZES.index(size)
    for case in cases(size, shift, exhaustive):
        steps: Steps = list(zip(*ranks.run(size, drive, name, case), strict=True))
        check_agreement(steps)
        check_counts(ROWS[name], steps)
        check_steady(ROWS[name], case, steps)
        check_bytes(name, case, size, steps)


def drive_differently(rank: Rank, name: str, case: Case, how: str) -> list[dict[str, Any]]:
    """Through the reference kernels, as a GPU would, or with the indexes of huge gradients."""
    if how == "reference kernels":
        change = mock.patch.object(oktopk.kernels, "for_type", return_value=Kernels)
    else:
        change = mock.patch.object(numbers, "index_dtype", return_value=torch.int64)
    with change:
        return drive(rank, name, case)


@pytest.mark.parametrize("how", ["reference kernels", "64-bit indexes"])
@pytest.mark.parametrize("name", ROWS)
def test_contract_of_other_code_paths(ranks: Ranks, name: str, how: str) -> None:
    """They give bit for bit the same as the ordinary path."""
    both = [("drifting", "float32"), ("all_equal", "float64")]
    # Long indexes do not depend on the type of values, and loops for both take minutes to compile.
    for pattern, dtype in both[:1] if how == "64-bit indexes" else both:
        turn = list(ROWS).index(name) + len(dtype) + len(how)
        case = Case(pattern, 3001, 0.02, dtype, 8, FORMATS[turn % len(FORMATS)])
        ordinary = ranks.run(3, drive, name, case)
        other = ranks.run(3, drive_differently, name, case, how)
        for before, after in zip(ordinary[0], other[0], strict=True):
            assert before["bits"] == after["bits"]


def test_every_algorithm_has_a_row() -> None:
    assert list(dict.fromkeys(name.split()[0] for name in ROWS)) == oktopk.names()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_contract_on_gpus(warm: Warm, name: str) -> None:
    """The same code on NCCL, one rank for each GPU."""
    size = torch.cuda.device_count()
    pool = Ranks(warm, (size,), backend="nccl")
    try:
        for case in cases(size, list(ROWS).index(name), exhaustive=False):
            steps: Steps = list(zip(*pool.run(size, drive, name, case, "cuda"), strict=True))
            check_agreement(steps)
            check_counts(ROWS[name], steps)
            check_bytes(name, case, size, steps)
    finally:
        pool.stop()
