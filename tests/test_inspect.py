"""Looks into steps: what they see is right, and nothing changes because somebody looks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from models import attached, batch, gradients, net, parameters, run, sgd
from oktopk.core.detail import Detail
from oktopk.core.inspector import magnitudes_of
from oktopk.train.kinds import KINDS, kinds_of
from ranks import Rank, Ranks

ALGORITHMS = [
    oktopk.algorithm(name, density=0.05, warmup_steps=2)
    for name in ("oktopk", "oktopk-variable", "topka", "topkdsa", "gtopk", "gaussiank", "dense")
]
WITH_REGIONS = ("OkTopk", "OkTopkVariable", "TopkDSA")
OKTOPK = ALGORITHMS[0]
CASES: dict[str, tuple[oktopk.Algorithm, torch.dtype, dict[str, Any]]] = {
    **{type(each).__name__: (each, torch.float32, {}) for each in ALGORITHMS},
    "bfloat16": (OKTOPK, torch.bfloat16, {}),
    "float64": (OKTOPK, torch.float64, {}),
    "momentum": (OKTOPK, torch.float32, {"momentum": 0.9}),
    "whole model": (OKTOPK, torch.float32, {"scope": "model", "norm_clip": 0.5}),
    "plain gtopk": (
        oktopk.GTopk(density=0.1, wire="plain"), torch.float32, {"momentum": 0.5}
    ),
    "all dense": (OKTOPK, torch.float32, {"dense_below": 10**6}),
    "density 1": (oktopk.OkTopk(density=1.0), torch.float32, {}),
}  # fmt: skip


def train(rank: Rank, case: str, inspected: bool) -> tuple[Tensor, Tensor, list[Detail]]:
    """Ten steps; one has a NaN, one is discarded."""
    algorithm, dtype, options = CASES[case]
    model, handle = attached(rank, algorithm, net().to(dtype), nonfinite="skip", **options)
    optimizer, details = sgd(model, momentum=0.0), list[Detail]()
    if inspected and rank.rank == 0:
        handle.inspect(details.append, lambda step: step % 3 == 0)
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of_type(model, step, rank.rank, dtype)
        (loss * (math.nan if step == 5 and rank.rank == 1 else 1.0)).backward()
        if step == 7:
            handle.discard()
        else:
            optimizer.step()
    residuals = handle.state_dict()["residual"]
    return parameters(model), torch.cat([residuals[n].flatten() for n in residuals]), details


def loss_of_type(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(8, 32).to(dtype)
    return nn.functional.cross_entropy(model(x).float(), x[:, :10].argmax(1))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_looking_changes_nothing(ranks: Ranks, case: str, size: int) -> None:
    blind = ranks.run(size, train, case, False)
    seen = ranks.run(size, train, case, True)
    for one, other in zip(blind, seen, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    # The skipped step 5 counts, and the discarded one does not: step 9 is never reached.
    assert [detail.step for detail in seen[0][2]] == [0, 3, 6]
    assert seen[1][2] == []


def look(rank: Rank, case: str) -> list[tuple[Detail, oktopk.StepStats, list[Tensor]]]:
    """Each step as the inspector saw it, with residual + gradient of each bucket."""
    algorithm, dtype, options = CASES[case]
    model, handle = attached(rank, algorithm, net().to(dtype), **options)
    optimizer, details = sgd(model, momentum=0.0), list[Detail]()
    stats: list[oktopk.StepStats] = []
    handle.subscribe(stats.append)
    handle.inspect(details.append, lambda step: True)
    found = []
    for step in range(6):
        state = handle.state_dict()
        loss = loss_of_type(model.module, step, rank.rank, dtype)
        names, own = zip(*model.module.named_parameters(), strict=True)
        gradient = dict(zip(names, torch.autograd.grad(loss, own), strict=True))
        total = sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5
        factor = min(1.0, options.get("norm_clip", math.inf) / (total + 1e-6))
        values = []
        for bucket in handle.reducer.buckets:
            for name in bucket:
                kept = state["residual"][name]
                gradient[name] = gradient[name].to(kept.dtype) * factor
                if options.get("momentum"):
                    gradient[name] += options["momentum"] * state["velocity"][name]
                gradient[name] += kept
            values.append(torch.cat([gradient[name].flatten() for name in bucket]))
        optimizer.zero_grad()
        loss_of_type(model, step, rank.rank, dtype).backward()
        optimizer.step()
        found.append((details[-1], stats[-1], values))
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_is_seen_is_right(ranks: Ranks, case: str) -> None:
    algorithm, _, options = CASES[case]
    for detail, stats, values in ranks.run(3, look, case)[0]:
        assert (detail.step, detail.phase) == (stats.step, stats.phase)
        assert sum(bucket.applied for bucket in detail.buckets) == stats.selected_global
        sent = sum(each.bytes * each.count for each in detail.messages)
        count = sum(each.count for each in detail.messages)
        assert (sent, count) == (stats.bytes_sent, stats.messages)
        assert (detail.staleness is None) == (detail.phase == "dense")
        for bucket, all_values in zip(detail.buckets, values, strict=True):
            sizes = all_values.abs()
            assert bucket.numel == sizes.numel()
            assert_histogram(bucket.magnitudes.lowest, bucket.magnitudes.counts, sizes)
            small = options.get("dense_below", 512) > 10**5 or bucket.index == len(values) - 1
            if small or detail.phase == "dense":
                assert (bucket.exact_threshold, bucket.local_threshold) == (0.0, 0.0)
                assert (bucket.k, bucket.applied, bucket.regions) == (sizes.numel(),) * 2 + ((),)
                continue
            exact = float(sizes.sort(descending=True)[0][bucket.k - 1])
            assert bucket.exact_threshold == pytest.approx(exact, rel=1e-5)
            assert bucket.offered >= int((sizes >= bucket.local_threshold * (1 + 1e-5)).sum())
            has_regions = type(algorithm).__name__ in WITH_REGIONS
            assert len(bucket.regions) == (3 if has_regions else 0)
            assert sum(bucket.regions) in (0, bucket.applied)
            assert bool(sum(bucket.regions)) == has_regions


def assert_histogram(lowest: int, counts: tuple[int, ...], sizes: Tensor) -> None:
    """Of a hundred values, one may be in the bin beside its own, and so may two of a few."""
    expected = Counter((2 * sizes[sizes > 0].double().log2()).floor().long().tolist())
    found = {lowest + at: count for at, count in enumerate(counts)}
    assert sum(counts) == int((sizes > 0).sum())
    missing = sum(abs(found.get(bin, 0) - expected[bin]) for bin in {*found, *expected})
    assert missing / 2 <= 2 + sizes.numel() / 100
    assert not counts or (counts[0] > 0 and counts[-1] > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [False, True])
def test_magnitudes_of_all_sizes(dtype: torch.dtype, dense: bool) -> None:
    least = torch.finfo(dtype).tiny
    values = torch.tensor(
        [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 1.4, 1.42, -1.99, 2.0, 2**-20,
         -torch.finfo(dtype).max, least],
        dtype=dtype,
    )  # fmt: skip
    found = magnitudes_of(values, dense)
    bins = Counter({found.lowest + at: count for at, count in enumerate(found.counts) if count})
    top = 2 * (128 if dtype == torch.float32 else 1024) - 1
    low = 2 * round(math.log2(least))
    assert bins == {0: 3, 1: 2, 2: 1, -40: 1, top: 1, low: 1}
    assert magnitudes_of(torch.zeros(5, dtype=dtype)).counts == ()


def wait(rank: Rank, algorithm: oktopk.Algorithm) -> tuple[Any, ...]:
    """How long all elements waited: as it is, and as it is estimated from a sample of all."""
    model, handle = attached(rank, algorithm, nonfinite="skip")
    optimizer, details = sgd(model, momentum=0.0), list[Detail]()
    handle.inspect(details.append, lambda step: step == 11, sample=10**6)
    large = {name for bucket in handle.reducer.buckets[:-1] for name in bucket}
    since = {name: torch.full_like(p, -1.0) for name, p in net().named_parameters()}
    waits, waiting = [], []
    for step in range(13):
        now = handle.reducer.step
        optimizer.zero_grad()
        x, y = batch(step, rank.rank)
        x[:, 16:] *= step > 4  # until then half of the first layer has no gradient
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * (math.nan if step == 6 and rank.rank == 1 else 1.0)).backward()
        if step == 8:
            handle.discard()
        else:
            optimizer.step()
        if step in (6, 8):
            continue  # nothing was applied
        averages, residuals = gradients(model), handle.state_dict()["residual"]
        for name in large:
            applied = averages[name] != 0
            if now >= algorithm.warmup_steps:
                waits.append((now - 1 - since[name])[applied])
            since[name][applied | (residuals[name] == 0)] = now
            if now == 11:
                waiting.append((now - since[name])[since[name] < now])
    return torch.cat(waits), torch.cat(waiting), details, handle.stats().staleness


@pytest.mark.parametrize("algorithm", ALGORITHMS[:-1], ids=lambda each: type(each).__name__)
def test_staleness_of_all_elements_is_exact(ranks: Ranks, algorithm: oktopk.Algorithm) -> None:
    waits, waiting, [detail], in_stats = ranks.run(2, wait, algorithm)[0]
    found = detail.staleness
    assert found == in_stats
    assert (detail.step, found.max) == (11, int(waits.max()))
    assert found.mean == pytest.approx(float(waits.mean()))
    assert found.p99 == int(waits.quantile(0.99, interpolation="higher"))
    assert found.waiting_mean == pytest.approx(float(waiting.mean()))
    assert found.waiting_p99 == int(waiting.quantile(0.99, interpolation="higher"))
    edges, counts = found.histogram.edges, found.histogram.counts
    assert sum(counts) == waits.numel()
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        assert count == int(((waits >= low) & (waits < high)).sum())


def sampled(rank: Rank) -> list[Any]:
    """Staleness of 40 steps, from all elements, from a sample, and begun in the middle."""
    found = []
    for sample, begin in ((10**6, 0), (1000, 0), (10**6, 20)):
        model, handle = attached(rank, OKTOPK)
        optimizer = sgd(model, momentum=0.0)
        run(rank, model, optimizer, range(begin))
        assert handle.stats().staleness is None
        end = handle.inspect(lambda detail: None, lambda step: False, sample=sample)
        run(rank, model, optimizer, range(begin, 40))
        found.append(handle.stats().staleness)
        assert "steps on average" in str(handle.stats())
        end()
        end()
        assert handle.stats().staleness is None
    return found


def test_a_sample_tells_about_all(ranks: Ranks) -> None:
    every, some, later = ranks.run(2, sampled)[0]
    assert some.mean == pytest.approx(every.mean, rel=0.15)
    assert some.waiting_mean == pytest.approx(every.waiting_mean, rel=0.15)
    assert sum(some.histogram.counts) == pytest.approx(sum(every.histogram.counts), rel=0.15)
    # Waits that began before nobody knows the length of.
    assert later.max <= 20
    assert 0 < sum(later.histogram.counts) < sum(every.histogram.counts)


def loaded(rank: Rank) -> tuple[Any, ...]:
    """The staleness of steps after a state was loaded, in a run that looked before, and in one that
    begins to look then."""
    found = []
    for before in (True, False):
        model, handle = attached(rank, OKTOPK)
        optimizer = sgd(model, momentum=0.0)
        run(rank, model, optimizer, range(4))
        saved, details = handle.state_dict(), list[Detail]()
        if before:
            handle.inspect(details.append, lambda step: step == 9)
            run(rank, model, optimizer, range(4, 10))
        weights = [p.detach().clone() for p in net().parameters()]
        torch._foreach_copy_([p.data for p in model.parameters()], weights)
        handle.load_state_dict(saved)
        if not before:
            handle.inspect(details.append, lambda step: step == 9)
        run(rank, model, optimizer, range(4, 10))
        found.append(details[-1].staleness)
    return tuple(found)


def test_a_state_may_be_loaded_under_inspection(ranks: Ranks) -> None:
    for again, anew in ranks.run(2, loaded):
        assert again == anew
        assert again.max < 10


def taken_back(rank: Rank) -> list[Any]:
    """Staleness where step 6 is discarded, by the loop and by a subscriber, and taken again."""
    found = []
    for by_subscriber in (False, True):
        model, handle = attached(rank, OKTOPK)
        optimizer, left = sgd(model, momentum=0.0), [1]

        def discard(stats: oktopk.StepStats, handle: Any = handle, left: list[int] = left) -> None:
            if stats.step == 6 and left:
                left.clear()
                handle.discard()

        if by_subscriber:
            handle.subscribe(discard)
        handle.inspect(lambda detail: None, lambda step: False, sample=10**6)
        for step in range(10):
            optimizer.zero_grad()
            loss_of_type(model, step, rank.rank, torch.float32).backward()
            if step != 6:
                optimizer.step()
            elif not by_subscriber:
                handle.discard()
        found.append(handle.stats().staleness)
    return found


def test_a_subscriber_may_discard_under_inspection(ranks: Ranks) -> None:
    for by_loop, by_subscriber in ranks.run(2, taken_back):
        assert by_loop == by_subscriber


def wrapped(rank: Rank) -> tuple[list[int], dict[str, Any]]:
    """Through the optimizer wrapper; a second inspection replaces the first."""
    model = net()
    optimizer = oktopk.DistributedOptimizer(
        sgd(model), model.named_parameters(), OKTOPK, group=rank.own_group, dense_below=512
    )
    first, second = list[Detail](), list[Detail]()
    optimizer.inspect(first.append, lambda step: True)
    run(rank, model, optimizer, range(2))
    end = optimizer.inspect(second.append, lambda step: step % 2 == 0)
    run(rank, model, optimizer, range(2, 5))
    end()
    run(rank, model, optimizer, range(5, 6))
    reducer = optimizer.reducer
    assert reducer._transaction.inspector is None
    assert all(bucket.reduction.transport.counter is None for bucket in reducer._buckets)
    steps = [detail.step for detail in (*first, *second)]
    summary = optimizer.stats().as_dict()
    optimizer.close()
    end()
    return steps, summary


def test_with_the_wrapper_and_sparse_counts_by_parameter(ranks: Ranks) -> None:
    steps, summary = ranks.run(2, wrapped)[0]
    assert steps == [0, 1, 2, 4]
    assert summary["staleness"] is None
    counts = summary["parameters"]
    assert set(counts) == {name for name, _ in net().named_parameters()}
    for name, parameter in net().named_parameters():
        numel = parameter.numel()
        assert counts[name]["numel"] == numel
        assert counts[name]["elements"] == 4 * numel  # two of six steps are dense
        if numel < 512:
            assert counts[name]["applied"] == 4 * numel
        else:
            assert 0 < counts[name]["applied"] < numel
    large = sum(p.numel() for p in net().parameters() if p.numel() >= 512)
    applied = sum(each["applied"] for each in counts.values() if each["numel"] >= 512)
    assert applied == 4 * round(0.05 * large)


def test_kinds_of_parameters() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(1, 2, 3),
            "lstm": nn.LSTM(4, 4),
            "cell": nn.GRUCell(4, 4),
            "linear": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "words": nn.Embedding(5, 4),
            "norms": nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)]),
            "prelu": nn.PReLU(),
            "tied": nn.Linear(4, 5),
        }
    )
    model["tied"].weight = model["words"].weight
    found = kinds_of(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert set(found.values()) == set(KINDS)
    assert {name for name, kind in found.items() if kind == "bias"} == {
        "conv.bias", "lstm.bias_ih_l0", "lstm.bias_hh_l0", "cell.bias_ih", "cell.bias_hh",
        "linear.bias", "attention.in_proj_bias", "attention.out_proj.bias", "tied.bias",
    }  # fmt: skip
    assert found["norms.0.bias"] == found["norms.2.weight"] == "norm"
    assert found["attention.in_proj_weight"] == found["attention.out_proj.weight"] == "linear"
    assert (found["words.weight"], found["prelu.weight"]) == ("embedding", "other")
