"""The public call: phases, statistics, state, bad input, and ranks that fail."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from gradients import PATTERNS
from oktopk.algorithms.base import Buffers, State, Step
from oktopk.algorithms.exchange import balance
from oktopk.transport import Transport
from oktopk.wire import Entries
from ranks import Rank, Ranks

NAMES = oktopk.names()
NUMEL = 5003


def drifting(rank: Rank, step: int, numel: int = NUMEL) -> Tensor:
    return PATTERNS["drifting"](rank.rank, rank.size, numel, step).float()


# --- alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_works_alone_without_torch_distributed(name: str) -> None:
    reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), numel=NUMEL)
    owed = torch.zeros(NUMEL)
    for step in range(5):
        gradient = PATTERNS["drifting"](0, 1, NUMEL, step).float()
        owed += gradient
        owed -= reduce(gradient)
        torch.testing.assert_close(reduce.residual, owed, rtol=1e-4, atol=1e-4)
    assert reduce.last is not None
    assert reduce.last.bytes_sent == reduce.last.messages == 0
    expected = NUMEL if name == "dense" else 100
    assert reduce.last.selected_global == pytest.approx(expected, rel=0.4)


def test_input_is_not_changed_and_out_may_be_the_input() -> None:
    first, second = (oktopk.SparseAllreduce(oktopk.OkTopk(0.1), numel=1000) for _ in range(2))
    for step in range(4):
        gradient = PATTERNS["outlier"](0, 1, 1000, step).float()
        kept = gradient.clone()
        average = first(gradient)
        assert torch.equal(gradient, kept)
        assert second(gradient, out=gradient) is gradient
        assert torch.equal(average, gradient)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", oktopk.Dense(density=0.1)),
        ("none", oktopk.Dense(density=0.1)),
        ("topkA", oktopk.TopkA(0.1)),
        ("topka", oktopk.TopkA(0.1)),
        ("topka2", oktopk.TopkA(0.1, global_topk=True)),
        ("topkaopt", oktopk.TopkA(0.1, threshold_interval=32)),
        ("topkDSA", oktopk.TopkDSA(0.1)),
        ("topkSA", oktopk.TopkDSA(0.1)),
        ("gtopk", oktopk.GTopk(0.1)),
        ("gaussiank", oktopk.Gaussiank(0.1)),
        ("oktopk", oktopk.OkTopk(0.1)),
    ],
)
def test_algorithms_by_name(name: str, expected: oktopk.Algorithm) -> None:
    assert oktopk.algorithm(name, density=0.1) == expected


def test_unknown_names_and_options_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'okbottomk'.*topkdsa.*oktopk"):
        oktopk.algorithm("okbottomk")
    with pytest.raises(ValueError, match=r"no option 'sigma'.*sigma_scale"):
        oktopk.algorithm("gaussiank", sigma=2.5)


# --- phases and statistics -------------------------------------------------------------------


def warm_up(rank: Rank, name: str) -> list[dict[str, Any]]:
    algorithm = oktopk.algorithm(name, density=0.02, warmup_steps=3)
    reduce = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group)
    records = []
    for step in range(6):
        average = reduce(drifting(rank, step))
        if step < 3:
            assert not reduce.residual.any()
            assert int((average != 0).sum()) > NUMEL / 2
        assert reduce.last is not None
        records.append(reduce.last.as_dict())
    return records


@pytest.mark.parametrize("name", NAMES)
def test_every_step_reports_finite_numbers(ranks: Ranks, name: str) -> None:
    for records in ranks.run(3, warm_up, name):
        assert [record["step"] for record in records] == list(range(6))
        sparse = "dense" if name == "dense" else "sparse"
        assert [record["phase"] for record in records] == ["dense"] * 3 + [sparse] * 3
        for record in records:
            numbers = record.pop("seconds") | record
            numbers.pop("phase")
            assert all(math.isfinite(number) and number >= 0 for number in numbers.values())
            assert numbers["bytes_sent"] > 0
            assert numbers["density"] + numbers["sparsity"] == pytest.approx(1)
            if record["phase"] == "dense":
                assert (numbers["sparsity"], numbers["compression_ratio"]) == (0.0, 1.0)
                assert numbers["selected_global"] == numbers["target"] == NUMEL
                assert numbers["bytes_sent"] == math.ceil(2 * 4 * NUMEL * 2 / 3)
            else:
                assert numbers["target"] == 100
                assert numbers["sparsity"] == 1 - numbers["selected_global"] / NUMEL
                assert numbers["compression_ratio"] == NUMEL / numbers["selected_global"]
                assert numbers["local_threshold"] > 0
                assert numbers["accumulate"] > 0
                assert numbers["apply"] > 0


def count_independently(rank: Rank, name: str) -> None:
    """Count at torch.distributed's own functions, by the rules that transport.py states."""
    reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), NUMEL, rank.group)
    sent = [0, 0]
    others = rank.size - 1

    def counting(function: Callable[..., Any], cost: Callable[..., float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += math.ceil(cost(*args))
            sent[1] += 1
            return function(*args, **kwargs)

        return call

    def batch(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is dist.isend:
                sent[0] += operation.tensor.nbytes
                sent[1] += 1
        return original_batch(operations)

    original_batch = dist.batch_isend_irecv
    all_reduce = counting(dist.all_reduce, lambda t: 2 * t.nbytes * others / rank.size)
    all_to_all = counting(dist.all_to_all_single, lambda _, t: t.nbytes * others / rank.size)
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, "batch_isend_irecv", batch),
    ):
        for step in range(5):
            sent[:] = [0, 0]
            reduce(drifting(rank, step))
            assert reduce.last is not None
            assert sent == [reduce.last.bytes_sent, reduce.last.messages]


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_counted(ranks: Ranks, name: str) -> None:
    ranks.run(4, count_independently, name)


def steady(rank: Rank) -> list[tuple[float, int]]:
    numel = 100_000
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(0.02), numel, rank.group)
    records = []
    for step in range(240):
        reduce(drifting(rank, step, numel))
        assert reduce.last is not None
        records.append((reduce.last.selected_global / reduce.last.target, reduce.last.bytes_sent))
    return records[40:]


def test_count_and_bytes_over_200_drifting_steps(ranks: Ranks) -> None:
    histories = ranks.run(4, steady)
    counts = [count for count, _ in histories[0]]
    assert sum(abs(count - 1) for count in counts) / len(counts) <= 0.1
    assert max(counts) <= 1.5
    mean_bytes = sum(sent for history in histories for _, sent in history[:64]) / (4 * 64)
    assert mean_bytes <= 6 * 2000 * 4 * 3 / 4


# --- types -----------------------------------------------------------------------------------


def sixteen_bits(rank: Rank, name: str, dtype: torch.dtype) -> None:
    reduce = oktopk.SparseAllreduce(
        oktopk.algorithm(name, density=0.1, warmup_steps=1), NUMEL, rank.group, dtype=dtype
    )
    assert reduce.residual.dtype == torch.float32
    for step in range(4):
        gradient = drifting(rank, step).to(dtype)
        owed = reduce.residual.double() + gradient.double()
        average = reduce(gradient)
        assert average.dtype == dtype
        owed -= reduce.residual.double()
        dist.all_reduce(owed, group=rank.group)
        torch.testing.assert_close(average.double() * rank.size, owed, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bit_gradients_lose_nothing(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    ranks.run(3, sixteen_bits, name, dtype)


def overflow(rank: Rank, name: str) -> None:
    """float32 residuals outgrow what float16 can hold, though every gradient fits."""
    reduce = oktopk.SparseAllreduce(
        oktopk.algorithm(name, density=0.1), 10, rank.group, dtype=torch.float16
    )
    gradient = torch.full((10,), 60000.0, dtype=torch.float16)
    applied = torch.zeros(10, dtype=torch.float64)
    for step in range(6):
        applied += reduce(gradient).double() * rank.size
        owed = reduce.residual.double()
        dist.all_reduce(owed, group=rank.group)
        expected = torch.full_like(owed, 60000.0 * rank.size * (step + 1))
        torch.testing.assert_close(applied + owed, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_averages_beyond_float16_wait_in_the_residual(ranks: Ranks, name: str) -> None:
    ranks.run(2, overflow, name)


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
        ({"region_interval": 0}, "region_interval is 0"),
        ({"balance_trigger": 0.5}, "balance_trigger is 0.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oktopk.OkTopk(**options)


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
    inside = Rank(dist.get_rank(group), 2, group)
    counts = []
    for name in NAMES:
        reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), NUMEL, group)
        total = drifting(inside, 0) - reduce(drifting(inside, 0)) - reduce.residual
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
        gradient = drifting(rank, step)
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
            reduce.load_state_dict(reduce.state_dict() | {"step": state["step"]})
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


def sums_overflow(rank: Rank, name: str, in_place: bool) -> str:
    """Finite gradients whose sum is not, or a NaN that the result overwrites."""
    reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.2), 10, rank.group)
    gradient = torch.ones(10)
    gradient[3] = 3e38
    if in_place and rank.rank == 1:
        gradient[3] = math.nan
    with pytest.raises(oktopk.NonFiniteGradientError) as error:
        reduce(gradient, out=gradient if in_place else None)
    assert not reduce.residual.any()
    assert reduce(torch.ones(10)).any()
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_sums_that_overflow(ranks: Ranks, name: str) -> None:
    for message in ranks.run(2, sums_overflow, name, False):
        assert "in a sum over ranks" in message
    for message in ranks.run(2, sums_overflow, name, True):
        assert "gradient of rank 0" not in message


def leaf(rank: Rank) -> None:
    """Gradients and results that require gradients are used as plain memory."""
    for algorithm in (oktopk.Dense(), oktopk.OkTopk(density=0.1)):
        reduce = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group)
        gradient = drifting(rank, 0).requires_grad_(rank.rank == 0)
        assert reduce(gradient, out=gradient) is gradient
        assert int((gradient != 0).sum()) >= 500


def test_tensors_that_require_gradients(ranks: Ranks) -> None:
    ranks.run(2, leaf)


# --- state -----------------------------------------------------------------------------------


def test_state_of_something_else_is_refused() -> None:
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(), numel=10)
    state = reduce.state_dict()
    other = oktopk.SparseAllreduce(oktopk.OkTopk(), numel=11)
    with pytest.raises(ValueError, match=r"10 elements.*11"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a SparseAllreduce"):
        reduce.load_state_dict({"weight": torch.zeros(1)})
    assert all(isinstance(value, Tensor | int | float) for value in state.values())


def take_state(rank: Rank, steps: int) -> dict[str, Any]:
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(), NUMEL, rank.group)
    for step in range(steps):
        reduce(drifting(rank, step))
    return reduce.state_dict()


def continue_with(rank: Rank, states: list[dict[str, Any]]) -> int:
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(), NUMEL, rank.group)
    reduce.load_state_dict(states[rank.rank])
    reduce(drifting(rank, 3))
    assert reduce.last is not None
    return reduce.last.selected_global


def test_boundaries_of_another_number_of_ranks_are_cut_anew(ranks: Ranks) -> None:
    states = ranks.run(4, take_state, 3)
    assert all(90 <= count <= 100 for count in ranks.run(3, continue_with, states))


def load_another_step(rank: Rank, states: list[list[dict[str, Any]]]) -> str:
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(), NUMEL, rank.group)
    with pytest.raises(ValueError, match="ranks disagree: load the state of the same step") as e:
        reduce.load_state_dict(states[rank.rank % 2][rank.rank])
    assert not reduce.residual.any()
    return str(e.value)


def test_states_of_different_steps_are_refused(ranks: Ranks) -> None:
    """A job that dies while its ranks are saving leaves such files."""
    states = [ranks.run(3, take_state, steps) for steps in (3, 4)]
    for message in ranks.run(3, load_another_step, states):
        assert "rank 0: step=3" in message
        assert "rank 1: step=4" in message


# --- pieces ----------------------------------------------------------------------------------


def balanced(rank: Rank, counts: list[int]) -> tuple[Tensor, list[int], int]:
    transport = Transport(rank.group, torch.device("cpu"))
    numel = max(1, sum(counts))
    zeros = torch.zeros(numel)
    buffers = Buffers(numel, zeros.dtype, zeros.device)
    step = Step(zeros, zeros, zeros, 1, State(), transport, buffers)
    start = sum(counts[: rank.rank])
    indices = torch.arange(start, start + counts[rank.rank], dtype=torch.int32)
    mine, after = balance(step, Entries(indices, indices.float()), counts)
    assert torch.equal(mine.indices.float(), mine.values)
    return mine.indices, after, transport.bytes_sent


@pytest.mark.parametrize(
    "counts", [[40, 0, 0, 0], [0, 0, 0, 7], [1, 30, 2, 5], [0, 0, 0, 0], [3, 3, 3, 3]]
)
def test_balance_moves_as_little_as_needed(ranks: Ranks, counts: list[int]) -> None:
    results = ranks.run(4, balanced, counts)
    assert torch.equal(
        torch.cat([indices for indices, _, _ in results]),
        torch.arange(sum(counts), dtype=torch.int32),
    )
    sizes = [len(indices) for indices, _, _ in results]
    assert all(after == sizes for _, after, _ in results)
    assert max(sizes) - min(sizes) <= 1
    assert sum(sent for _, _, sent in results) <= 8 * sum(counts)


def crowd(rank: Rank) -> tuple[int, int]:
    """Three steps with large values everywhere, then one with all of them in one region."""
    numel, k = 20_000, 1000
    reduce = oktopk.SparseAllreduce(oktopk.OkTopk(density=k / numel), numel, rank.group)
    for step in range(3):
        reduce(drifting(rank, step, numel))
    gradient = torch.zeros(numel)
    gradient[:k] = 1e6 + torch.arange(k)
    reduce(gradient)
    assert reduce.last is not None
    return reduce.last.bytes_sent, reduce.last.selected_global


def test_ok_topk_balances_a_crowded_region(ranks: Ranks) -> None:
    """The crowded region's owner hands most of its entries on, instead of sending all to all."""
    sent, applied = zip(*ranks.run(8, crowd), strict=True)
    assert set(applied) == {1000}
    entry = 8
    unbalanced = 7 * 1000 * entry
    assert max(sent) < unbalanced / 2
    assert sum(sent) / 8 <= 6 * 1000 * 4 * 7 / 8 + 3072


def test_gaussiank_does_not_stall_between_two_thresholds() -> None:
    reduce = oktopk.SparseAllreduce(oktopk.Gaussiank(density=0.25), numel=8)
    gradient = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    for _ in range(5):
        assert reduce(gradient).count_nonzero() == 2


@pytest.mark.parametrize("name", NAMES)
def test_leaps_over_the_whole_range_of_float64(name: str) -> None:
    reduce = oktopk.SparseAllreduce(
        oktopk.algorithm(name, density=0.1), numel=10, dtype=torch.float64
    )
    for scale in (1e200, 1e-200, 1e-200, 1e-200, 1e200, 5e-324):
        assert reduce(torch.full((10,), scale, dtype=torch.float64)).any()


# --- ranks that fail -------------------------------------------------------------------------


def lose_a_peer(rank: Rank, name: str, how: str) -> tuple[str, float]:
    reduce = oktopk.SparseAllreduce(oktopk.algorithm(name, density=0.02), NUMEL, rank.group)
    for step in range(3):
        reduce(drifting(rank, step))
    if rank.rank == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(20)
        return "", 0.0
    start = time.monotonic()
    for step in range(3, 6):
        before = reduce.residual.clone()
        try:
            reduce(drifting(rank, step))
        except oktopk.PeerError as error:
            assert torch.equal(reduce.residual, before)
            return str(error), time.monotonic() - start
    raise AssertionError("the lost rank went unnoticed")


@pytest.mark.parametrize(
    ("name", "how"), [("oktopk", "dies"), ("oktopk", "hangs"), ("gtopk", "dies"), ("dense", "dies")]
)
def test_a_lost_peer_is_an_error_within_the_timeout(name: str, how: str) -> None:
    pool = Ranks((3,), timeout=8)
    try:
        outcomes = pool.outcomes(3, lose_a_peer, name, how)
    finally:
        pool.stop()
    for rank in (0, 2):
        result, error = outcomes[rank]
        assert error is None, error
        message, seconds = result
        assert "another rank died or did not answer" in message
        assert seconds < 8 + 3
