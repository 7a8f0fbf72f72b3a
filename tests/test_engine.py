"""The communication thread: order, exceptions, and an end that never hangs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import oktopk
from gradients import PATTERNS
from launch import Warm
from models import SMALL, attached, batch, loss_of, net, parameters, run, sgd
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)


def in_parts(rank: Rank, name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The average of a vector, whole and handed over in parts, bitwise the same."""
    sizes = [700, 1, 1299, 4000]
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=1)
    numel = sum(sizes)
    whole = oktopk.SparseAllreduce(algorithm, numel, rank.group, dtype=dtype)
    split = oktopk.SparseAllreduce(algorithm, numel, rank.group, dtype=dtype)
    seen = []
    for step in range(6):
        gradient = PATTERNS["drifting"](rank.rank, rank.size, numel, step).to(dtype)
        average = whole(gradient)
        parts = list(gradient.clone().split(sizes))
        split.commit(split.attempt(parts, parts))
        assert torch.equal(whole.residual, split.residual)
        seen.append((average, torch.cat(parts)))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", oktopk.names())
def test_parts_are_one_vector(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    for outcome in ranks.run(3, in_parts, name, dtype):
        for whole, split in outcome:
            assert torch.equal(whole, split)


def uncommitted(rank: Rank, name: str) -> bool:
    """A step that is begun but not committed leaves no trace."""
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=1)
    reduce = oktopk.SparseAllreduce(algorithm, 1000, rank.group, momentum=0.5)
    same = True
    for step in range(5):
        gradient = PATTERNS["drifting"](rank.rank, rank.size, 1000, step).float()
        before = reduce.state_dict()
        reduce.attempt([gradient.clone()], [gradient.clone()])
        after = reduce.state_dict()
        for name in ("residual", "velocity"):
            same &= torch.equal(before.pop(name), after.pop(name))
        same &= before == after
        reduce(gradient)
    return same


@pytest.mark.parametrize("name", oktopk.names())
def test_a_step_that_is_not_committed_leaves_no_trace(ranks: Ranks, name: str) -> None:
    assert ranks.run(3, uncommitted, name) == [True] * 3


def broken_subscriber(rank: Rank) -> tuple[str, str]:
    model, handle = attached(rank, OKTOPK)

    def fail(stats: oktopk.StepStats) -> None:
        raise KeyError("no such metric")

    handle.subscribe(fail)
    errors = []
    for step in range(2):
        with pytest.raises(KeyError) as info:
            loss_of(model, step, rank.rank).backward()
        errors.append(repr(info.value))
    return errors[0], errors[1]


def test_an_exception_of_the_thread_reaches_the_training_thread(ranks: Ranks) -> None:
    for first, second in ranks.run(2, broken_subscriber):
        assert first == "KeyError('no such metric')"
        assert second == first  # what is broken stays broken


def curious(rank: Rank) -> tuple[int, list[int]]:
    """A subscriber that looks at everything, and changes the density, as schedules do."""
    model, handle = attached(rank, OKTOPK, scope="model", dense_below=0)
    counts: list[int] = []

    def adapt(stats: oktopk.StepStats) -> None:
        assert handle.stats().totals.steps == stats.step + 1
        assert handle.state_dict()["step"] == stats.step + 1
        counts.append(stats.selected_global)
        handle.set_algorithm(oktopk.OkTopk(density=0.1 / (stats.step + 2)))

    handle.subscribe(adapt)
    run(rank, model, sgd(model), range(4))
    handle.check_replicas()
    return parameters(model).numel(), counts


def test_subscribers_may_look_and_change(ranks: Ranks) -> None:
    for numel, counts in ranks.run(2, curious):
        densities = [0.05, 0.05, 0.1 / 3, 0.025]
        for count, density in zip(counts, densities, strict=True):
            assert 0.9 * density * numel <= count <= density * numel + 1


def crossed(rank: Rank, algorithm: oktopk.Algorithm) -> None:
    """Two models, reduced in another order on one rank."""
    models = [attached(rank, algorithm, net(seed))[0] for seed in range(2)]
    for model in models if rank.rank != 1 else reversed(models):
        loss_of(model, 0, rank.rank).backward()


@pytest.mark.parametrize("algorithm", [OKTOPK, oktopk.Dense(), oktopk.GTopk()], ids=str)
def test_another_order_on_one_rank_is_an_error(ranks: Ranks, algorithm: oktopk.Algorithm) -> None:
    for _, error in ranks.outcomes(3, crossed, algorithm):
        assert error is not None
        assert "PeerError" in error
        assert "another point of the program" in error


def freed(rank: Rank, how: str) -> tuple[bool, int]:
    """Whether a model is gone when nobody holds it, and how many threads are left over."""
    threads = threading.active_count()
    model: Any
    optimizer: Any
    handle: Any
    if how == "attach":
        model, handle = attached(rank, OKTOPK)
        optimizer = sgd(model)
    else:
        model = net()
        optimizer = handle = oktopk.DistributedOptimizer(
            sgd(model), model.named_parameters(), OKTOPK, group=rank.own_group, **SMALL
        )
    run(rank, model, optimizer, range(3))
    parameter = weakref.ref(next(model.parameters()))
    del model, handle, optimizer
    gc.collect()
    torch.distributed.barrier(group=rank.group)
    time.sleep(0.2)
    return parameter() is None, threading.active_count() - threads


@pytest.mark.parametrize("how", ["attach", "wrapper"])
def test_nothing_outlives_the_model(ranks: Ranks, how: str) -> None:
    for gone, threads in ranks.run(2, freed, how):
        assert gone
        assert threads <= 0


def two_models(rank: Rank) -> list[Tensor]:
    """Two models and an allreduce of the user's own, all at once."""
    models = [attached(rank, OKTOPK, net(seed)) for seed in range(2)]
    optimizers = [sgd(model) for model, _ in models]
    for step in range(6):
        for (model, _), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank.rank)
            loss.backward()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, group=rank.group)
            optimizer.step()
    for _, handle in models:
        handle.check_replicas()
    return [parameters(model) for model, _ in models]


def one_model(rank: Rank, seed: int) -> Tensor:
    model, _ = attached(rank, OKTOPK, net(seed))
    run(rank, model, sgd(model), range(6))
    return parameters(model)


def test_two_models_in_one_process(ranks: Ranks) -> None:
    together = ranks.run(3, two_models)
    for seed in range(2):
        alone = ranks.run(3, one_model, seed)[0]
        assert all(torch.equal(alone, weights[seed]) for weights in together)


SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, oktopk
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=5)
)
model = DDP(torch.nn.Linear(300, 300))
handle = oktopk.attach(model, oktopk.OkTopk(density=0.02))
for step in range(3):
    model(torch.randn(4, 300)).sum().backward()
print("trained", flush=True)
"""
ENDINGS = {
    "at once": ("", 0),
    "destroyed": ("dist.destroy_process_group()", 0),
    "exit code": ("sys.exit(7)", 7),
    "exception": ("raise ValueError('mine')", 1),
    # A bucket is under way for which the other rank never comes.
    "half a step": (
        "if rank == 0:\n"
        "    handle.reducer.submit({'weight': torch.ones(90_000)}, torch.ones(1), False)\n"
        "    time.sleep(0.2)",
        0,
    ),
    # The same, and the other rank goes while this one's interpreter comes to its end.
    "half a step, abandoned": (
        "from oktopk.core import worker\n"
        "worker._PATIENCE = 0.3\n"
        "if rank == 0:\n"
        "    handle.reducer.submit({'weight': torch.ones(90_000)}, torch.ones(1), False)\n"
        "else:\n"
        "    time.sleep(0.6)\n"
        "    os._exit(0)",
        0,
    ),
}


class Ended(NamedTuple):
    """A process that has ended."""

    code: int | None
    out: str
    err: str


def ended(warm: Warm, script: str, folder: Path, size: int = 2) -> list[Ended]:
    """Ranks as separate processes, met through a file, so that each one's end can be seen."""
    path, store = folder / "script.py", f"file://{folder}/store"
    path.write_text(script)
    files = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(size)]
    children = [
        warm.start(path, store, rank, size, out=out, err=err)
        for rank, (out, err) in enumerate(files)
    ]
    codes = [warm.wait(child, timeout=60)[0] for child in children]
    return [
        Ended(code, out.read_text(), err.read_text())
        for code, (out, err) in zip(codes, files, strict=True)
    ]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_cleanly(warm: Warm, ending: str, tmp_path: Path) -> None:
    code, expected = ENDINGS[ending]
    for process in ended(warm, SCRIPT + code, tmp_path):
        assert process.code == expected, process.err
        assert "trained" in process.out
        assert "Fatal" not in process.err
        assert "terminate called" not in process.err


DYING = (
    SCRIPT
    + """
if rank == 1:
    os._exit(3)
begun = time.monotonic()
try:
    model(torch.randn(4, 300)).sum().backward()
except oktopk.PeerError as error:
    assert error.__cause__ is not None
    print("PeerError", flush=True)
try:
    model(torch.randn(4, 300)).sum().backward()
except oktopk.PeerError:
    print("again", flush=True)
assert time.monotonic() - begun < 30
"""
)


def test_a_lost_rank_is_an_error_from_backward(warm: Warm, tmp_path: Path) -> None:
    survivor, lost = ended(warm, DYING, tmp_path)
    assert "PeerError" in survivor.out, survivor.err
    assert "again" in survivor.out, survivor.err
    assert survivor.code == 0, survivor.err
    assert lost.code == 3


def long_run(rank: Rank, folder: str, stop_at: int) -> tuple[Tensor, Any]:
    """100 steps over rebuild, accumulation, overflow and resume."""
    random = torch.Generator().manual_seed(0)
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)

    def begin() -> Any:
        algorithm = oktopk.OkTopk(density=0.05, warmup_steps=10, ramp=(0.25,), ramp_steps=10)
        model, handle = attached(rank, algorithm, grad_scaler=scaler)
        return model, handle, sgd(model)

    model, handle, optimizer = begin()
    for step in range(100):
        optimizer.zero_grad()
        if step % 3 == 0:
            with model.no_sync(), torch.autocast("cpu", dtype=torch.float16):
                scaler.scale(loss_of(model, 1000 + step, rank.rank)).backward()
        overflow = int(torch.randint(0, 30, (), generator=random))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step, rank.rank)
        if overflow == rank.rank:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 20 == 0:
            handle.check_replicas()
        if step == stop_at:
            shared = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            oktopk.checkpoint.save(folder, handle, shared=shared)
            model, handle, optimizer = begin()
            shared = oktopk.checkpoint.load(folder, handle).shared
            model.module.load_state_dict(shared["model"])
            optimizer.load_state_dict(shared["optimizer"])
            scaler.load_state_dict(shared["scaler"])
    handle.check_replicas()
    return parameters(model), handle.stats().totals


def test_replicas_stay_equal_through_everything(ranks: Ranks, tmp_path: Path) -> None:
    kept = ranks.run(3, long_run, str(tmp_path), -1)
    again = ranks.run(3, long_run, str(tmp_path), 49)
    for weights, totals in kept:
        assert torch.equal(weights, kept[0][0])
        assert bool(weights.isfinite().all())
        assert totals.skipped_steps >= 5
    for weights, _ in again:
        assert torch.equal(weights, kept[0][0])


@pytest.mark.gpu
def test_on_gpus(warm: Warm) -> None:
    pool = Ranks(warm, (2,), backend="nccl")
    try:
        for weights in pool.run(2, on_gpu, OKTOPK):
            assert bool(weights.isfinite().all())
        dense = pool.run(2, on_gpu, oktopk.Dense())
        torch.testing.assert_close(dense[0], pool.run(2, on_gpu, None)[0])
    finally:
        pool.stop()


def on_gpu(rank: Rank, algorithm: oktopk.Algorithm | None) -> Tensor:
    torch.cuda.set_device(rank.rank)
    model = torch.nn.parallel.DistributedDataParallel(net().cuda(), process_group=rank.group)
    if algorithm is not None:
        handle = oktopk.attach(model, algorithm, group=rank.own_group, **SMALL)
    optimizer = sgd(model)
    for step in range(20):
        x, y = (t.cuda() for t in batch(step, rank.rank))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if algorithm is not None:
        handle.check_replicas()
    return parameters(model).cpu()
