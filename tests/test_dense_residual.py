"""A dense result may keep a residual: a dense allreduce of rounded values, with error feedback."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.algorithms import Reduced, State
from oktopk.core.accumulator import Accumulator
from oktopk.core.comm import Comm
from oktopk.wire.message import Entries
from ranks import Rank, Ranks

NUMEL, STEPS = 503, 6


@dataclass(frozen=True)
class Rounded(oktopk.Algorithm[State]):
    """Sum every element, rounded to a few bits; each rank keeps its own rounding errors."""

    def init(self) -> State:
        return State()

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        acc.accumulate(float("inf"))
        # Three significant bits: sums over a few ranks are exact.
        sums = torch.ldexp(torch.frexp(acc.values)[0].mul(8).round().div(8), exponents(acc.values))
        acc.values.sub_(sums)
        comm.transport.all_reduce(sums)
        return Reduced(sums, acc.values, offered=acc.numel), state

    def words(self, numel: int, size: int) -> float:
        return 2 * numel * (size - 1) / size


@dataclass(frozen=True)
class InPlace(Rounded):
    """The same, but the sums take the accumulator's memory, and the residual has its own."""

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        reduced, state = super().reduce(state, acc, comm)
        assert isinstance(reduced.sums, Tensor)
        residual = acc.values.clone()
        return Reduced(acc.values.copy_(reduced.sums), residual, reduced.offered), state


@dataclass(frozen=True)
class Everything(Rounded):
    """All elements as entries, of which nothing is kept."""

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        acc.accumulate(float("inf"))
        sums = acc.values.clone()
        comm.transport.all_reduce(sums)
        indices = torch.arange(acc.numel, dtype=comm.wire.index_dtype)
        return Reduced(Entries(indices, sums), None, offered=acc.numel), state


@dataclass(frozen=True)
class Wrong(Rounded):
    """Returns something that it must not."""

    what: str = "sums"

    def reduce(self, state: State, acc: Accumulator, comm: Comm) -> tuple[Reduced, State]:
        reduced, state = super().reduce(state, acc, comm)
        assert isinstance(reduced.sums, Tensor)
        if self.what == "state":
            return reduced, None  # type: ignore[return-value]
        if self.what == "residual":
            return dataclasses.replace(reduced, residual=acc.values[1:]), state
        return dataclasses.replace(reduced, sums=reduced.sums.double()), state


def exponents(values: Tensor) -> Tensor:
    return torch.frexp(values)[1]


def drive(
    rank: Rank, algorithm: oktopk.Algorithm, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """The averages, and what this rank put in, less what it keeps and what was applied."""
    reduce = oktopk.SparseAllreduce(algorithm, NUMEL, rank.group, dtype=dtype)
    averages, balance = [], torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(10 * step + rank.rank)
        gradient = torch.randn(NUMEL, generator=random).to(dtype)
        averages.append(reduce(gradient).clone())
        balance += gradient.double() - averages[-1].double()
        if step == 3:
            reduce.discard()
            balance -= gradient.double() - averages.pop().double()
    keeps = not isinstance(algorithm, Everything) or dtype == torch.bfloat16
    assert bool(reduce.residual.any()) == keeps
    return averages, balance - reduce.residual.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", [Rounded(), InPlace(), Everything()], ids=repr)
def test_what_a_dense_result_keeps_is_not_lost(
    ranks: Ranks, algorithm: oktopk.Algorithm, dtype: torch.dtype
) -> None:
    results = ranks.run(3, drive, algorithm, dtype)
    for averages, _ in results:
        assert all(map(torch.equal, averages, results[0][0]))
    total = torch.stack([balance for _, balance in results]).sum(0)
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-5, rtol=0)


def with_a_nan(rank: Rank) -> tuple[Tensor, Tensor, bool]:
    reduce = oktopk.SparseAllreduce(Rounded(), NUMEL, rank.group, nonfinite="skip")
    average = reduce(torch.full([NUMEL], float("nan") if rank.rank == 1 else 1.0))
    assert reduce.last is not None
    return average, reduce.residual, reduce.last.skipped


def test_all_ranks_skip_a_dense_result_with_a_nan(ranks: Ranks) -> None:
    for average, residual, skipped in ranks.run(3, with_a_nan):
        assert skipped
        assert not average.any()
        assert not residual.any()


@pytest.mark.parametrize("what", ["sums", "residual", "state"])
def test_a_result_of_the_wrong_type_is_refused(what: str) -> None:
    reduce = oktopk.SparseAllreduce(Wrong(what=what), NUMEL)
    with pytest.raises(TypeError, match=f"Wrong.reduce returned (a )?{what}"):
        reduce(torch.ones(NUMEL))
    assert reduce.steps == 0
    assert not reduce.residual.any()


@dataclass(frozen=True)
class Memory(State):
    steps: int = 0
    scale: float = 1.0
    grown: bool = False


@dataclass(frozen=True)
class Remembering(Rounded):
    def init(self) -> Memory:
        return Memory()


def test_floats_and_flags_of_a_state_are_saved_and_loaded() -> None:
    reduce, again = (oktopk.SparseAllreduce(Remembering(), NUMEL) for _ in range(2))
    state = reduce.state_dict() | {"state": {"steps": 3, "scale": 0.25, "grown": True}}
    again.load_state_dict(state)
    assert again.state_dict()["state"] == state["state"]
    for name, wrong in {"scale": "1", "grown": 1, "steps": 0.5}.items():
        with pytest.raises(ValueError, match=f'state."state"...{name}'):
            again.load_state_dict(state | {"state": state["state"] | {name: wrong}})


def test_whole_numbers_are_checked_however_annotations_are_written() -> None:
    made = dataclasses.make_dataclass("Made", [("interval", int, 3)], bases=(Rounded,), frozen=True)
    assert made(interval=4).interval == 4
    with pytest.raises(ValueError, match="interval is 0, but must be a whole number"):
        made(interval=0)


def names_of_sparse_averages(rank: Rank) -> frozenset[str]:
    options = oktopk.Options(dense_below=1)
    tensors = {"weight": torch.zeros(NUMEL)}
    reducer = oktopk.AllReducer(tensors.items(), Rounded(), rank.own_group, options)
    reducer.submit(tensors, torch.empty(0), last=True)
    reducer.wait()
    reducer.close()
    return reducer.sparse


def test_a_dense_result_is_not_sparse(ranks: Ranks) -> None:
    assert ranks.run(2, names_of_sparse_averages) == [frozenset()] * 2
