"""Compression inside DistributedDataParallel, on real ranks."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import oktopk
from models import (
    SMALL,
    assert_conserved,
    attached,
    batch,
    gradients,
    local_gradient,
    logged,
    loss_of,
    net,
    parameters,
    run,
    sgd,
)
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)
PLAIN: dict[int, Tensor] = {}
"""Parameters after plain DDP, by the number of ranks."""


def train(rank: Rank, algorithm: oktopk.Algorithm | None, steps: int, **options: Any) -> Tensor:
    if algorithm is None:
        model = DDP(net(), process_group=rank.group, bucket_cap_mb=0.01)
    else:
        model, _ = attached(rank, algorithm, **options)
    run(rank, model, sgd(model), range(steps))
    return parameters(model)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "algorithm",
    [oktopk.Dense(), oktopk.OkTopk(density=1.0, threshold_interval=5)],
    ids=["dense", "oktopk"],
)
def test_everything_sent_is_plain_ddp(ranks: Ranks, size: int, algorithm: oktopk.Algorithm) -> None:
    if size not in PLAIN:
        PLAIN[size] = ranks.run(size, train, None, 20)[0]
    plain = PLAIN[size]
    ours = ranks.run(size, train, algorithm, 20)[0]
    if size <= 2:  # two numbers have one sum, three depend on the order
        assert torch.equal(plain, ours)
    else:
        torch.testing.assert_close(plain, ours, atol=1e-6, rtol=1e-6)


def variant(rank: Rank, ddp_options: dict[str, Any], steps: int) -> tuple[Tensor, Tensor]:
    model = net()
    ddp = DDP(model, process_group=rank.group, **ddp_options)
    handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group, **SMALL)
    run(rank, ddp, sgd(model), range(steps))
    handle.check_replicas()
    residual = handle.state_dict()["residual"]
    return parameters(model), torch.cat([residual[n].flatten() for n in sorted(residual)])


@pytest.fixture(scope="module")
def usual(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    return ranks.run(3, variant, {}, 12)


@pytest.mark.parametrize(
    "ddp_options",
    [
        {"bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 0.003},
        {"static_graph": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    ],
    ids=lambda options: "-".join(options),
)
def test_results_do_not_depend_on_the_buckets_of_ddp(
    ranks: Ranks, ddp_options: dict[str, Any], usual: list[tuple[Tensor, Tensor]]
) -> None:
    for (weights, residual), (want_weights, want_residual) in zip(
        ranks.run(3, variant, ddp_options, 12), usual, strict=True
    ):
        assert torch.equal(weights, want_weights)
        assert torch.equal(residual, want_residual)


def conserve(
    rank: Rank, algorithm: oktopk.Algorithm, options: dict[str, Any], steps: int
) -> list[tuple[dict[str, Tensor], ...]]:
    """For each step: residuals before, this rank's gradient, the average, residuals after."""
    model, handle = attached(rank, algorithm, **options)
    optimizer = sgd(model)
    seen: list[tuple[dict[str, Tensor], ...]] = []
    for step in range(steps):
        before = handle.state_dict()["residual"]
        own = local_gradient(model, step, rank.rank)
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        seen.append((before, own, gradients(model), handle.state_dict()["residual"]))
        optimizer.step()
    return seen


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", oktopk.names())
def test_nothing_is_lost(ranks: Ranks, name: str, size: int) -> None:
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=size % 2)
    assert_conserved(ranks.run(size, conserve, algorithm, {}, 6))


@pytest.mark.parametrize(
    "options",
    [{"scope": "model"}, {"dense_below": 0}, {"dense": ["3.*"]}, {"bucket_mb": 1e-4}],
    ids=str,
)
def test_nothing_is_lost_whatever_the_options(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_conserved(ranks.run(3, conserve, OKTOPK, options, 6))


def test_small_and_named_parameters_are_averaged_densely(ranks: Ranks) -> None:
    outcomes = ranks.run(3, conserve, OKTOPK, {"dense": ["5.*"]}, 4)
    for step in zip(*outcomes, strict=True):
        for name, average in step[0][2].items():
            exact = sum(own[name] for _, own, _, _ in step) / 3
            if name.startswith("5.") or exact.numel() < 512:
                torch.testing.assert_close(average, exact, atol=1e-6, rtol=1e-5)
                assert not any(after[name].any() for *_, after in step)
            else:
                assert average.count_nonzero() < 0.5 * average.numel()


def whole_model(rank: Rank) -> tuple[Tensor, Tensor]:
    """The averages of scope="model", and of the same gradients as one vector."""
    model, handle = attached(rank, OKTOPK, scope="model", dense_below=0)
    own = local_gradient(model, 0, rank.rank)
    loss_of(model, 0, rank.rank).backward()
    names = handle.reducer.buckets[0]
    assert sorted(names) == sorted(own)
    reduce = oktopk.SparseAllreduce(OKTOPK, sum(g.numel() for g in own.values()), rank.group)
    expected = reduce(torch.cat([own[name].flatten() for name in names]))
    return torch.cat([gradients(model)[name].flatten() for name in names]), expected


def test_model_scope_selects_over_all_gradients_at_once(ranks: Ranks) -> None:
    for average, expected in ranks.run(4, whole_model):
        assert torch.equal(average, expected)
        assert average.count_nonzero() == OKTOPK.target(average.numel())


def watch(rank: Rank, warmup: int, steps: int) -> dict[str, Any]:
    trainer = SimpleNamespace(sparsities=[], compression_ratios=[], communication_sizes=[])
    algorithm = oktopk.OkTopk(density=0.05, warmup_steps=warmup)
    model, handle = attached(rank, algorithm, trainer=trainer)
    seen: list[oktopk.StepStats] = []
    stop = handle.subscribe(seen.append)
    lengths = []
    run(rank, model, sgd(model), range(steps), lambda _: lengths.append(len(trainer.sparsities)))
    stop()
    handle.set_trainer(None)
    run(rank, model, sgd(model), range(1))
    return vars(trainer) | {"lengths": lengths, "seen": seen, "stats": handle.stats()}


def test_metrics_are_there_from_the_first_step(ranks: Ranks) -> None:
    numel = sum(p.numel() for p in net().parameters())
    for told in ranks.run(4, watch, 3, 8):
        assert told["lengths"] == list(range(1, 9))  # each step's when its backward returns
        assert told["sparsities"][:3] == [0.0] * 3
        assert told["compression_ratios"][:3] == [1.0] * 3
        dense = 2 * 4 * numel * 3 / 4
        assert all(dense <= size <= dense + 128 for size in told["communication_sizes"][:3])
        assert all(0.9 < sparsity < 0.96 for sparsity in told["sparsities"][3:])
        assert all(10 < ratio < 25 for ratio in told["compression_ratios"][3:])
        assert all(0 < size < dense / 3 for size in told["communication_sizes"][3:])
        assert [stats.step for stats in told["seen"]] == list(range(8))
        assert [stats.phase for stats in told["seen"]] == ["dense"] * 3 + ["sparse"] * 5


def test_stats_add_up(ranks: Ranks) -> None:
    for told in ranks.run(2, watch, 2, 7):
        stats, seen = told["stats"], told["seen"]
        assert stats.totals.steps == 8
        assert stats.totals.dense_steps == 2
        assert sum(bucket.numel for bucket in stats.buckets) == seen[0].numel
        assert sum(group.numel for group in stats.groups.values()) == seen[0].numel
        assert sum(group.applied for group in stats.groups.values()) == stats.totals.applied
        assert stats.totals.applied > sum(s.selected_global for s in seen)
        told_points = 8 * stats.totals.steps  # a number to the other rank, in each step
        in_buckets = sum(b.totals.bytes_sent for b in stats.buckets)
        assert stats.totals.bytes_sent == in_buckets + told_points
        assert 0 < sum(stats.totals.seconds.values()) <= stats.busy
        assert stats.as_dict()["totals"]["compression_ratio"] == stats.totals.compression_ratio
        assert "MB sent" in str(stats)


def small_ones(rank: Rank, name: str, dtype: torch.dtype) -> tuple[set[int], Tensor, Tensor]:
    """Messages of sparse steps besides two for each large bucket, the small parameters' averages,
    and the error in them."""
    seen: list[oktopk.StepStats] = []
    model, handle = attached(
        rank, oktopk.algorithm(name, density=0.05), net().to(dtype), dense_below=1000
    )
    handle.subscribe(seen.append)
    small = {n: p for n, p in model.module.named_parameters() if p.numel() < 1000}
    for step in range(4):
        model.zero_grad()
        inputs, targets = batch(step, rank.rank)
        nn.functional.cross_entropy(model(inputs.to(dtype)), targets).backward()
    own = net().to(dtype)
    grads = []
    for other in range(rank.size):
        inputs, targets = batch(3, other)
        loss = nn.functional.cross_entropy(own(inputs.to(dtype)), targets)
        found = torch.autograd.grad(loss, [dict(own.named_parameters())[n] for n in small])
        grads.append(torch.cat([g.flatten() for g in found]).double())
    average = torch.cat([p.grad.flatten() for p in small.values() if p.grad is not None])
    error = (average.double() - torch.stack(grads).mean(0)).abs().max()
    large = len(handle.stats().buckets) - 1
    return {stats.messages - 2 * large for stats in seen[2:]}, average, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["oktopk", "topka"])
def test_small_parameters_ride_along(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """In Ok-Topk's two exchanges. Where there are none, they have an allreduce of their own."""
    results = ranks.run(3, small_ones, name, dtype)
    for messages, average, error in results:
        assert (messages == {1}) is (name == "oktopk"), messages  # that in which ranks meet
        assert error < (1e-6 if dtype == torch.float32 else 1e-3)
        assert torch.equal(average, results[0][1])


def named_dense(rank: Rank, numel: int) -> tuple[set[int], int]:
    """Messages of sparse steps with a tensor that is averaged densely by name, and the bytes that
    the tensor beside it keeps for messages."""
    named = {"large": torch.zeros(5000), "dense": torch.zeros(numel)}
    options = oktopk.Options(dense=["dense"], dense_below=0)
    reducer = oktopk.AllReducer(named.items(), OKTOPK, rank.group, options)
    seen: list[oktopk.StepStats] = []
    reducer.events.subscribe(seen.append)
    for _ in range(4):
        gradients = {name: torch.randn(tensor.numel()) for name, tensor in named.items()}
        reducer.submit(gradients, torch.empty(0), last=True)
        reducer.wait()
    kept = reducer._buckets[0].reduction._steps._kept.values()
    reducer.close()
    return {stats.messages for stats in seen[1:]}, max(step.send.nbytes for step in kept)


def test_a_large_dense_tensor_does_not_ride_along(ranks: Ranks) -> None:
    """Each message would have room for a part of it, several times over."""
    assert all(messages == {3} for messages, _ in ranks.run(2, named_dense, 1000))
    for messages, nbytes in ranks.run(2, named_dense, 300_000):
        assert messages == {4}
        assert nbytes < 100_000


def sparse_at_once(rank: Rank) -> list[str]:
    seen: list[oktopk.StepStats] = []
    model, handle = attached(rank, OKTOPK)
    handle.subscribe(seen.append)
    run(rank, model, sgd(model), range(3))
    return [stats.phase for stats in seen]


def test_works_from_step_0(ranks: Ranks) -> None:
    assert ranks.run(2, sparse_at_once) == [["sparse"] * 3] * 2


def accumulate(rank: Rank, times: int) -> tuple[Tensor, ...]:
    """The average after some backwards without synchronisation, and what it should be."""
    model, _ = attached(rank, oktopk.Dense())
    own = [local_gradient(model, step, rank.rank) for step in range(times)]
    for step in range(times - 1):
        with model.no_sync():
            loss_of(model, step, rank.rank).backward()
    loss_of(model, times - 1, rank.rank).backward()
    expected = torch.cat([sum(g[name] for g in own).flatten() for name in own[0]])  # type: ignore[union-attr]
    return torch.cat([g.flatten() for g in gradients(model).values()]), expected


def test_accumulated_gradients_are_averaged_once(ranks: Ranks) -> None:
    outcomes = ranks.run(3, accumulate, 3)
    expected = sum(own for _, own in outcomes) / 3
    for average, _ in outcomes:
        torch.testing.assert_close(average, expected, atol=1e-6, rtol=1e-5)


def uneven(rank: Rank, algorithm: oktopk.Algorithm) -> tuple[Tensor, int]:
    model, handle = attached(rank, algorithm)
    optimizer = sgd(model)
    with model.join():
        run(rank, model, optimizer, range(3 + 2 * rank.rank))
    handle.check_replicas()
    return parameters(model), handle.stats().totals.steps


@pytest.mark.parametrize("algorithm", [oktopk.Dense(), OKTOPK], ids=["dense", "oktopk"])
def test_uneven_inputs_with_join(ranks: Ranks, algorithm: oktopk.Algorithm) -> None:
    outcomes = ranks.run(3, uneven, algorithm)
    assert [steps for _, steps in outcomes] == [7] * 3
    assert all(torch.equal(outcomes[0][0], weights) for weights, _ in outcomes)


def uneven_with_nan(rank: Rank) -> tuple[int, Tensor]:
    """A NaN while rank 0 has joined: the others catch it and go on; so does rank 0, later."""
    model, handle = attached(rank, OKTOPK)
    optimizer = sgd(model)
    caught = 0
    with model.join():
        for step in range(2 if rank.rank == 0 else 5):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank.rank)
            try:
                (loss * torch.nan if (rank.rank, step) == (1, 3) else loss).backward()
            except oktopk.NonFiniteGradientError:
                caught += 1
            else:
                optimizer.step()
    # join() makes parameters equal, not what the optimizers remember.
    run(rank, model, sgd(model), range(5, 8))
    handle.check_replicas()
    return caught, parameters(model)


def test_a_nan_after_a_rank_has_joined(ranks: Ranks) -> None:
    outcomes = ranks.run(3, uneven_with_nan)
    assert [caught for caught, _ in outcomes] == [0, 1, 1]
    assert all(bool(weights.isfinite().all()) for _, weights in outcomes)


class Odd(nn.Module):
    """An empty parameter, a number, one that is not for training, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.ones(()))
        self.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * self.second(self.first(x)) + self.empty.sum()
        return result


def odd(rank: Rank) -> Tensor:
    ddp = DDP(Odd(), process_group=rank.group)
    handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group, dense_below=64)
    run(rank, ddp, sgd(ddp, lr=0.01), range(4))
    handle.check_replicas()
    return parameters(ddp)


def test_odd_parameters(ranks: Ranks) -> None:
    outcomes = ranks.run(2, odd)
    assert torch.equal(outcomes[0], outcomes[1])


class Branches(nn.Module):
    """One of two branches is used in a step, or, on other ranks, the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(32, 32)
        self.left = nn.Linear(32, 32)
        self.right = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = (self.left if left else self.right)(self.common(x))
        return result


def branching(rank: Rank, density: float, how: str) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(rank.rank)
    model = Branches()
    ddp = DDP(model, process_group=rank.group, find_unused_parameters=True, bucket_cap_mb=0.002)
    algorithm = oktopk.OkTopk(density=density)
    options: dict[str, Any] = {"dense_below": 64, "bucket_mb": 0.005}
    if how == "attach":
        handle = oktopk.attach(ddp, algorithm, group=rank.own_group, **options)
    else:
        module = ddp if how == "pair" else model
        handle, hook = oktopk.comm_hook(module, algorithm, group=rank.own_group, **options)
        ddp.register_comm_hook(handle, hook)
        handle.start()
    seen = []
    for step in range(8):
        # Both branches in some steps (on different ranks), one of them in others.
        left = [True, rank.rank == 0, False, False][step % 4]
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        before = handle.state_dict()["residual"]["left.weight"]
        loss = model(x, left).square().mean()
        [own] = torch.autograd.grad(loss, [model.left.weight], allow_unused=True)
        model.zero_grad()
        ddp(x, left).square().mean().backward()
        average = model.left.weight.grad
        after = handle.state_dict()["residual"]["left.weight"]
        zeros = torch.zeros_like(before)
        seen.append(tuple(zeros if t is None else t.clone() for t in (before, own, average, after)))
        assert model.never.weight.grad is None
    handle.check_replicas()
    return seen


@pytest.mark.parametrize(
    ("density", "how"), [(0.1, "attach"), (1.0, "attach"), (0.1, "pair"), (0.1, "early pair")]
)
def test_what_waits_for_unused_parameters_goes_on_waiting(
    ranks: Ranks, density: float, how: str
) -> None:
    outcomes = ranks.run(3, branching, density, how)
    waited = False
    for step in zip(*outcomes, strict=True):
        average = step[0][2]
        entered = sum(before + own for before, own, _, _ in step)
        left = sum(after for *_, after in step) + 3 * average
        torch.testing.assert_close(left, entered, atol=1e-5, rtol=1e-5)
        used = any(own.any() for _, own, _, _ in step)
        assert used or not average.any()
        waited |= not used and bool(sum(after.abs().sum() for *_, after in step) > 0)
    assert waited or density == 1.0


def frozen(rank: Rank) -> tuple[bool, list[str]]:
    model = net()
    weight = model.get_parameter("0.weight").requires_grad_(False)
    before = weight.detach().clone()
    ddp, handle = attached(rank, OKTOPK, model)
    run(rank, ddp, sgd(ddp), range(4))
    handle.check_replicas()
    return torch.equal(before, weight), sorted(handle.state_dict()["residual"])


def test_frozen_parameters_are_left_alone(ranks: Ranks) -> None:
    for same, names in ranks.run(2, frozen):
        assert same
        assert "0.weight" not in names
        assert "3.weight" in names


def compiled(rank: Rank, how: str) -> tuple[Tensor, list[str]]:
    model: Any = net()
    inner: Any = torch.compile(model, backend="aot_eager") if how == "inside" else model
    ddp = DDP(inner, process_group=rank.group)
    outer: Any = torch.compile(ddp, backend="aot_eager") if how == "outside" else ddp
    handle = oktopk.attach(outer, OKTOPK, group=rank.own_group, **SMALL)
    run(rank, outer, sgd(model), range(5))
    return parameters(model), sorted(handle.state_dict()["residual"])


def test_compiled_models(ranks: Ranks) -> None:
    expected, names = ranks.run(2, compiled, "not at all")[0]
    for how in ("inside", "outside"):
        for weights, compiled_names in ranks.run(2, compiled, how):
            torch.testing.assert_close(weights, expected, atol=1e-4, rtol=1e-4)
            assert compiled_names == names, how


def channels_last(rank: Rank, steps: int) -> list[tuple[dict[str, Tensor], ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DDP(model, process_group=rank.group)
    handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group, dense_below=64)
    seen: list[tuple[dict[str, Tensor], ...]] = []
    for step in range(steps):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step + 9 * rank.rank))
        before = handle.state_dict()["residual"]
        own = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        named = dict(zip(dict(model.named_parameters()), own, strict=True))
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        seen.append((before, named, gradients(ddp), handle.state_dict()["residual"]))
    return seen


def test_other_memory_formats(ranks: Ranks) -> None:
    assert_conserved(ranks.run(3, channels_last, 4))


def sixteen_bits(rank: Rank) -> list[Any]:
    model = net().to(torch.bfloat16)
    ddp, handle = attached(rank, OKTOPK, model)
    seen = []
    for step in range(4):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step + 9 * rank.rank))
        x = x.to(torch.bfloat16)
        before = handle.state_dict()["residual"]
        own = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        named = {name: g.float() for name, g in zip(names, own, strict=True)}
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        averages = {n: g.float() for n, g in gradients(ddp).items()}
        seen.append((before, named, averages, handle.state_dict()["residual"]))
    handle.check_replicas()
    return seen


def test_models_in_16_bits(ranks: Ranks) -> None:
    assert_conserved(ranks.run(3, sixteen_bits))


def as_pair(rank: Rank, when: str) -> Tensor:
    model = net()
    if when == "before":
        state, hook = oktopk.comm_hook(model, OKTOPK, group=rank.own_group, **SMALL)
    ddp = DDP(model, process_group=rank.group, bucket_cap_mb=0.01)
    if when == "after":
        state, hook = oktopk.comm_hook(ddp, OKTOPK, group=rank.own_group, **SMALL)
    ddp.register_comm_hook(state, hook)
    run(rank, ddp, sgd(model), range(6))
    state.check_replicas()
    assert state.stats().totals.steps == 6
    return parameters(model)


def test_the_plain_pair_does_the_same(ranks: Ranks) -> None:
    expected = ranks.run(2, train, OKTOPK, 6)[0]
    for when in ("before", "after"):
        for weights in ranks.run(2, as_pair, when):
            assert torch.equal(expected, weights), when


def closed_before_it_begins(rank: Rank) -> None:
    ddp = DDP(net(), process_group=rank.group)
    state, hook = oktopk.comm_hook(ddp, OKTOPK, group=rank.own_group, **SMALL)
    ddp.register_comm_hook(state, hook)
    state.close()
    state.close()
    for use in (state.start, state.detach, loss_of(ddp, 0, rank.rank).backward):
        with pytest.raises(RuntimeError, match="this compression was closed"):
            use()


def test_a_pair_can_be_closed_before_it_begins(ranks: Ranks) -> None:
    ranks.run(2, closed_before_it_begins)


def ignored(rank: Rank, when: str) -> tuple[list[str], Tensor]:
    """Names of what is averaged, where DDP is to ignore two layers, and a gradient of one."""
    model = net()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["3.weight", "3.bias", "5.weight"])
    module = model if when == "before" else DDP(model, process_group=rank.group)
    state, hook = oktopk.comm_hook(module, OKTOPK, group=rank.own_group, **SMALL)
    ddp = module if isinstance(module, DDP) else DDP(model, process_group=rank.group)
    ddp.register_comm_hook(state, hook)
    run(rank, ddp, sgd(ddp), range(2))
    return sorted(state.state_dict()["residual"]), gradients(ddp)["3.weight"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_parameters_that_ddp_ignores_are_left_alone(ranks: Ranks, when: str) -> None:
    (names, mine), (_, other) = ranks.run(2, ignored, when)
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight", "5.bias"]
    assert not torch.equal(mine, other)


def detached(rank: Rank) -> tuple[list[Any], list[str]]:
    model, handle = attached(rank, OKTOPK, cleared="keep")
    run(rank, model, sgd(model), range(5))
    phases: list[str] = []
    handle.subscribe(lambda stats: phases.append(stats.phase))
    handle.detach()
    seen = []
    for step in range(5, 8):
        before = handle.state_dict()["residual"]
        own = local_gradient(model, step, rank.rank)
        model.zero_grad()
        loss_of(model, step, rank.rank).backward()
        seen.append((before, own, gradients(model), handle.state_dict()["residual"]))
    return seen, phases


def test_detached_is_dense_and_nothing_is_lost(ranks: Ranks) -> None:
    outcomes = ranks.run(3, detached)
    assert_conserved([seen for seen, _ in outcomes])
    for seen, phases in outcomes:
        assert phases == ["dense"] * 3
        assert any(residual.any() for residual in seen[0][0].values())
        assert not any(residual.any() for residual in seen[0][3].values())


def tampered(rank: Rank) -> None:
    model, handle = attached(rank, OKTOPK)
    run(rank, model, sgd(model), range(3))
    handle.check_replicas()
    if rank.rank == 1:
        weight = model.module[3].weight.data
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0))
    handle.check_replicas()


def test_a_replica_that_was_tampered_with_is_found(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(3, tampered):
        assert error is not None
        assert "ReplicaError" in error
        assert "3.weight: rank 1" in error


def poisoned(rank: Rank, nonfinite: str, where: str) -> tuple[str, bool, Tensor, Tensor, Tensor]:
    model, handle = attached(rank, OKTOPK, nonfinite=nonfinite)
    optimizer = sgd(model)
    run(rank, model, optimizer, range(3))
    before = handle.state_dict()["residual"]["3.weight"]
    optimizer.zero_grad()
    loss = loss_of(model, 3, rank.rank)
    if rank.rank == 1:
        # The hook of one parameter only, so that other buckets are already reduced.
        handle_ = model.module.get_parameter(where).register_hook(lambda g: g * torch.nan)
    message = ""
    try:
        loss.backward()
    except oktopk.NonFiniteGradientError as error:
        message = str(error)
    if rank.rank == 1:
        handle_.remove()
    averages = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    unchanged = torch.equal(before, handle.state_dict()["residual"]["3.weight"])
    run(rank, model, optimizer, range(4, 7))  # it goes on
    handle.check_replicas()
    return message, unchanged, averages, parameters(model), before


@pytest.mark.parametrize("where", ["0.weight", "5.weight", "2.bias"])
def test_a_nan_raises_on_all_ranks_and_training_can_go_on(ranks: Ranks, where: str) -> None:
    outcomes = ranks.run(3, poisoned, "raise", where)
    for rank, (message, unchanged, averages, weights, _) in enumerate(outcomes):
        assert "step 3: NaN or Inf in the gradient of rank 1" in message
        assert (where in message) == (rank == 1)
        assert unchanged
        assert not averages.any()  # whoever catches it and steps does the same on all ranks
        assert bool(weights.isfinite().all())


@pytest.mark.parametrize("where", ["0.weight", "5.weight"])
def test_a_nan_can_be_skipped(ranks: Ranks, where: str) -> None:
    for message, unchanged, averages, weights, before in ranks.run(3, poisoned, "skip", where):
        assert message == ""
        assert unchanged
        assert before.any()
        assert not averages.any()
        assert bool(weights.isfinite().all())


class Checkpointed(nn.Module):
    """Six blocks whose backward is a backward inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True).relu()
        return self.head(x)  # type: ignore[no-any-return]


def reentrant(rank: Rank, size: float | None) -> tuple[Tensor, str]:
    model = DDP(Checkpointed(), process_group=rank.group, bucket_cap_mb=size)
    handle = oktopk.attach(model, OKTOPK, group=rank.own_group, dense_below=512)
    optimizer = sgd(model)
    message = ""
    for step in range(4):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(10 * step + rank.rank)
        loss = model(torch.randint(64, (8, 4), generator=random)).square().mean()
        bad = step == 2 and rank.rank == 1
        try:
            (loss * torch.inf if bad else loss).backward()
        except oktopk.NonFiniteGradientError as error:
            message = f"{step}: {error}"
        optimizer.step()
    handle.check_replicas()
    return parameters(model), message


@pytest.mark.parametrize("size", [None, 0.002])
def test_a_nan_under_reentrant_checkpointing(ranks: Ranks, size: float | None) -> None:
    for weights, message in ranks.run(2, reentrant, size):
        assert message.startswith("2: step 2: NaN or Inf in the gradient of rank 1")
        assert bool(weights.isfinite().all())


def attach_twice(rank: Rank) -> tuple[bool, Tensor, Tensor]:
    """With AdamW, which finds its reducer by its parameters."""
    trained = []
    for twice in (False, True):
        model, handle = attached(rank, oktopk.OkTopk(density=0.05, warmup_steps=2))
        if twice:
            with pytest.raises(ValueError, match="DDP does not take a hook here"):
                oktopk.attach(model, OKTOPK, group=rank.own_group, **SMALL)
        run(rank, model, oktopk.AdamW(model.parameters(), lr=1e-3), range(5))
        trained.append(parameters(model))
    return bool(handle.reducer.sparse), trained[0], trained[1]


def test_a_refused_attach_leaves_no_trace(ranks: Ranks) -> None:
    for sparse, once, twice in ranks.run(2, attach_twice):
        assert sparse
        assert torch.equal(once, twice)


def wrong(rank: Rank, what: str) -> None:
    model = net()
    if what == "no DDP":
        oktopk.attach(model, OKTOPK)
    ddp = DDP(model, process_group=rank.group)
    match what:
        case "option":
            oktopk.attach(ddp, OKTOPK, group=rank.own_group, density=0.1)
        case "scope":
            oktopk.attach(ddp, OKTOPK, group=rank.own_group, scope="layer")
        case "algorithm":
            oktopk.attach(ddp, "oktopk", group=rank.own_group)  # type: ignore[arg-type]
        case "group":
            oktopk.attach(ddp, OKTOPK)
        case "twice":
            oktopk.attach(ddp, OKTOPK, group=rank.own_group)
            oktopk.attach(ddp, OKTOPK, group=rank.own_group)
        case "differ":
            other = dataclasses.replace(OKTOPK, density=0.01 * (1 + rank.rank))
            oktopk.attach(ddp, other, group=rank.own_group)
        case "change":
            handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group)
            handle.set_algorithm(dataclasses.replace(OKTOPK, density=0.01 * (1 + rank.rank)))
        case "scaler":
            scaler = torch.amp.grad_scaler.GradScaler("cpu") if rank.rank == 0 else None
            oktopk.attach(ddp, OKTOPK, group=rank.own_group, grad_scaler=scaler)
        case "closed":
            handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group)
            handle.close()
            loss_of(ddp, 0, rank.rank).backward()
        case "sparse":
            embedding = DDP(nn.Embedding(64, 8, sparse=True), process_group=rank.group)
            oktopk.attach(embedding, OKTOPK, group=rank.own_group, dense_below=0)
            embedding(torch.arange(4)).sum().backward()
        case "thaw":
            model = net()
            weight = model.get_parameter("3.weight").requires_grad_(False)
            ddp = DDP(model, process_group=rank.group)
            weight.requires_grad_(True)
            oktopk.attach(ddp, OKTOPK, group=rank.own_group, **SMALL)
            loss_of(ddp, 0, rank.rank).backward()
        case "thaw later":
            model = net()
            weight = model.get_parameter("3.weight").requires_grad_(False)
            ddp, _ = attached(rank, OKTOPK, model)
            run(rank, ddp, sgd(ddp), range(2))
            weight.requires_grad_(True)
            loss_of(ddp, 2, rank.rank).backward()
        case "another model":
            state, hook = oktopk.comm_hook(net(), OKTOPK, group=rank.own_group)
            ddp.register_comm_hook(state, hook)
            loss_of(ddp, 0, rank.rank).backward()
        case "complex":
            model.scale = nn.Parameter(torch.ones(10, dtype=torch.complex64))
            attached(rank, OKTOPK, model)
        case "in backward":
            extra: Any = importlib.import_module("torch.distributed.optim")  # warns of much
            extra._apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
            oktopk.attach(ddp, OKTOPK, group=rank.own_group)
        case "precision":
            precise = DDP(net(), process_group=rank.group, mixed_precision=_MixedPrecision())
            oktopk.attach(precise, OKTOPK, group=rank.own_group)
        case "python reducer":
            ddp._use_python_reducer = True  # the real setting would stay with the process
            oktopk.attach(ddp, OKTOPK, group=rank.own_group)
        case "all delayed":
            model[0].requires_grad_(False)
            late = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            ddp = DDP(
                model,
                process_group=rank.group,
                delay_all_reduce_named_params=late,
                param_to_hook_all_reduce=late[0][1],
            )
            oktopk.attach(ddp, OKTOPK, group=rank.own_group)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no DDP", "init_process_group(), then attach to DDP(model)"),
        ("option", "there is no option 'density'"),
        ("scope", 'must be "bucket" or "model"'),
        ("algorithm", "must be an algorithm such as"),
        ("group", "pass it as group="),
        ("twice", "DDP does not take a hook here"),
        ("differ", "ranks disagree: use the same model, algorithm and options"),
        ("change", "ranks disagree: set the same algorithm"),
        ("scaler", "ranks disagree"),
        ("closed", "this compression was closed"),
        ("sparse", "sparse=False"),
        ("thaw", "no gradient came for 3.weight"),
        ("thaw later", "3.weight was frozen when compression was attached"),
        ("another model", "call it with the model that is in DDP"),
        ("complex", "scale is complex, but parameters must be real"),
        ("in backward", "an optimizer steps in backward"),
        ("precision", "none with mixed_precision="),
        ("python reducer", "leave it at True"),
        ("all delayed", "all parameters to train are in delay_all_reduce_named_params"),
    ],
)
def test_mistakes_are_explained_on_every_rank(ranks: Ranks, what: str, message: str) -> None:
    for _, error in ranks.outcomes(2, wrong, what):
        assert error is not None
        assert message in error


def warned(rank: Rank) -> list[str]:
    with logged() as records:
        attached(rank, OKTOPK, dense_below=10**6)
    return records


def test_a_model_too_small_to_compress_is_said_so(ranks: Ranks) -> None:
    for records in ranks.run(2, warned):
        assert any("nothing is compressed" in record for record in records)
