"""Bad input and bad luck: a clear error on every rank, nothing lost, nothing hanging."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from gradients import drifting_on
from launch import Warm
from ranks import Rank, Ranks

NAMES = oktopk.names()
NUMEL = 5003


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0, -0.1, 1.1, float("nan"), "2 %", None])
def test_bad_density(density: Any) -> None:
    with pytest.raises(ValueError, match=r"density is .*above 0 and at most 1"):
        oktopk.OkTopk(density=density)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": 1.5}, "warmup_steps is 1.5"),
        ({"threshold_interval": 0}, "threshold_interval is 0"),
        ({"capacity": None}, "capacity is None.*OkTopkVariable"),
        ({"capacity": 0.5}, "capacity is 0.5"),
        ({"capacity": float("inf")}, "capacity is inf"),
        ({"capacity": "much"}, "capacity is 'much'"),
        ({"wire": "int5"}, "wire is 'int5', but must be one of plain, float32"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oktopk.OkTopk(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region_interval": 0}, "region_interval is 0"),
        ({"balance_trigger": 0.5}, "balance_trigger is 0.5"),
    ],
)
def test_bad_options_of_variable_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oktopk.OkTopkVariable(**options)


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_bad_sigma_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="sigma_scale"):
        oktopk.Gaussiank(sigma_scale=scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "oktopk"}, "must be an algorithm such as"),
        ({"numel": 0}, "numel is 0"),
        ({"numel": 2.0}, "numel is 2.0"),
        ({"dtype": torch.int32}, "dtype is torch.int32"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"algorithm": oktopk.OkTopk(), "numel": 10}
    with pytest.raises(ValueError, match=message):
        oktopk.SparseAllreduce(**(defaults | arguments))


@pytest.mark.parametrize(
    ("gradient", "fix"),
    [
        (torch.zeros(11), r"has shape \(11,\).* 10 elements"),
        (torch.zeros(5, 2), r"gradient\.flatten\(\)"),
        (torch.zeros(10, dtype=torch.float64), r"dtype=torch\.float64"),
        (torch.zeros(10, device="meta"), r"\.to\(\"cpu\"\)"),
        (torch.zeros(20)[::2], r"gradient\.contiguous\(\)"),
    ],
)
def test_bad_gradient_says_how_to_fix_it(gradient: Tensor, fix: str) -> None:
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(), numel=10)
    with pytest.raises(ValueError, match=fix):
        reduce(gradient)
    with pytest.raises(ValueError, match=r"^out "):
        reduce(torch.zeros(10), out=gradient)
    assert reduce.last is None
    assert reduce(torch.ones(10)).count_nonzero() == 1


def test_forgotten_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="init_process_group"):
        oktopk.SparseAllreduce(oktopk.OkTopk(), numel=10)


def disagree(rank: Rank, different: dict[str, Any]) -> str:
    arguments: dict[str, Any] = {
        "algorithm": oktopk.OkTopk(),
        "numel": 100,
        "group": rank.group,
    }
    if rank.rank == 1:
        arguments |= different
    with pytest.raises(ValueError, match="ranks disagree") as error:
        oktopk.SparseAllreduce(**arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("different", "named"),
    [
        ({"numel": 101}, "numel=101"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"algorithm": oktopk.OkTopk(density=0.03)}, "density=0.03"),
        ({"algorithm": oktopk.GTopk()}, "GTopk"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
    ],
)
def test_ranks_that_disagree_all_say_so(
    ranks: Ranks, different: dict[str, Any], named: str
) -> None:
    for message in ranks.run(3, disagree, different):
        assert any("rank 1: " in line and named in line for line in message.splitlines())


def one_bad_argument(rank: Rank) -> str:
    with pytest.raises(ValueError, match="numel is 0") as error:
        oktopk.SparseAllreduce(oktopk.OkTopk(), 0 if rank.rank == 1 else 10, rank.group)
    return str(error.value)


def test_one_rank_with_a_bad_argument_stops_all(ranks: Ranks) -> None:
    messages = ranks.run(3, one_bad_argument)
    assert messages[0] == messages[2]
    assert "rank 1: ERROR numel is 0" in messages[0]


def subgroup(rank: Rank) -> list[int] | None:
    """A group whose ranks are not the global ones, and a process that is not in it."""
    group = rank.odd_group
    if rank.rank not in (1, 3):
        with pytest.raises(ValueError, match="not a member of `group`"):
            oktopk.SparseAllreduce(oktopk.OkTopk(), NUMEL, group)
        return None
    inside = Rank(dist.get_rank(group), 2, group, group)
    counts = []
    for name in NAMES:
        reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), NUMEL, group)
        gradient = drifting_on(inside, 0, NUMEL)
        total = gradient - reduce(gradient) - reduce.residual
        dist.all_reduce(total, group=group)
        assert float(total.abs().max()) < 1e-3
        assert reduce.last is not None
        counts.append(reduce.last.selected_global)
    return counts


def test_any_group(ranks: Ranks) -> None:
    outside, first, beyond, second = ranks.run(4, subgroup)
    assert outside is beyond is None
    assert first == second


def nonfinite(rank: Rank, name: str, mode: str, bad: float, warmup_steps: int) -> str:
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=warmup_steps)
    reduce = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group, nonfinite=mode)
    twin = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group, nonfinite=mode)
    said = ""
    for step in range(3):
        gradient = drifting_on(rank, step, NUMEL)
        poisoned = gradient.clone()
        if rank.rank == rank.size - 1:
            poisoned[17] = bad
        before, state = reduce.residual.clone(), reduce.state_dict()
        if mode == "raise":
            with pytest.raises(oktopk.NonFiniteGradientError) as error:
                reduce(poisoned)
            said = str(error.value)
            assert reduce.state_dict()["step"] == state["step"]
        else:
            assert not reduce(poisoned).any()
            assert reduce.last is not None
            assert reduce.last.skipped
            assert reduce.last.selected_global == 0
            numbers = reduce.last.as_dict()
            assert all(math.isfinite(x) for x in numbers.values() if isinstance(x, float))
        assert torch.equal(reduce.residual, before)
        # Had the bad gradient left any trace, the twin that never saw one would differ.
        assert torch.equal(reduce(gradient), twin(gradient))
        assert torch.equal(reduce.residual, twin.residual)
    return said


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_inf(ranks: Ranks, name: str, mode: str, size: int) -> None:
    for bad, warmup_steps in ((math.nan, 0), (-math.nan, 0), (-math.inf, 1)):
        for said in ranks.run(size, nonfinite, name, mode, bad, warmup_steps):
            if mode == "raise":
                assert f"gradient of rank {size - 1}." in said
                assert 'nonfinite="skip"' in said


def sums_overflow(rank: Rank, algorithm: oktopk.Algorithm, in_place: bool) -> str:
    """Finite gradients whose sum is not, or a NaN that the result overwrites."""
    reduce = oktopk.SparseAllreduce(algorithm, 10, rank.group)
    gradient = torch.ones(10)
    gradient[3] = 3e38
    if in_place and rank.rank == 1:
        gradient[3] = math.nan
    with pytest.raises(oktopk.NonFiniteGradientError) as error:
        reduce(gradient, out=gradient if in_place else None)
    assert not reduce.residual.any()
    assert reduce(torch.ones(10)).any()
    return str(error.value)


@pytest.mark.parametrize("wire", ["plain", "int8"])
@pytest.mark.parametrize("name", [*NAMES, "fixed"])
def test_sums_that_overflow(ranks: Ranks, name: str, wire: str) -> None:
    algorithm: oktopk.Algorithm = oktopk.OkTopk(0.2, capacity=1.5, wire=wire)
    if name != "fixed":
        algorithm = oktopk.algorithm(name, density=0.2, wire=wire)
    for message in ranks.run(2, sums_overflow, algorithm, False):
        assert "in a sum over ranks" in message
    for message in ranks.run(2, sums_overflow, algorithm, True):
        assert "gradient of rank 0" not in message


def leaf(rank: Rank) -> None:
    """Gradients and results that require gradients are used as plain memory."""
    for algorithm in (oktopk.Dense(), oktopk.OkTopk(density=0.1)):
        reduce = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group)
        gradient = drifting_on(rank, 0, NUMEL).requires_grad_(rank.rank == 0)
        assert reduce(gradient, out=gradient) is gradient
        assert int((gradient != 0).sum()) >= 500
        skipping = oktopk.SparseAllreduce(algorithm, 2, rank.group, nonfinite="skip")
        poisoned = torch.tensor([1.0, math.nan], requires_grad=rank.rank == 0)
        assert not skipping(poisoned, out=poisoned).any()


def test_tensors_that_require_gradients(ranks: Ranks) -> None:
    ranks.run(2, leaf)


# --- ranks that fail -------------------------------------------------------------------------


LOST = (("oktopk", "hangs"), ("oktopk", "dies"), ("gtopk", "dies"), ("dense", "dies"))


def lose_a_peer(rank: Rank, timeout: float) -> list[tuple[str, float]]:
    """Rank 1 hangs until the first has noticed, then it dies; each has a group of its own."""
    reductions = []
    for name, _ in LOST:
        group = dist.new_group(timeout=timedelta(seconds=timeout))
        reductions.append(
            oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), NUMEL, group)
        )
        for step in range(3):
            reductions[-1](drifting_on(rank, step, NUMEL))
    if rank.rank == 1:
        time.sleep(timeout + 3)
        os._exit(1)
    return [without_peer(rank, reduce) for reduce in reductions]


def without_peer(rank: Rank, reduce: oktopk.SparseAllreduce) -> tuple[str, float]:
    start = time.monotonic()
    for step in range(3, 6):
        before = reduce.residual.clone()
        try:
            reduce(drifting_on(rank, step, NUMEL))
        except oktopk.PeerError as error:
            assert torch.equal(reduce.residual, before)
            return str(error), time.monotonic() - start
    raise AssertionError("the lost rank went unnoticed")


def test_a_lost_peer_is_an_error_within_the_timeout(warm: Warm) -> None:
    timeout = 6.0
    pool = Ranks(warm, (3,), timeout=30)
    try:
        outcomes = pool.outcomes(3, lose_a_peer, timeout)
    finally:
        pool.stop()
    assert outcomes[1][1] == "the process died"
    for rank in (0, 2):
        results, error = outcomes[rank]
        assert error is None, error
        for how, (message, seconds) in zip(LOST, results, strict=True):
            assert "another rank died or did not answer" in message, how
            assert seconds < timeout + 3, how
        assert results[0][1] > timeout - 1  # it hung, indeed
