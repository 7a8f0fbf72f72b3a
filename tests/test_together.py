"""Ranks that do not do the same: all of them say what each is doing, and nobody waits in vain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from launch import Warm
from models import SMALL, attached, logged, loss_of, net, parameters, run, sgd
from ranks import Rank, Ranks
from test_engine import ended

OKTOPK = oktopk.OkTopk(density=0.05)
SOON = 30.0
"""Seconds; the pool's groups have a timeout of 60."""


OF_OTHERS = ("the start of compression", "SparseAllreduce")
"""Calls that are not of the compression that is attached."""


def error_of(call: Callable[[], object]) -> str:
    """What a call raises; that it raises at all is for the test to see."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - began < SOON
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrap(rank: Rank, **options: Any) -> oktopk.DistributedOptimizer:
    model = net()
    return oktopk.DistributedOptimizer(
        sgd(model), model.named_parameters(), OKTOPK, group=rank.own_group, **SMALL, **options
    )


def stray_calls(rank: Rank, folder: str) -> dict[str, list[str]]:
    """Rank 0 makes a call, the others are in a step. What all are told, then and afterwards."""
    told = {}

    def calls(handle: oktopk.Compression) -> dict[str, Callable[[], object]]:
        state = handle.state_dict()
        return {
            "checkpoint.save": lambda: oktopk.checkpoint.save(folder, handle),
            "check_replicas": handle.check_replicas,
            "a change of algorithm": handle.detach,
            "load_state_dict": lambda: handle.load_state_dict(state),
            "the start of compression": lambda: wrap(rank),
            "SparseAllreduce": lambda: oktopk.SparseAllreduce(OKTOPK, 10, rank.own_group),
        }

    for name in calls(attached(rank, OKTOPK)[1]):
        model, handle = attached(rank, OKTOPK)
        run(rank, model, sgd(model), range(3))
        before = handle.state_dict()["residual"]
        first = calls(handle)[name] if rank.rank == 0 else loss_of(model, 3, rank.rank).backward
        told[name] = [error_of(first)]
        if rank.rank > 0 or name not in OF_OTHERS:
            told[name].append(error_of(handle.check_replicas))
        after = handle.state_dict()["residual"]
        assert all(torch.equal(before[key], after[key]) for key in before)
        dist.barrier(group=rank.group)
    wrap(rank).check_replicas()  # the group is as good as new
    return told


def test_a_call_of_one_rank_is_named_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for rank, told in enumerate(ranks.run(3, stray_calls, str(tmp_path))):
        assert len(told) == 6
        for name, (first, *then) in told.items():
            assert first.startswith(f"PeerError: rank {rank} of 3: ranks do not do the same: ")
            assert "rank 0 is in " in first
            assert name in first
            assert "ranks 1, 2 are in training step 3 (backward)" in first
            assert all(again == first for again in then)  # nobody waits for one that has failed


def two_calls(rank: Rank, folder: str) -> list[str]:
    """Each rank in another call; and the same call, of another model or with another argument."""
    first, second, third = (attached(rank, OKTOPK)[1] for _ in range(3))
    wrapped = wrap(rank)
    told = [
        error_of(
            first.check_replicas
            if rank.rank == 0
            else lambda: oktopk.checkpoint.save(folder, first)
        )
    ]
    told.append(error_of((second if rank.rank == 0 else third).check_replicas))
    told.append(error_of(lambda: wrapped.broadcast_parameters(rank.rank)))
    return told


def test_calls_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    for differ, models, sources in ranks.run(2, two_calls, str(tmp_path)):
        assert "rank 0 is in check_replicas; rank 1 is in checkpoint.save." in differ
        assert "all are in check_replicas, but rank " in models
        assert "all are in broadcast_parameters, but rank " in sources


def mistaken(rank: Rank) -> dict[str, str]:
    """Rank 1 makes a mistake that it finds out before it talks to anyone."""
    one = rank.rank == 1
    told = {}

    def attach(**changes: Any) -> None:
        ddp = DDP(net(), process_group=rank.group)
        oktopk.attach(ddp, OKTOPK, **({"group": rank.own_group} | (changes if one else {})))

    def attach_twice() -> None:
        ddp = DDP(net(), process_group=rank.group)
        if one:
            ddp.register_comm_hook(*oktopk.comm_hook(ddp, OKTOPK))
        oktopk.attach(ddp, OKTOPK, group=rank.own_group)

    def wrap_these(change: Callable[[list[Any]], Any], **options: Any) -> None:
        model = net()
        named = list(model.named_parameters())
        oktopk.DistributedOptimizer(
            sgd(model),
            change(named) if one else named,
            OKTOPK,
            group=rank.own_group,
            **(options if one else {}),
        )

    told["there is no option 'fast'"] = error_of(lambda: attach(fast=True))
    told["grad_scaler is 2"] = error_of(lambda: attach(grad_scaler=2))
    told["TypeError: '>' not supported"] = error_of(lambda: attach(bucket_mb="5"))
    told["pass it as group="] = error_of(lambda: attach(group=None))
    told["DDP does not take a hook here"] = error_of(attach_twice)
    told["there is no option 'slow'"] = error_of(lambda: wrap_these(list, slow=True))
    told["both the optimizer and"] = error_of(lambda: wrap_these(list, momentum=0.5))
    told["2 parameters of the optimizer"] = error_of(lambda: wrap_these(lambda named: named[2:]))
    told["not unique"] = error_of(lambda: wrap_these(lambda named: named + named[:1]))
    told["AttributeError: 'int'"] = error_of(lambda: wrap_these(lambda named: [("a", 1)]))
    wrap(rank).check_replicas()
    return told


def test_a_mistake_of_one_rank_is_told_to_all(ranks: Ranks) -> None:
    told = ranks.run(3, mistaken)
    for rank, of_rank in enumerate(told):
        assert len(of_rank) == 10
        for problem, error in of_rank.items():
            kind = problem.split(":")[0] if rank == 1 and "Error:" in problem else "ValueError"
            assert error.startswith(f"{kind}: ")
            assert problem in error
            assert rank == 1 or "rank 1: ERROR " in error


@contextmanager
def impatient() -> Iterator[list[str]]:
    """What is logged, and without patience."""
    with (
        logged() as records,
        mock.patch("oktopk.core.worker.LATE", 0.2),
        mock.patch("oktopk.core.reducer._LATE_STEP", 0.2),
    ):
        yield records


def late(rank: Rank) -> list[str]:
    """Rank 1 comes late, to a call and to a step."""
    model, handle = attached(rank, OKTOPK)
    run(rank, model, sgd(model), range(2))
    with impatient() as records:
        for call in (handle.check_replicas, lambda: loss_of(model, 2, rank.rank).backward()):
            dist.barrier(group=rank.group)
            if rank.rank == 1:
                time.sleep(0.6)
            call()
    return records


def test_a_rank_that_waits_says_what_for(ranks: Ranks) -> None:
    waiting, late_itself = ranks.run(2, late)
    assert late_itself == []
    for record, what in zip(waiting, ("check_replicas", "training step 2 (backward)"), strict=True):
        assert record.startswith(f"rank 0 of 2 has waited for 0 seconds in {what}. All ranks must")


FIRST_GROUP = """
import sys, time
from datetime import timedelta
import torch, oktopk, oktopk.core.worker
import torch.distributed as dist

store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
oktopk.core.worker.LATE = 0.2
model = torch.nn.Linear(100, 100)
began = time.monotonic()
if rank == 1:
    time.sleep(1)
try:
    oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        oktopk.OkTopk(),
        **({"fast": True} if rank else {}),
    )
except ValueError as error:
    print(error)
assert time.monotonic() - began < 30
"""


def test_the_first_group_is_waited_for_and_used(warm: Warm, tmp_path: Path) -> None:
    """Without `group`, the first thing that all do together is to make one."""
    first, second = ended(warm, FIRST_GROUP, tmp_path)
    assert "rank 0 of 2 has waited for 0 seconds in the start of compression" in first.err
    assert "rank 1: ERROR there is no option 'fast'" in first.out, first.err
    assert second.out.startswith("there is no option 'fast'"), second.err


def begun_later(rank: Rank) -> tuple[list[str], int]:
    """Before a hook has begun, rank 0 looks at everything; then all begin, with a call of all."""
    model = DDP(net(), process_group=rank.group)
    handle, hook = oktopk.comm_hook(model, OKTOPK, group=rank.own_group, **SMALL)
    model.register_comm_hook(handle, hook)
    looks: list[Callable[[], object]] = [
        lambda: handle.reducer,
        lambda: handle.algorithm,
        handle.stats,
        handle.state_dict,
        lambda: handle.subscribe(print),
    ]
    told = [error_of(look) for look in looks] if rank.rank == 0 else []
    handle.check_replicas()
    run(rank, model, sgd(model), range(2))
    return told, handle.stats().totals.steps


def test_to_look_is_not_collective(ranks: Ranks) -> None:
    (told, steps), (_, same) = ranks.run(2, begun_later)
    assert steps == same == 2
    assert len(told) == 5
    for error in told:
        assert error.startswith("RuntimeError: compression begins in the first backward: call sta")


def train_two(rank: Rank, at_once: bool) -> list[Tensor]:
    """Two models, each with a group of its own, in two threads or one after the other."""
    groups = (rank.group, rank.own_group)
    pairs = []
    for seed, group in enumerate(groups):
        model = net(seed)
        wrapped = oktopk.DistributedOptimizer(
            sgd(model), model.named_parameters(), OKTOPK, group=group, **SMALL
        )
        pairs.append((model, wrapped))
    calls = [partial(run, rank, model, wrapped, range(10)) for model, wrapped in pairs]
    if at_once:
        with ThreadPoolExecutor() as pool:
            for answer in [pool.submit(call) for call in calls]:
                answer.result()
    else:
        for call in calls:
            call()
    return [parameters(model) for model, _ in pairs]


def test_two_threads_train(ranks: Ranks) -> None:
    alone = ranks.run(2, train_two, False)[0]
    for weights in ranks.run(2, train_two, True):
        assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))


LEAVING = """
import sys, time
from datetime import timedelta
import torch, oktopk
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
layers = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
model = DDP(layers, bucket_cap_mb=0.2)
handle = oktopk.attach(model, oktopk.TopkA(density=0.02), bucket_mb=0.3)

def step():
    model(torch.randn(4, 300)).sum().backward()

def fail(what):
    time.sleep(0.2)
    raise KeyError("no such metric")

for _ in range(3):
    step()
began = time.monotonic()
"""
LEAVES = {
    # What rank 1 does and how it ends, what rank 0 does and is told that it was in.
    "exit": ("sys.exit()", "", "handle.check_replicas()", "check_replicas"),
    "subscriber": (
        "handle.subscribe(fail)\n    step()",
        "KeyError: 'no such metric'",
        "step(), step()",
        "training step 4",
    ),
    # The other rank is exchanging gradients: nothing else may be sent to it.
    "half a step": (
        "layers[0].weight.register_hook(fail)\n"
        "    try:\n"
        "        step()\n"
        "    finally:\n"
        "        oktopk.checkpoint.save('checkpoint', handle)",
        "RuntimeError: checkpoint.save in the middle of a step",
        "step()",
        "training step 3",
    ),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_a_rank_that_leaves_ends_the_others(warm: Warm, leave: str, tmp_path: Path) -> None:
    one, error, other, what = LEAVES[leave]
    script = f"{LEAVING}if rank == 1:\n    {one}\ntry:\n    {other}\n"
    script += "finally:\n    assert time.monotonic() - began < 30\n"
    left, leaver = ended(warm, script, tmp_path)
    assert leaver.code == (1 if error else 0), leaver.err
    assert error in leaver.err
    assert left.code == 1
    assert f"PeerError: rank 0 of 2, in {what}" in left.err
