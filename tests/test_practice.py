"""What people do around training: clipping, mixed precision, momentum, warm-up, schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

import oktopk
from models import (
    SMALL,
    attached,
    gradients,
    local_gradient,
    loss_of,
    net,
    parameters,
    run,
    sgd,
)
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05, warmup_steps=2)


def clip(rank: Rank, limit: float, algorithm: oktopk.Algorithm) -> list[Tensor]:
    """What entered (residual and average give it away), and this rank's gradient."""
    model, handle = attached(rank, algorithm, norm_clip=limit)
    own = local_gradient(model, 0, rank.rank)
    loss_of(model, 0, rank.rank).backward()
    averages, residuals = gradients(model), handle.state_dict()["residual"]
    return [
        torch.cat([values[name].flatten() for name in own]) for values in (own, averages, residuals)
    ]


@pytest.mark.parametrize("algorithm", [oktopk.Dense(), oktopk.OkTopk(density=0.05)], ids=str)
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_each_ranks_gradient_is_clipped_before_it_enters(
    ranks: Ranks, limit: float, algorithm: oktopk.Algorithm
) -> None:
    outcomes = ranks.run(3, clip, limit, algorithm)
    expected = torch.zeros_like(outcomes[0][0])
    for own, _, _ in outcomes:
        norm = float(own.norm())
        assert norm > 0.6
        expected += own * min(1.0, limit / norm)
    entered = 3 * outcomes[0][1] + sum(residual for _, _, residual in outcomes)
    torch.testing.assert_close(entered, expected, atol=1e-5, rtol=1e-4)


def clip_after(rank: Rank) -> tuple[float, Tensor]:
    model, _ = attached(rank, OKTOPK)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return float(norm), parameters(model)


def test_ordinary_clipping_after_backward(ranks: Ranks) -> None:
    outcomes = ranks.run(2, clip_after)
    assert outcomes[0][0] == outcomes[1][0] > 0.1
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def scaled(rank: Rank, scaling: str, how: str) -> tuple[Tensor, dict[str, Tensor], float]:
    """Float32 training with a GradScaler, whose scale changes, or without one."""
    model: Any
    optimizer: Any
    handle: Any
    scaler = None
    if scaling != "none":
        interval = 3 if scaling == "growing" else 1000
        scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=interval)
    if how == "attach":
        model, handle = attached(rank, OKTOPK, grad_scaler=scaler)
        optimizer = sgd(model)
    else:
        model = net()
        optimizer = handle = oktopk.DistributedOptimizer(
            sgd(model),
            model.named_parameters(),
            OKTOPK,
            group=rank.own_group,
            grad_scaler=scaler,
            **SMALL,
        )
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank.rank)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    scale = 1.0 if scaler is None else scaler.get_scale()
    return parameters(model), handle.reducer.state_dict()["residual"], scale


@pytest.mark.parametrize("how", ["attach", "wrapper"])
def test_residuals_are_unscaled_whatever_the_scale(ranks: Ranks, how: str) -> None:
    # Scales are powers of two, so that the results are the same to the last bit.
    plain = ranks.run(3, scaled, "none", how)
    for scaling, expected in (("constant", 2.0**12), ("growing", 2.0**15)):
        for (weights, residual, _), (want, want_residual, scale) in zip(
            plain, ranks.run(3, scaled, scaling, how), strict=True
        ):
            assert scale == expected
            assert torch.equal(weights, want)
            assert all(torch.equal(residual[name], want_residual[name]) for name in residual)


def mixed(rank: Rank, dtype: torch.dtype, overflow_at: tuple[int, ...]) -> dict[str, Any]:
    """Autocast training; at some steps one rank's loss overflows."""
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    model, handle = attached(rank, OKTOPK, grad_scaler=scaler)
    optimizer = sgd(model)
    untouched, skipped = [], []
    for step in range(12):
        before = handle.state_dict()["residual"]
        weights = parameters(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, step, rank.rank)
        if step in overflow_at and rank.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step in overflow_at:
            after = handle.state_dict()["residual"]
            untouched.append(all(torch.equal(before[name], after[name]) for name in before))
            skipped.append(torch.equal(weights, parameters(model)))
    handle.check_replicas()
    return {
        "untouched": untouched,
        "skipped": skipped,
        "scale": scaler.get_scale(),
        "finite": bool(parameters(model).isfinite().all()),
        "stats": handle.stats().totals,
    }


def test_an_overflow_leaves_residuals_and_all_ranks_skip(ranks: Ranks) -> None:
    for told in ranks.run(3, mixed, torch.float16, (1, 6, 7)):  # dense, then sparse steps
        assert told["untouched"] == told["skipped"] == [True] * 3
        assert told["scale"] == 2.0**7
        assert told["finite"]
        assert told["stats"].skipped_steps == 3
        assert told["stats"].steps == 12


def disabled(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK, grad_scaler=GradScaler("cpu", enabled=False))
    (loss_of(model, 0, rank.rank) * torch.nan).backward()


def test_a_disabled_scaler_is_none(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(2, disabled):
        assert "NonFiniteGradientError" in str(error)


def fused(rank: Rank, fused: bool) -> Tensor:
    model = net()
    scaler = GradScaler("cpu", init_scale=2.0**12)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    optimizer = oktopk.DistributedOptimizer(
        inner, model.named_parameters(), OKTOPK, group=rank.own_group, grad_scaler=scaler, **SMALL
    )
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameters(model)


def test_fused_optimizers_with_a_scaler(ranks: Ranks) -> None:
    for ours, plain in zip(ranks.run(2, fused, True), ranks.run(2, fused, False), strict=True):
        torch.testing.assert_close(ours, plain)


def idle_after_overflow(rank: Rank) -> int:
    """A rank without a batch, after a step that the scaler has skipped."""
    model = net()
    scaler = GradScaler("cpu", init_scale=2.0**12)
    optimizer = oktopk.DistributedOptimizer(
        sgd(model),
        model.named_parameters(),
        OKTOPK,
        group=rank.own_group,
        grad_scaler=scaler,
        **SMALL,
    )
    for step in range(4):
        optimizer.zero_grad()
        if rank.rank == 0 or step != 2:
            loss = loss_of(model, step, rank.rank)
            scaler.scale(loss * torch.inf if step == 1 else loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    optimizer.check_replicas()
    return optimizer.stats().totals.skipped_steps


def test_an_idle_rank_after_an_overflow(ranks: Ranks) -> None:
    assert ranks.run(2, idle_after_overflow) == [1, 1]


def test_bfloat16_autocast(ranks: Ranks) -> None:
    for told in ranks.run(2, mixed, torch.bfloat16, ()):
        assert told["finite"]
        assert told["stats"].skipped_steps == 0


def corrected(rank: Rank, algorithm: oktopk.Algorithm, momentum: float) -> Tensor:
    model, _ = attached(rank, algorithm, momentum=momentum)
    run(rank, model, sgd(model, momentum=0.0 if momentum else 0.9), range(10))
    return parameters(model)


@pytest.mark.parametrize("size", [1, 3])
def test_momentum_correction_of_dense_steps_is_momentum(ranks: Ranks, size: int) -> None:
    plain = ranks.run(size, corrected, oktopk.Dense(), 0.0)[0]
    ours = ranks.run(size, corrected, oktopk.Dense(), 0.9)[0]
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def velocities(rank: Rank, algorithm: oktopk.Algorithm) -> list[tuple[dict[str, Tensor], ...]]:
    model, handle = attached(rank, algorithm, momentum=0.9)
    optimizer = sgd(model, momentum=0.0)
    seen: list[tuple[dict[str, Tensor], ...]] = []
    for step in range(6):
        before = handle.state_dict()
        own = local_gradient(model, step, rank.rank)
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        after = handle.state_dict()
        seen.append(
            (
                own,
                gradients(model),
                before["residual"],
                before["velocity"],
                after["residual"],
                after["velocity"],
            )
        )
        optimizer.step()
    return seen


@pytest.mark.parametrize("name", oktopk.names())
def test_momentum_correction_and_factor_masking(ranks: Ranks, name: str) -> None:
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=2)
    masked = 0
    for step, outcome in enumerate(zip(*ranks.run(3, velocities, algorithm), strict=True)):
        for parameter in outcome[0][0]:
            if outcome[0][0][parameter].numel() < 512:
                continue
            entered, left = 0.0, 3 * outcome[0][1][parameter]
            for own, average, residual, velocity, residual_after, velocity_after in outcome:
                moved = 0.9 * velocity[parameter] + own[parameter]
                entered = entered + residual[parameter] + moved
                left = left + residual_after[parameter]
                cleared = velocity_after[parameter] == 0
                torch.testing.assert_close(
                    torch.where(cleared, 0.0, moved), velocity_after[parameter]
                )
                if step >= 2 and name != "dense":
                    # A velocity ends where its sum was offered; gTopk may drop that on the way.
                    gone = cleared & (moved != 0)
                    if name != "gtopk":
                        assert not (gone & (average[parameter] == 0)).any()
                    masked += int(gone.sum())
                else:
                    assert not (cleared & (moved != 0)).any()
            torch.testing.assert_close(left, entered, atol=1e-5, rtol=1e-5)
    assert masked or name in ("dense", "auto")


def ramped(rank: Rank) -> tuple[list[int], list[str], list[int]]:
    algorithm = oktopk.OkTopk(density=0.02, warmup_steps=2, ramp=[0.25, 0.06], ramp_steps=3)  # type: ignore[arg-type]
    model, handle = attached(rank, algorithm, dense_below=0, scope="model")
    seen: list[oktopk.StepStats] = []
    handle.subscribe(seen.append)
    run(rank, model, sgd(model), range(12))
    handle.check_replicas()
    return (
        [stats.target for stats in seen],
        [stats.phase for stats in seen],
        [stats.selected_global for stats in seen],
    )


def test_density_ramp(ranks: Ranks) -> None:
    numel = sum(p.numel() for p in net().parameters())
    densities = [1.0] * 2 + [0.25] * 3 + [0.06] * 3 + [0.02] * 4
    for targets, phases, applied in ranks.run(3, ramped):
        assert targets == [round(density * numel) for density in densities]
        assert phases == ["dense"] * 2 + ["sparse"] * 10
        for count, target in zip(applied, targets, strict=True):
            assert 0.9 * target <= count <= target


def scheduled(rank: Rank) -> tuple[list[Any], list[int]]:
    """Another density, another algorithm, dense and back, while residuals carry over."""
    algorithms: list[oktopk.Algorithm] = [
        oktopk.OkTopk(density=0.1),
        oktopk.OkTopk(density=0.02),
        oktopk.GTopk(density=0.05),
        oktopk.Dense(),
        oktopk.TopkA(density=0.05),
    ]
    model, handle = attached(rank, algorithms[0], scope="model", dense_below=0)
    optimizer = sgd(model)
    seen, applied = [], []
    handle.subscribe(lambda stats: applied.append(stats.selected_global))
    for step in range(15):
        if step % 3 == 0:
            handle.set_algorithm(algorithms[step // 3])
        before = handle.state_dict()["residual"]
        own = local_gradient(model, step, rank.rank)
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        seen.append((before, own, gradients(model), handle.state_dict()["residual"]))
        optimizer.step()
    handle.check_replicas()
    return seen, applied


def test_density_and_algorithm_can_change(ranks: Ranks) -> None:
    outcomes = ranks.run(3, scheduled)
    for step in zip(*(seen for seen, _ in outcomes), strict=True):
        for name, average in step[0][2].items():
            entered = sum(before[name] + own[name] for before, own, _, _ in step)
            left = sum(after[name] for *_, after in step) + 3 * average
            torch.testing.assert_close(left, entered, atol=1e-5, rtol=1e-5)
    numel = sum(p.numel() for p in net().parameters())
    for _, applied in outcomes:
        for density, counts in ((0.1, applied[:3]), (0.02, applied[3:6]), (0.05, applied[6:9])):
            assert all(0.9 * density * numel <= count <= density * numel + 1 for count in counts)
        assert applied[9:12] == [numel] * 3
        assert all(count < 0.2 * numel for count in applied[12:])


def test_bad_ramps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"density is 2\.0"):
        oktopk.OkTopk(ramp=(0.25, 2.0))
    with pytest.raises(ValueError, match="ramp_steps is 0"):
        oktopk.OkTopk(ramp=(0.25,), ramp_steps=0)
    assert math.isclose(oktopk.OkTopk(density=0.02, ramp=(0.3,)).density_at(10**6), 0.02)
