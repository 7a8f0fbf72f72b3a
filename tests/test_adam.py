"""Adam and AdamW for sparse gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from models import SMALL, attached, batch, loss_of, net, parameters, run
from oktopk import adam
from oktopk.core.moments import SecondMoments
from oktopk.core.state import redistribute
from oktopk.core.upgrade import upgraded
from oktopk.kernels.reference import optimizer as reference
from old_states import old_model
from ranks import Rank, Ranks

WARMUP, INTERVAL = 4, 3
# Rounded values would make small differences large.
OKTOPK = oktopk.OkTopk(density=0.1, warmup_steps=WARMUP, wire="float32")
BETAS = (0.8, 0.9)
PAIRS: list[tuple[type, type]] = [
    (oktopk.AdamW, torch.optim.AdamW),
    (oktopk.Adam, torch.optim.Adam),
]


def adamw(model: nn.Module, **options: Any) -> oktopk.AdamW:
    options = {"lr": 0.01, "refresh_interval": INTERVAL} | options
    return oktopk.AdamW(model.parameters(), betas=BETAS, **options)


def moments(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])


def warm_up(rank: Rank, ours: type, plain: type, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = []
    for kind in (ours, plain):
        model = DDP(net(), process_group=rank.group)
        if kind is ours:
            model, _ = attached(rank, OKTOPK)
        optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1, **options)
        run(rank, model, optimizer, range(WARMUP))
        found.append(torch.cat([parameters(model), moments(optimizer)]))
    return found[0], found[1]


@pytest.mark.parametrize(("ours", "plain"), PAIRS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True, "maximize": True}])
def test_warm_up_is_torchs_own_bitwise(
    ranks: Ranks, ours: type, plain: type, options: dict[str, Any]
) -> None:
    for mine, theirs in ranks.run(2, warm_up, ours, plain, options):
        assert torch.equal(mine, theirs)


def local_gradients(weights: dict[str, Tensor], step: int, size: int) -> dict[str, list[Tensor]]:
    """What each rank's gradient is, computed on one."""
    model = net()
    model.load_state_dict(weights)
    gradients: dict[str, list[Tensor]] = {name: [] for name in weights}
    for rank in range(size):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            gradients[name].append(p.grad.clone())
    return gradients


def in_slice(numels: dict[str, int], turn: int) -> dict[str, slice]:
    """The elements of each compressed parameter whose turn it is."""
    total, start, found = sum(numels.values()), 0, {}
    begin, end = total * turn // INTERVAL, total * (turn + 1) // INTERVAL
    for name, numel in numels.items():
        found[name] = slice(min(max(begin - start, 0), numel), min(max(end - start, 0), numel))
        start += numel
    return found


def against_reference(rank: Rank, refresh: bool, limit: float) -> int:
    """Every sparse step against the same computed with the gradients of all ranks in one place.

    The second moment follows faster than it usually does, and is raised more often, and gradients
    are scaled down more often, so that a mistake is seen.
    """
    usual = adam._HORIZON_BETA, adam._LARGEST, adam._LARGEST_STEP
    adam._HORIZON_BETA, adam._LARGEST, adam._LARGEST_STEP = 0.0, (2, 5), 0.9
    try:
        return compare(rank, refresh, limit)
    finally:
        adam._HORIZON_BETA, adam._LARGEST, adam._LARGEST_STEP = usual


def compare(rank: Rank, refresh: bool, limit: float) -> int:
    model, handle = attached(rank, OKTOPK)
    optimizer = adamw(model, refresh_interval=INTERVAL if refresh else None)
    energies: list[list[float]] = []

    def train(step: int) -> None:
        """One step; notes how large the probe's average was before and after clipping."""
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        probe = model.module[5].weight.grad
        averaged = probe.double().square().sum().item()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        energies.append([probe.double().square().sum().item(), averaged])
        optimizer.step()

    for step in range(WARMUP):
        train(step)
    named = dict(model.module.named_parameters())
    large = [name for bucket in handle.reducer.buckets[:-1] for name in bucket]
    assert all(named[name].numel() >= 512 for name in large)
    state = {name: optimizer.state[p] for name, p in named.items()}
    mean = {name: state[name]["exp_avg"].double() for name in large}
    square = {
        n: smoothed(state[n]["exp_avg_sq"].double() / (1 - BETAS[1] ** WARMUP)) for n in large
    }
    weights = {name: named[name].detach().double() for name in large}
    sums = {name: torch.zeros_like(square[name]) for name in large}
    since = {name: torch.zeros_like(square[name]) for name in large}
    ratio, raised, sizes = {}, 0, []
    steps = 4 * INTERVAL
    for i in range(steps):
        step = WARMUP + i
        before = {name: p.detach().clone() for name, p in named.items()}
        small = copy.deepcopy(optimizer.state[named["0.bias"]])
        for name, gradients in local_gradients(before, step, rank.size).items():
            if name in large:
                sums[name] += sum(g.double() ** 2 for g in gradients) / rank.size
                since[name] += 1
        train(step)
        applied, averaged = moving(energies[1:])  # from the first optimizer step on
        clipping = applied / averaged
        if refresh and i + 1 == INTERVAL:
            ratio = {n: square[n].sum() / (sums[n] / INTERVAL * clipping).sum() for n in large}
        elif refresh and i >= INTERVAL:
            turns = in_slice({n: named[n].numel() for n in large}, i % INTERVAL)
            for name, here in turns.items():
                s, t, v = (x.view(-1)[here] for x in (sums[name], since[name], square[name]))
                v += (1 - BETAS[1] ** t) * (ratio[name] * clipping * s / t - v)
                s.zero_()
                t.zero_()
        for name in large:
            gradient = named[name].grad
            assert gradient is not None
            assert 0 < gradient.count_nonzero() < gradient.numel()
            least = (gradient.double() / min(max(step, 2), 5)) ** 2
            raised += int((least > square[name]).sum())
            square[name] = torch.maximum(square[name], least)
            sizes.append(float((gradient.double() ** 2 / square[name]).mean().sqrt()))
            mean[name] = 0.5 * mean[name] + 0.5 * gradient / (sizes[-1] if sizes[-1] > 0.9 else 1)
            divisor = square[name].sqrt() + 1e-8
            weights[name] = weights[name] * (1 - 0.01 * 0.01)
            weights[name] = weights[name] - 0.01 * mean[name] / divisor
            torch.testing.assert_close(named[name].double(), weights[name], rtol=1e-4, atol=1e-6)
            biased = square[name] * (1 - BETAS[1] ** (step + 1))  # as torch keeps it
            torch.testing.assert_close(
                state[name]["exp_avg_sq"].double(), biased, rtol=1e-3, atol=0
            )
        # Small parameters are averaged densely: their step is torch's own.
        twin = nn.Parameter(before["0.bias"].clone())
        own = torch.optim.AdamW([twin], lr=0.01, betas=BETAS)
        own.state[twin] = small
        twin.grad = named["0.bias"].grad
        own.step()
        assert torch.equal(twin, named["0.bias"])
    handle.check_replicas()
    assert raised > 0
    assert min(sizes) < 0.9 < max(sizes)
    assert refresh is False or (clipping < 0.9) == (limit < 1)
    return steps


def smoothed(square: Tensor) -> Tensor:
    """Second moments of so few steps that they are completed by those of rows and columns."""
    matrix = square.flatten(1) if square.ndim > 1 else square[None]
    expected = torch.outer(matrix.sum(1), matrix.sum(0)) / matrix.sum()
    return (WARMUP * square + 8 * expected.view(square.shape)) / (WARMUP + 8)


def moving(pairs: list[list[float]]) -> list[float]:
    """Moving averages of both, over `INTERVAL` steps."""
    now = pairs[0]
    for pair in pairs:
        now = [a + (b - a) / INTERVAL for a, b in zip(now, pair, strict=True)]
    return now


@pytest.mark.parametrize(("refresh", "limit"), [(False, 1e6), (True, 1e6), (True, 0.2)])
def test_sparse_steps_equal_a_reference_on_one_rank(
    ranks: Ranks, refresh: bool, limit: float
) -> None:
    assert ranks.run(3, against_reference, refresh, limit) == [4 * INTERVAL] * 3


def wrapped(rank: Rank, model: nn.Module, **options: Any) -> oktopk.DistributedOptimizer:
    return oktopk.DistributedOptimizer(
        adamw(model), model.named_parameters(), OKTOPK, group=rank.own_group, **(SMALL | options)
    )


def trained(rank: Rank, case: str) -> tuple[Tensor, Tensor]:
    """Parameters and second moments after 14 steps, in one of many ways that come to the same."""
    scaler = None
    if case == "scaler" or case.startswith("overflow"):
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    options: dict[str, Any] = {"grad_scaler": scaler} if scaler else {}
    if case == "norm_clip":
        options["norm_clip"] = 1e6
    model: nn.Module = net()
    if case == "wrapper":
        optimizer: torch.optim.Optimizer = wrapped(rank, model)
    else:
        model = attached(rank, OKTOPK, **options)[0]
        optimizer = adamw(model, fused=case == "fused")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step % 2)
    for step in range(14):
        optimizer.zero_grad()
        if case == "accumulation":
            for part in range(2):
                with model.no_sync() if part == 0 else contextlib.nullcontext():  # type: ignore[operator]
                    x, y = (half[4 * part :][:4] for half in batch(step, rank.rank))
                    (nn.functional.cross_entropy(model(x), y) / 2).backward()
        elif scaler is not None:
            if case == f"overflow in step {step}":
                bad = loss_of(model, step, rank.rank) * (float("inf") if rank.rank == 1 else 1.0)
                scaler.scale(bad).backward()
                scaler.step(optimizer)
                scaler.update(2.0**10)
                optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank.rank)).backward()
        else:
            loss_of(model, step, rank.rank).backward()
        if case == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
    return parameters(model), moments(optimizer)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    return ranks.run(3, trained, "plain")


@pytest.mark.parametrize(
    "case", ["wrapper", "fused", "accumulation", "scaler", "clip", "norm_clip"]
)
def test_all_ways_of_training_come_to_the_same(
    ranks: Ranks, case: str, plain: list[tuple[Tensor, Tensor]]
) -> None:
    found = ranks.run(3, trained, case)
    for (weights, squares), (expected, expected_squares) in zip(found, plain, strict=True):
        assert torch.equal(weights, found[0][0])
        assert torch.equal(squares, found[0][1])
        if case in ("accumulation", "fused"):  # sums in another order
            torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(weights, expected)
            assert torch.equal(squares, expected_squares)


@pytest.mark.parametrize("step", [WARMUP + 1, WARMUP + INTERVAL + 1])
def test_an_overflow_leaves_nothing_behind(
    ranks: Ranks, step: int, plain: list[tuple[Tensor, Tensor]]
) -> None:
    usual = plain[0][1]
    for weights, squares in (found := ranks.run(3, trained, f"overflow in step {step}")):
        assert torch.equal(weights, found[0][0])
        assert torch.equal(squares, found[0][1])
        assert torch.isfinite(weights).all()
        assert float(squares.sum() / usual.sum()) == pytest.approx(1, rel=0.1)


def begun(rank: Rank, kind: str, seed: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A model to call, the handle of its compression, and its optimizer."""
    if kind == "wrapper":
        plain = net(seed)
        optimizer = wrapped(rank, plain)
        return plain, optimizer, optimizer
    model, handle = attached(rank, OKTOPK, net(seed))
    return model, handle, adamw(model)


def through(rank: Rank, folder: str | None, kind: str, stop: int) -> tuple[Tensor, Tensor]:
    """Sixteen steps, with a stop after some of them if there is a folder."""
    model, handle, optimizer = begun(rank, kind, 0)
    run(rank, model, optimizer, range(stop))
    if folder is not None:
        inner = model.state_dict()
        own = {"model": inner, "optimizer": optimizer.state_dict()}
        if kind == "folder":
            oktopk.checkpoint.save(folder, handle, shared=own)
        elif kind == "dcp":
            compression = oktopk.checkpoint.DistributedCheckpoint(handle)
            dcp.save({"compression": compression}, checkpoint_id=folder, process_group=rank.group)  # type: ignore[attr-defined]
        model, handle, optimizer = begun(rank, kind, 5)
        if kind == "folder":
            own = oktopk.checkpoint.load(folder, handle).shared
        elif kind == "dcp":
            compression = oktopk.checkpoint.DistributedCheckpoint(handle, folder)
            dcp.load({"compression": compression}, checkpoint_id=folder, process_group=rank.group)  # type: ignore[attr-defined]
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
    run(rank, model, optimizer, range(stop, 16))
    handle.check_replicas()
    return parameters(model), moments(optimizer)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks) -> dict[bool, list[tuple[Tensor, Tensor]]]:
    """Without and with the wrapper."""
    return {
        kind == "wrapper": ranks.run(2, through, None, kind, 16) for kind in ("folder", "wrapper")
    }


@pytest.mark.parametrize("stop", [WARMUP - 1, WARMUP + 2, WARMUP + INTERVAL + 2])
@pytest.mark.parametrize("kind", ["folder", "wrapper", "dcp"])
def test_resume_is_bitwise_the_same(
    ranks: Ranks,
    kind: str,
    stop: int,
    tmp_path: Path,
    uninterrupted: dict[bool, list[tuple[Tensor, Tensor]]],
) -> None:
    kept = uninterrupted[kind == "wrapper"]
    again = ranks.run(2, through, str(tmp_path), kind, stop)
    for (weights, squares), (expected, expected_squares) in zip(again, kept, strict=True):
        assert torch.equal(weights, expected)
        assert torch.equal(squares, expected_squares)


def saved(rank: Rank, folder: str) -> dict[str, Any]:
    model, handle, optimizer = begun(rank, "folder", 0)
    run(rank, model, optimizer, range(WARMUP + INTERVAL + 2))
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    oktopk.checkpoint.save(folder, handle, shared=shared)
    state: dict[str, Any] = handle.state_dict()
    return state


def loaded(rank: Rank, folder: str) -> tuple[dict[str, Any], Tensor]:
    model, handle, optimizer = begun(rank, "folder", 5)
    shared = oktopk.checkpoint.load(folder, handle).shared
    model.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    state = handle.state_dict()
    run(rank, model, optimizer, range(9, 20))
    handle.check_replicas()
    return state, moments(optimizer)


def test_another_number_of_ranks_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(2, saved, str(tmp_path))
    after = ranks.run(3, loaded, str(tmp_path))
    assert before[0]["squares"]
    for name in before[0]["squares"]:
        pending = sum(state["squares"][name] for state in before) / 2
        now = sum(state["squares"][name] for state, _ in after) / 3
        torch.testing.assert_close(now, pending)
    for state, squares in after:
        assert state["moments"] == before[0]["moments"]
        assert torch.equal(squares, after[0][1])


def sent(rank: Rank, interval: int | None, warmup: int = WARMUP) -> list[int]:
    model, handle = attached(rank, dataclasses.replace(OKTOPK, warmup_steps=warmup))
    seen: list[int] = []
    handle.subscribe(lambda stats: seen.append(stats.bytes_sent))
    optimizer = adamw(model, refresh_interval=interval, lr=0.0)
    run(rank, model, optimizer, range(WARMUP + 4 * INTERVAL))
    return seen


def test_bytes_of_the_refresh_are_counted(ranks: Ranks) -> None:
    """With a learning rate of 0 both runs have the same gradients."""
    frozen, refreshed = (
        [sum(step) / 4 for step in zip(*ranks.run(4, sent, interval), strict=True)]
        for interval in (None, INTERVAL)
    )
    extra = [b - a for a, b in zip(frozen, refreshed, strict=True)]
    elements = sum(p.numel() for p in net().parameters() if p.numel() >= 512)
    matrices = sum(1 for p in net().parameters() if p.numel() >= 512)
    first = WARMUP + INTERVAL
    assert extra[: first - 1] == [0] * (first - 1)
    assert extra[first - 1] == 8 * matrices * 2 * 3 // 4  # their totals
    for begin in range(first, len(extra), INTERVAL):
        assert abs(sum(extra[begin : begin + INTERVAL]) - 4 * elements * 2 * 3 / 4) < 10
        assert max(extra[begin : begin + INTERVAL]) < 4 * (elements / INTERVAL + 2) * 2 * 3 / 4


def test_squares_that_nobody_needs_are_not_sent(ranks: Ranks) -> None:
    """Without dense steps no second moment is known, and none to be refreshed."""
    frozen, refreshed = (ranks.run(2, sent, interval, 0) for interval in (None, INTERVAL))
    assert frozen == refreshed


def detached(rank: Rank) -> tuple[Tensor, Tensor]:
    """The last step of one that is dense again, and of torch's AdamW from there."""
    model, handle = attached(rank, OKTOPK)
    optimizer = adamw(model)
    run(rank, model, optimizer, range(10))
    handle.detach()
    run(rank, model, optimizer, range(10, 12))
    assert not any(state["linear"] for state in optimizer.state.values() if "linear" in state)
    twin = net()
    twin.load_state_dict(model.module.state_dict())
    other = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=BETAS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(rank, model, optimizer, range(12, 13))
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = q.grad
    other.step()
    return parameters(model), parameters(twin)


def test_dense_again_is_torchs_own_again(ranks: Ranks) -> None:
    for mine, theirs in ranks.run(2, detached):
        assert torch.equal(mine, theirs)


def lines(
    rank: Rank, kind: type, algorithm: oktopk.Algorithm, through_wrapper: bool
) -> tuple[list[str], Tensor]:
    """What is logged, and the parameters."""
    with logged() as found:
        model = net()
        optimizer = kind(model.parameters(), lr=0.01)
        if through_wrapper:
            optimizer = oktopk.DistributedOptimizer(
                optimizer, model.named_parameters(), algorithm, group=rank.own_group, **SMALL
            )
            run(rank, model, optimizer, range(5))
        else:
            ddp, _ = attached(rank, algorithm, model)
            run(rank, ddp, optimizer, range(5))
    return found, parameters(model)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oktopk").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("oktopk").removeHandler(handler)


@pytest.mark.parametrize("through_wrapper", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_torchs_own_gets_one_line_of_advice(
    ranks: Ranks, kind: type, through_wrapper: bool
) -> None:
    early = oktopk.OkTopk(density=0.1, warmup_steps=2)
    (found, _), (others, _) = ranks.run(2, lines, kind, early, through_wrapper)
    assert len(found) == 1
    assert f"oktopk.{kind.__name__} is" in found[0]
    assert others == []


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (torch.optim.AdamW, oktopk.Dense()),
        (torch.optim.SGD, OKTOPK),
        (oktopk.AdamW, OKTOPK),
    ],
)
def test_no_advice_where_none_is_needed(
    ranks: Ranks, kind: type, algorithm: oktopk.Algorithm
) -> None:
    for found, _ in ranks.run(2, lines, kind, algorithm, False):
        assert found == []


def test_without_warm_up_steps_are_torchs_and_a_line_says_so(ranks: Ranks) -> None:
    bare = oktopk.OkTopk(density=0.1)
    mine = ranks.run(2, lines, oktopk.AdamW, bare, False)
    theirs = ranks.run(2, lines, torch.optim.AdamW, bare, False)
    assert len(mine[0][0]) == 1
    assert "warmup_steps" in mine[0][0][0]
    assert torch.equal(mine[0][1], theirs[0][1])


def different(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK)
    run(rank, model, adamw(model, refresh_interval=2 + rank.rank), range(3))


def test_ranks_with_different_intervals_fail_together(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(2, different):
        assert error is not None
        assert "PeerError" in error
        assert "other settings" in error


def test_without_compression_it_is_torchs_own() -> None:
    models = [net(), net()]
    kinds = (oktopk.AdamW, torch.optim.AdamW)
    optimizers = [k(m.parameters(), lr=0.01) for k, m in zip(kinds, models, strict=True)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step, 0).backward()
            optimizer.step()
    assert torch.equal(parameters(models[0]), parameters(models[1]))
    again = pickle.loads(pickle.dumps(optimizers[0]))
    assert again.refresh_interval == optimizers[0].refresh_interval


@pytest.mark.parametrize("interval", [0, -1, 2.5])
def test_a_wrong_interval_is_said(interval: Any) -> None:
    with pytest.raises(ValueError, match=r"refresh_interval is .* None to keep"):
        oktopk.AdamW(net().parameters(), refresh_interval=interval)


def moments_of(alone: Alone) -> SecondMoments:
    assert alone.reducer.moments is not None
    return alone.reducer.moments


class Alone:
    """A model, its optimizer and a loop, on one rank without torch.distributed."""

    def __init__(
        self, model: nn.Module, algorithm: oktopk.Algorithm = OKTOPK, **options: Any
    ) -> None:
        self.model = model
        self.inner = adamw(model, **options)
        self.optimizer = oktopk.DistributedOptimizer(
            self.inner, model.named_parameters(), algorithm, dense_below=64
        )
        self.reducer = self.optimizer.reducer

    def run(self, steps: int, shape: tuple[int, ...] = (8, 32)) -> None:
        for _ in range(steps):
            self.backward(shape)
            self.optimizer.step()

    def backward(self, shape: tuple[int, ...] = (8, 32)) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(shape)).square().mean().backward()

    def moment(self, p: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.inner.state[p]
        bias: float = 1 - BETAS[1] ** float(state["step"])
        return state["exp_avg_sq"] / bias


class Forked(nn.Module):
    """Half of it can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(32, 32), nn.Linear(32, 32)
        self.whole = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if self.whole else y


def test_parameters_that_are_not_used_keep_their_second_moment() -> None:
    model = Forked()
    alone = Alone(model)
    alone.run(WARMUP)
    before = alone.moment(model.sometimes.weight).clone()
    model.whole = False
    alone.run(4 * INTERVAL)
    assert torch.equal(alone.moment(model.sometimes.weight), before)
    model.whole = True
    alone.run(4 * INTERVAL)
    now = alone.moment(model.sometimes.weight)
    assert 0.5 < float(now.mean() / before.mean()) < 2


def test_torchs_adamw_goes_on_with_our_state_and_we_with_its() -> None:
    alone = Alone(net())
    alone.run(WARMUP + 3 * INTERVAL)
    state = copy.deepcopy(alone.inner.state_dict())
    assert all(set(own) == {"step", "exp_avg", "exp_avg_sq"} for own in state["state"].values())
    twin = net()
    other = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=BETAS)
    other.load_state_dict(state)
    again = Alone(net())
    again.inner.load_state_dict(other.state_dict())
    weight = alone.model[0].weight  # type: ignore[index]
    there = again.model[0].weight  # type: ignore[index]
    assert torch.equal(again.moment(there), alone.moment(weight))


@pytest.mark.parametrize("form", [1, 2])
def test_a_state_of_an_earlier_version_is_read(form: int) -> None:
    alone, other = Alone(net()), Alone(net())
    alone.run(WARMUP + 2 + INTERVAL)
    state = alone.reducer.state_dict()
    old = old_model(state, form)
    other.reducer.load_state_dict(old)
    now = other.reducer.state_dict()
    assert now["buckets"] == state["buckets"]
    assert now["algorithm"] == state["algorithm"]
    assert (now["moments"] == state["moments"]) == (form == 2)
    old = old_model(state, 1)
    alone.optimizer.reducer.load_state_dict(old)
    redistributed = redistribute([upgraded(old)], 1, 2)
    assert redistributed["squares"] == {}
    alone.run(INTERVAL)


def test_a_state_in_another_memory_format_is_read() -> None:
    """Squares go to the elements that they belong to."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = []
    for contiguous in (False, True):
        torch.manual_seed(1)
        alone = Alone(copy.deepcopy(conv))
        alone.run(WARMUP + INTERVAL, (2, 8, 6, 6))
        weight = alone.model.weight
        assert isinstance(weight, Tensor)
        state = alone.inner.state[weight]
        if contiguous:
            state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
        alone.run(2 * INTERVAL, (2, 8, 6, 6))
        found.append(state["exp_avg_sq"].contiguous())
    assert torch.equal(found[0], found[1])


def test_two_optimizers_must_have_the_same_interval() -> None:
    model = net()
    alone = Alone(model)
    alone.run(1)
    second = oktopk.AdamW(model.parameters(), refresh_interval=INTERVAL + 1)
    second.step()  # it may have taken the place of the first
    with pytest.raises(ValueError, match="two optimizers of one model"):
        alone.inner.step()


def test_close_lets_go_of_sums() -> None:
    alone = Alone(net())
    alone.run(WARMUP + 2)
    sums = weakref.ref(moments_of(alone)._sums)
    assert sums() is not None
    alone.optimizer.close()
    alone.optimizer.reducer._worker.run(lambda: None)
    assert sums() is None
    alone.inner.step()  # goes on without


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_what_is_not_supported_is_said(option: str) -> None:
    """Before anything is stepped, wherever it comes from."""
    refused = pytest.raises(ValueError, match=f"{option}=True is not supported")
    with refused:
        adamw(net(), **{option: True})
    with refused:
        oktopk.AdamW([{"params": net().parameters(), option: True}])
    model = net()
    optimizer = adamw(model, **{option: False})
    with refused:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], option: True})
    assert len(optimizer.param_groups) == 1
    with refused:
        optimizer.load_state_dict(
            torch.optim.AdamW(net().parameters(), **{option: True}).state_dict()  # type: ignore[arg-type]
        )
    loss_of(model, 0, 0).backward()
    before = parameters(model)
    optimizer.param_groups[0][option] = True
    with refused:
        optimizer.step()
    assert torch.equal(parameters(model), before)


def by_torch(optimizer: torch.optim.Optimizer, only: list[nn.Parameter]) -> bool:
    """Take a step; whether these parameters have been moved as torch's AdamW does it."""
    twins = [nn.Parameter(p.detach().clone()) for p in only]
    other = torch.optim.AdamW(twins, lr=0.01, betas=BETAS)
    for p, twin in zip(only, twins, strict=True):
        twin.grad = None if p.grad is None else p.grad.clone()
        other.state[twin] = copy.deepcopy(optimizer.state.get(p, {}))
    optimizer.step()
    other.step()
    return all(torch.equal(p, twin) for p, twin in zip(only, twins, strict=True))


@pytest.mark.parametrize("case", ["another", "resumed", "group", "emptied"])
def test_without_a_second_moment_of_its_own_a_step_is_torchs(case: str) -> None:
    """What an earlier optimizer knew is not known to this one."""
    alone = Alone(net())
    model, optimizer = alone.model, alone.inner
    only = list(model.parameters())
    if case == "group":
        only = list(model[5].parameters())  # type: ignore[index]
        rest = [p for p in model.parameters() if all(p is not q for q in only)]
        optimizer = oktopk.AdamW(rest, lr=0.01, betas=BETAS, refresh_interval=INTERVAL)
    for _ in range(WARMUP + INTERVAL + 2):
        alone.backward()
        optimizer.step()
    match case:
        case "another":
            optimizer = adamw(model)
        case "resumed":
            state = alone.reducer.state_dict()
            alone.optimizer.close()
            alone = Alone(model)
            alone.reducer.load_state_dict(state)
            optimizer = alone.inner
        case "group":
            optimizer.add_param_group({"params": only})
        case "emptied":
            optimizer.load_state_dict(adamw(net()).state_dict())
    with logged() as found:
        for _ in range(2):
            alone.backward()
            assert by_torch(optimizer, only)
    assert len(found) == 1
    assert "has taken no dense step with" in found[0]
    if case == "group":  # the others go on as before
        alone.backward()
        assert not by_torch(optimizer, rest)
        assert moments_of(alone).interval == INTERVAL


def test_a_second_moment_of_other_steps_is_known() -> None:
    """From an optimizer's state of dense training, of fewer steps, or of another run."""
    alone = Alone(net(), refresh_interval=None)
    alone.run(WARMUP)
    early = copy.deepcopy(alone.inner.state_dict())
    alone.run(4)
    new = Alone(net(), dataclasses.replace(OKTOPK, warmup_steps=0), refresh_interval=None)
    for each in (alone, new):
        each.inner.load_state_dict(early)
        each.backward()
        assert not by_torch(each.inner, [each.model[0].weight])  # type: ignore[index]


def test_dense_steps_make_a_second_moment_known() -> None:
    bare = dataclasses.replace(OKTOPK, warmup_steps=0)
    alone = Alone(net(), bare)
    weight = alone.model[0].weight  # type: ignore[index]
    alone.run(3)
    alone.backward()
    assert by_torch(alone.inner, [weight])
    alone.optimizer.set_algorithm(oktopk.Dense())
    alone.run(2)
    alone.optimizer.set_algorithm(bare)
    alone.backward()
    assert not by_torch(alone.inner, [weight])
    alone.run(2 * INTERVAL)
    assert moments_of(alone).totals


def test_a_sudden_large_gradient_does_no_harm() -> None:
    """Nor what error feedback has kept of it: both move a weight no further than others do."""
    alone = Alone(net(), lr=1e-4)
    weight = alone.model[3].weight  # type: ignore[index]
    alone.run(20)
    moved = []
    for factor in (1, 1e4):
        before = weight.detach().clone()
        for step in range(20):
            alone.optimizer.zero_grad()
            loss = alone.model(torch.randn(8, 32)).square().mean()
            (loss * factor if step == 0 else loss).backward()
            alone.optimizer.step()
        moved.append(float((weight.detach() - before).square().mean()))
    assert 0 < moved[1] < 2 * moved[0]


def test_skipped_steps_are_no_warm_up() -> None:
    """The first losses are often too much for the scale that a GradScaler begins with."""
    model = net()
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    inner = adamw(model)
    optimizer = oktopk.DistributedOptimizer(
        inner, model.named_parameters(), OKTOPK, dense_below=64, grad_scaler=scaler
    )
    seen: list[tuple[int, str, bool]] = []
    optimizer.subscribe(lambda stats: seen.append((stats.step, stats.phase, stats.skipped)))
    with logged() as found:
        for step in range(2 * WARMUP + 2):
            if step == WARMUP + 1:  # what was skipped is a part of the state
                state = redistribute([optimizer.reducer.state_dict()], 0, 1)
                optimizer.reducer.load_state_dict(state)
            optimizer.zero_grad()
            bad = float("inf") if step < WARMUP else 1.0
            scaler.scale(loss_of(model, step, 0) * bad).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [(step, phase) for step, phase, _ in seen] == list(
        enumerate(["dense"] * 2 * WARMUP + ["sparse"] * 2)
    )
    assert [skipped for *_, skipped in seen] == [True] * WARMUP + [False] * (WARMUP + 2)
    assert found == []
    assert {float(own["step"]) for own in inner.state.values()} == {WARMUP + 2}


def goes_on(kind: str, state: dict[str, Any] | None) -> list[str]:
    """What is logged when an optimizer with or without earlier steps steps with a new reducer."""
    model = net()
    optimizer: torch.optim.Optimizer = adamw(model)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind != "new":
        loss_of(model, 0, 0).backward()
        optimizer.step()
    wrapper = oktopk.DistributedOptimizer(
        optimizer, model.named_parameters(), OKTOPK, dense_below=64
    )
    if state is not None:
        wrapper.reducer.load_state_dict(state)
    with logged() as found:
        for step in range(3):
            wrapper.zero_grad()
            loss_of(model, step, 0).backward()
            wrapper.step()
    return found


def test_an_optimizer_that_goes_on_without_compressions_state_gets_a_line() -> None:
    [line] = goes_on("adam", None)
    assert "has taken 1 steps before" in line
    assert "oktopk.checkpoint.load" in line
    [line] = goes_on("sgd", None)
    assert "has taken steps before" in line
    assert goes_on("new", None) == []
    alone = Alone(net())
    assert goes_on("adam", alone.reducer.state_dict()) == []


def test_a_compiled_step_is_not_compiled() -> None:
    """Of the optimizer and of its wrapper: nothing of it can be, and to try takes minutes."""
    from torch._dynamo.utils import counters

    plain, compiled = Alone(net()), Alone(net())
    torch._dynamo.reset()
    counters.clear()
    steps = [
        torch.compile(s, backend="eager") for s in (compiled.inner.step, compiled.optimizer.step)
    ]
    for number in range(WARMUP + 4):
        torch.manual_seed(number)
        plain.run(1)
        torch.manual_seed(number)
        compiled.backward()
        steps[number % 2]()
    assert torch.equal(parameters(plain.model), parameters(compiled.model))
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("kind", [oktopk.AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_compiled_steps_are_the_same(ranks: Ranks, kind: type) -> None:
    plain, compiled = ranks.run(1, with_compiled_steps, kind)[0]
    torch.testing.assert_close(plain, compiled)


def with_compiled_steps(rank: Rank, kind: type) -> list[Tensor]:
    found = []
    for compiled in (False, True):
        model, handle = attached(rank, OKTOPK)
        optimizer = kind(model.parameters(), lr=0.01)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        run(rank, model, optimizer, range(WARMUP + 2))
        assert handle.reducer.sparse
        assert handle.stats().totals.discarded_steps == 0
        found.append(parameters(model))
    torch._dynamo.reset()
    return found


def test_a_second_moment_of_16_bits_stays_as_it_is() -> None:
    """In torch's format it grows by less than its type can tell, in each of many steps."""
    p, gradient, average, moment = (torch.zeros(256, dtype=torch.bfloat16) for _ in range(4))
    moment += torch.linspace(0.1, 0.2, 256) * (1 - 0.999**100)
    before = moment.double() / (1 - 0.999**100)
    fixed = {"sign": 1.0, "weight": 0.5, "decay": 0.0, "shrink": 1.0, "eps": 1e-8, "lr": 0.1}
    for steps in range(100, 2000):
        own = adam._factors(0.999, steps, torch.bfloat16)
        reference.adam(p, gradient, average, moment, **own, **fixed)
    now = moment.double() / (1 - 0.999**2000)
    torch.testing.assert_close(now, before, rtol=0.15, atol=0)
