"""The contract between front ends and the reducer, with tensors that are no model's parameters."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

import oktopk
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05, warmup_steps=1)
OPTIONS = oktopk.Options(dense_below=64)
HALVES = ((0, 1), (2, 3))
"""Global ranks that hold the same shard."""


def shard_of(rank: Rank) -> int:
    return rank.rank // 2


def sharded(rank: Rank) -> oktopk.AllReducer:
    """Rows of a matrix and a part of a vector, named as a front end for sharded models would."""
    shard = shard_of(rank)
    groups = [dist.new_group(list(half)) for half in HALVES]  # all ranks make all groups
    tensors = {f"weight[{shard}]": torch.empty(30, 40), f"bias[{shard}]": torch.empty(20)}
    name = f"{shard}-of-2"
    return oktopk.AllReducer(tensors.items(), OKTOPK, groups[shard], OPTIONS, shard=name)


def reduce(reducer: oktopk.AllReducer, rank: Rank, step: int) -> dict[str, Tensor]:
    """One step, of which nobody is an optimizer."""
    random = torch.Generator().manual_seed(100 * step + rank.rank)
    shard = shard_of(rank)
    sizes = {f"bias[{shard}]": 20, f"weight[{shard}]": 1200}
    gradients = {name: torch.randn(numel, generator=random) for name, numel in sizes.items()}
    averages = {name: gradient.clone() for name, gradient in gradients.items()}
    reducer.submit(averages, torch.empty(0), last=True)
    reducer.wait()
    return averages


def of_shards(rank: Rank, folder: str) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    reducer = sharded(rank)
    for step in range(4):
        reduce(reducer, rank, step)
    oktopk.checkpoint.save(folder, reducer, shared={"shard": shard_of(rank)}, own=rank.rank)
    expected = [reduce(reducer, rank, step) for step in range(4, 7)]
    again = sharded(rank)
    found = oktopk.checkpoint.load(folder, again)
    assert (found.step, found.own, found.shared) == (4, rank.rank, {"shard": shard_of(rank)})
    for step, averages in enumerate(expected, 4):
        now = reduce(again, rank, step)
        assert all(torch.equal(now[name], averages[name]) for name in averages)
    state = again.state_dict()
    for one in (reducer, again):
        one.close()
    return expected, state


def test_shards_are_averaged_and_saved_by_their_own_ranks(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(4, of_shards, str(tmp_path))
    for half in HALVES:
        (first, state), (second, other) = (results[rank] for rank in half)
        for one, two in zip(first, second, strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)
        assert state["residual"].keys() == other["residual"].keys()
    assert results[0][1]["residual"].keys() != results[2][1]["residual"].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-2", "1-of-2"]


def of_shards_in_one(rank: Rank, folder: str) -> dict[str, Any]:
    """The same with torch.distributed.checkpoint, which all ranks write together."""
    parts = oktopk.checkpoint.DistributedCheckpoint
    reducer = sharded(rank)
    for step in range(4):
        reduce(reducer, rank, step)
    where = {"checkpoint_id": folder, "process_group": rank.group}
    dcp.save({"compression": parts(reducer)}, **where)  # type: ignore[attr-defined]
    residual: dict[str, Any] = reducer.state_dict()["residual"]
    again = sharded(rank)
    dcp.load({"compression": parts(again, folder)}, **where)  # type: ignore[attr-defined]
    for step in range(4, 7):
        expected, now = reduce(reducer, rank, step), reduce(again, rank, step)
        assert all(torch.equal(now[name], expected[name]) for name in expected)
    for one in (reducer, again):
        one.close()
    return residual


def test_shards_share_one_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    residuals = ranks.run(4, of_shards_in_one, str(tmp_path))
    metadata = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for rank, residual in enumerate(residuals):
        key = f"compression.oktopk-{rank // 2}-of-2-rank-{rank % 2}.residual"
        saved = {name for name in metadata if name.startswith(key)}
        assert saved == {f"{key}.{name}" for name in residual}


def test_sums_of_shards_are_conserved(ranks: Ranks) -> None:
    balances = ranks.run(4, conserved)
    for first, second in HALVES:
        total = balances[first] + balances[second]
        torch.testing.assert_close(total, torch.zeros(1200), atol=1e-4, rtol=0)


def conserved(rank: Rank) -> Tensor:
    """What this rank put in, less what it kept and what was applied in its name."""
    reducer, shard = sharded(rank), shard_of(rank)
    balance = torch.zeros(1200)
    for step in range(5):
        random = torch.Generator().manual_seed(100 * step + rank.rank)
        torch.randn(20, generator=random)
        balance += torch.randn(1200, generator=random)
        balance -= reduce(reducer, rank, step)[f"weight[{shard}]"]
    balance -= reducer.state_dict()["residual"][f"weight[{shard}]"].flatten()
    reducer.close()
    return balance


def test_optimizers_do_not_take_other_tensors_for_their_gradients() -> None:
    """Whoever averages something else than gradients does not opt in to second moments."""
    weight = torch.nn.Parameter(torch.zeros(30, 40))
    optimizer = oktopk.AdamW([weight], lr=0.1)
    reducer = oktopk.AllReducer([("weight", weight)], oktopk.OkTopk(0.01), options=OPTIONS)
    twin = torch.nn.Parameter(torch.zeros(30, 40))
    torchs = torch.optim.AdamW([twin], lr=0.1)
    for _ in range(4):
        weight.grad = twin.grad = torch.randn(30, 40)
        reducer.submit({"weight": torch.randn(1200)}, torch.empty(0), last=True)
        reducer.wait()
        optimizer.step()
        torchs.step()
    assert reducer.moments is None
    assert torch.equal(weight, twin)
    reducer.close()


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".", " ", 0, 1])
def test_a_shard_names_a_folder(name: Any) -> None:
    with pytest.raises(ValueError, match="shard is"):
        oktopk.AllReducer([("w", torch.zeros(9))], OKTOPK, shard=name)


def test_a_gradient_of_another_size_is_refused() -> None:
    for numel in (1199, 1201):
        reducer = oktopk.AllReducer([("w", torch.zeros(30, 40))], OKTOPK, options=OPTIONS)
        reducer.submit({"w": torch.ones(numel)}, torch.empty(0), last=True)
        with pytest.raises(
            ValueError, match=rf"\({numel},\), but must be flat, with 1200 elements"
        ):
            reducer.wait()
        reducer.close()


def test_a_gradient_must_be_flat() -> None:
    reducer = oktopk.AllReducer([("w", torch.zeros(30, 40))], OKTOPK, options=OPTIONS)
    reducer.submit({"w": torch.ones(30, 40)}, torch.empty(0), last=True)
    with pytest.raises(ValueError, match=r"w has the shape \(30, 40\), but must be flat"):
        reducer.wait()
    reducer.close()


def test_names_must_be_unique() -> None:
    tensors = [("w", torch.zeros(30, 40)), ("v", torch.zeros(9)), ("w", torch.zeros(5))]
    with pytest.raises(ValueError, match="2 tensors have the name w"):
        oktopk.AllReducer(tensors, OKTOPK, options=OPTIONS)


def one_by_one(rank: Rank, mistaken: tuple[int, ...], forget: bool) -> list[Tensor]:
    """Averages of several steps. Some ranks submit a tensor twice, after its bucket is reduced."""
    tensors = {"first": torch.empty(30, 40), "last": torch.empty(40, 50)}
    options = oktopk.Options(dense_below=64, bucket_mb=0.001)
    reducer = oktopk.AllReducer(tensors.items(), OKTOPK, rank.own_group, options)
    assert len(reducer.buckets) == 2
    results = []
    for step in range(4):
        random = torch.Generator().manual_seed(100 * step + rank.rank)
        last, first = (torch.randn(numel, generator=random) for numel in (2000, 1200))
        if rank.rank in mistaken:
            reducer.submit({"last": last.clone()}, torch.empty(0), last=False)
            again = {"last": torch.full((2000,), 1e6), "first": torch.full((1200,), 1e6)}
            with pytest.raises(ValueError, match="last was submitted before in this step"):
                reducer.submit(again, torch.empty(0), last=True)
            if forget:
                reducer.forget()
        if rank.rank not in mistaken or forget:
            reducer.submit({"last": last}, torch.empty(0), last=False)
        reducer.submit({"first": first}, torch.empty(0), last=True)
        reducer.wait()
        results += [first]
    results += reducer.state_dict()["residual"].values()
    reducer.close()
    return results


def test_a_tensor_that_comes_twice_is_refused_and_nothing_is_lost(ranks: Ranks) -> None:
    expected = ranks.run(2, one_by_one, (), False)
    for mistaken, forget in (((0, 1), False), ((1,), False), ((0, 1), True)):
        for found, want in zip(ranks.run(2, one_by_one, mistaken, forget), expected, strict=True):
            assert all(map(torch.equal, found, want))


def test_a_dropped_reducer_is_freed_at_once() -> None:
    """Not by the next garbage collection: it holds memory of several times the model's size."""
    net = torch.nn.Linear(64, 64)
    optimizer = oktopk.DistributedOptimizer(
        oktopk.AdamW(net.parameters()), net.named_parameters(), OKTOPK, dense_below=64
    )
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    dropped = weakref.ref(optimizer.reducer)
    gc.disable()
    try:
        del optimizer
        deadline = time.monotonic() + 10
        while dropped() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the communication thread may hold its last task for a moment
        assert dropped() is None
    finally:
        gc.enable()
