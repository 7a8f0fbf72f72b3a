"""The optimizer wrapper, for models without DDP."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from models import SMALL, attached, batch, loss_of, net, parameters, run, sgd
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05, warmup_steps=2)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def wrap(
    rank: Rank,
    model: nn.Module,
    algorithm: oktopk.Algorithm = OKTOPK,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> oktopk.DistributedOptimizer:
    return oktopk.DistributedOptimizer(
        optimizer or sgd(model),
        model.named_parameters(),
        algorithm,
        group=rank.own_group,
        **(SMALL | options),
    )


def with_ddp(rank: Rank, algorithm: oktopk.Algorithm | None, name: str) -> Tensor:
    if algorithm is None:
        model = DDP(net(), process_group=rank.group)
    else:
        model, _ = attached(rank, algorithm)
    run(rank, model, OPTIMIZERS[name](model.parameters()), range(12))
    return parameters(model)


def with_wrapper(rank: Rank, algorithm: oktopk.Algorithm, name: str) -> Tensor:
    model = net(seed=rank.rank)  # parameters are made equal at the start
    optimizer = wrap(rank, model, algorithm, OPTIMIZERS[name](model.parameters()))
    run(rank, model, optimizer, range(12))
    optimizer.check_replicas()
    return parameters(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_wrapper_equals_ddp(ranks: Ranks, name: str) -> None:
    plain = ranks.run(2, with_ddp, None, name)[0]
    assert torch.equal(plain, ranks.run(2, with_wrapper, oktopk.Dense(), name)[0])
    compressed = ranks.run(3, with_ddp, OKTOPK, name)[0]
    for weights in ranks.run(3, with_wrapper, OKTOPK, name):
        assert torch.equal(compressed, weights)


def clipped(rank: Rank) -> tuple[float, float, Tensor]:
    model = net()
    optimizer = wrap(rank, model)
    loss_of(model, 0, rank.rank).backward()
    optimizer.synchronize()
    before = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    after = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    optimizer.step()
    return float(before), float(after), parameters(model)


def test_synchronize_then_clip(ranks: Ranks) -> None:
    outcomes = ranks.run(3, clipped)
    for before, after, weights in outcomes:
        assert before > 0.2
        assert after == pytest.approx(0.1, rel=1e-3)
        assert torch.equal(weights, outcomes[0][2])


def accumulated(rank: Rank) -> tuple[Tensor, Tensor]:
    model, alone = net(), net()
    optimizer = wrap(rank, model, oktopk.Dense())
    with optimizer.no_sync():
        loss_of(model, 0, rank.rank).backward()
        loss_of(model, 1, rank.rank).backward()
    loss_of(model, 2, rank.rank).backward()
    for step in range(3):
        loss_of(alone, step, rank.rank).backward()
    return _gradient(model), _gradient(alone)


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_no_sync_accumulates(ranks: Ranks) -> None:
    outcomes = ranks.run(3, accumulated)
    expected = sum(own for _, own in outcomes) / 3
    for average, _ in outcomes:
        torch.testing.assert_close(average, expected, atol=1e-6, rtol=1e-5)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))


def missing(rank: Rank) -> list[dict[str, bool]]:
    """Which parameters have a gradient: `a` on all ranks, `b` on rank 0 only, `c` on none."""
    torch.manual_seed(0)
    model = Parts()
    optimizer = wrap(rank, model, oktopk.OkTopk(density=0.1), dense_below=64)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        x, _ = batch(step, rank.rank)
        y = model.a(x) + (model.b(x) if rank.rank == 0 else 0)
        y.square().mean().backward()
        seen.append({name: p.grad is not None for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.check_replicas()
    return seen


def test_parameters_without_a_gradient_are_treated_alike_everywhere(ranks: Ranks) -> None:
    for seen in ranks.run(3, missing):
        for grads in seen:
            assert grads == {
                f"{module}.{name}": module != "c" for module in "abc" for name in ("weight", "bias")
            }


def idle(rank: Rank) -> tuple[int, Tensor]:
    """Rank 1 has no second batch: it just steps."""
    model = net()
    optimizer = wrap(rank, model)
    for step in range(4):
        optimizer.zero_grad()
        if rank.rank != 1 or step % 2 == 0:
            loss_of(model, step, rank.rank).backward()
        optimizer.step()
    optimizer.check_replicas()
    return optimizer.stats().totals.steps, parameters(model)


def test_a_rank_without_a_batch_just_steps(ranks: Ranks) -> None:
    outcomes = ranks.run(3, idle)
    assert [steps for steps, _ in outcomes] == [4] * 3


def told(rank: Rank) -> dict[str, Any]:
    trainer = SimpleNamespace()
    model = net()
    optimizer = wrap(rank, model, trainer=trainer)
    run(rank, model, optimizer, range(5))
    other = SimpleNamespace(sparsities=[], compression_ratios=[], communication_sizes=[])
    optimizer.set_trainer(other)
    run(rank, model, optimizer, range(2))
    return {"first": vars(trainer), "second": vars(other)}


def test_the_trainer_is_told(ranks: Ranks) -> None:
    for lists in ranks.run(2, told):
        assert lists["first"]["sparsities"][:2] == [0.0, 0.0]
        assert all(s > 0.8 for s in lists["first"]["sparsities"][2:])
        assert len(lists["first"]["communication_sizes"]) == 5
        assert {name: len(values) for name, values in lists["second"].items()} == {
            "sparsities": 2,
            "compression_ratios": 2,
            "communication_sizes": 2,
        }


def resumed(rank: Rank, stop: bool) -> Tensor:
    model = net()
    optimizer = wrap(rank, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    run(rank, model, optimizer, range(5), lambda _: schedule.step())
    if stop:
        saved = optimizer.state_dict()
        weights, position = model.state_dict(), schedule.state_dict()
        model = net(seed=7)
        optimizer = wrap(rank, model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        schedule.load_state_dict(position)
    run(rank, model, optimizer, range(5, 10), lambda _: schedule.step())
    return parameters(model)


def test_its_state_includes_the_compression(ranks: Ranks) -> None:
    for kept, again in zip(ranks.run(3, resumed, False), ranks.run(3, resumed, True), strict=True):
        assert torch.equal(kept, again)


def plain_state(rank: Rank) -> int:
    model = net()
    optimizer = wrap(rank, model)
    optimizer.load_state_dict(sgd(net()).state_dict())
    run(rank, model, optimizer, range(2))
    return optimizer.stats().totals.steps


def test_the_state_of_a_plain_optimizer_can_be_loaded(ranks: Ranks) -> None:
    assert ranks.run(2, plain_state) == [2, 2]


def failing(rank: Rank) -> tuple[str, Tensor]:
    """A backward that fails half-way, on all ranks, and goes on after zero_grad."""
    model = net()
    optimizer = wrap(rank, model)
    run(rank, model, optimizer, range(3))
    before = optimizer.reducer.state_dict()["residual"]
    optimizer.zero_grad()

    def fail(gradient: Tensor) -> Tensor:
        raise MemoryError("too little of it")

    hook = model.get_parameter("0.weight").register_hook(fail)
    message = ""
    try:
        loss_of(model, 3, rank.rank).backward()
    except MemoryError as error:
        message = str(error)
    hook.remove()
    optimizer.zero_grad()
    after = optimizer.reducer.state_dict()["residual"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    run(rank, model, optimizer, range(3, 6))
    optimizer.check_replicas()
    return message, parameters(model)


def test_a_backward_that_failed_can_be_tried_again(ranks: Ranks) -> None:
    for message, weights in ranks.run(2, failing):
        assert message == "too little of it"
        assert bool(weights.isfinite().all())


def skipping(rank: Rank) -> tuple[bool, Tensor]:
    model = net()
    optimizer = wrap(rank, model, nonfinite="skip")
    run(rank, model, optimizer, range(3))
    before = parameters(model)
    optimizer.zero_grad()
    loss = loss_of(model, 3, rank.rank) * (torch.inf if rank.rank == 1 else 1)
    loss.backward()
    optimizer.step()  # not even momentum moves
    same = torch.equal(before, parameters(model))
    run(rank, model, optimizer, range(4, 6))
    optimizer.check_replicas()
    return same, parameters(model)


def test_a_skipped_step_is_skipped_whole(ranks: Ranks) -> None:
    for same, weights in ranks.run(3, skipping):
        assert same
        assert bool(weights.isfinite().all())


def closure(rank: Rank) -> Tensor:
    model = net()
    optimizer = wrap(rank, model, oktopk.Dense(), torch.optim.LBFGS(model.parameters(), lr=0.1))
    for step in range(3):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, 0)
            loss.backward()
            return loss

        optimizer.step(evaluate)  # type: ignore[arg-type]
    optimizer.check_replicas()
    return parameters(model)


def test_optimizers_with_closures(ranks: Ranks) -> None:
    [alone] = ranks.run(1, closure)
    for weights in ranks.run(2, closure):  # of equal gradients
        assert torch.equal(weights, alone)


def test_works_without_torch_distributed() -> None:
    model = net()
    optimizer = oktopk.DistributedOptimizer(sgd(model), model.named_parameters(), OKTOPK, **SMALL)
    first = loss_of(model, 0, 0).item()
    for step in range(60):
        optimizer.zero_grad()
        loss_of(model, step % 4, 0).backward()
        optimizer.step()
    assert loss_of(model, 0, 0).item() < 0.5 * first
    assert optimizer.stats().totals.compression_ratio > 8


def strided(rank: Rank) -> tuple[Tensor, Tensor]:
    """A parameter that is not dense in memory, and one that is transposed."""
    torch.manual_seed(rank.rank)
    model = nn.Module()
    model.gaps = nn.Parameter(torch.randn(32, 64)[:, ::2])
    model.turned = nn.Parameter(torch.randn(32, 32).t())
    optimizer = wrap(rank, model, oktopk.OkTopk(density=0.1), dense_below=64)
    start = torch.cat([model.gaps.detach().flatten(), model.turned.detach().flatten()])
    for _ in range(3):
        optimizer.zero_grad()
        ((model.gaps + model.turned) * (1 + rank.rank)).square().sum().backward()
        optimizer.step()
    optimizer.check_replicas()
    return start, parameters(model)


def test_parameters_in_any_memory_format(ranks: Ranks) -> None:
    outcomes = ranks.run(2, strided)
    for index in range(2):
        assert torch.equal(outcomes[0][index], outcomes[1][index])


def rewrapped(rank: Rank) -> list[int]:
    model = net()
    first = wrap(rank, model)
    run(rank, model, first, range(3))
    residual = weakref.ref(first.reducer._buckets[0].reduction)
    first.close()
    torch.distributed.barrier(group=rank.group)
    with pytest.raises(RuntimeError, match="this compression was closed"):
        first.state_dict()
    second = wrap(rank, model, optimizer=torch.optim.AdamW(model.parameters()))
    run(rank, model, second, range(2))
    second.check_replicas()
    assert residual() is None
    loss_of(model, 9, rank.rank).backward(create_graph=True)
    return [second.stats().totals.steps]


def test_a_model_can_be_wrapped_again(ranks: Ranks) -> None:
    assert ranks.run(2, rewrapped) == [[3]] * 2


def wrapped_twice(rank: Rank) -> None:
    model = net()
    first = wrap(rank, model)
    with pytest.raises(ValueError, match=r"averages the gradients of 0.weight, .* close\(\) it"):
        wrap(rank, model)
    run(rank, model, first, range(2))
    torch.optim.lr_scheduler.StepLR(first, 1)  # makes a cycle: only the garbage collector ends it
    del first
    run(rank, model, wrap(rank, model), range(2, 4))
    ddp, handle = attached(rank, OKTOPK)
    with pytest.raises(ValueError, match="would be averaged twice"):
        wrap(rank, ddp)
    handle.close()


def test_a_model_is_wrapped_once(ranks: Ranks) -> None:
    ranks.run(2, wrapped_twice)


def test_tied_parameters_count_once() -> None:
    model = net()
    named = list(model.named_parameters())
    twice = [*named, ("tied", named[0][1])]
    optimizer = oktopk.DistributedOptimizer(sgd(model), twice, OKTOPK)
    assert sorted(optimizer.reducer.state_dict()["residual"]) == sorted(dict(named))


def test_what_was_frozen_must_be_wrapped_again() -> None:
    model = net()
    weight = model.get_parameter("0.weight").requires_grad_(False)
    optimizer = oktopk.DistributedOptimizer(sgd(model), model.named_parameters(), OKTOPK)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match="wrap again after unfreezing"):
        loss_of(model, 1, 0).backward()


def test_it_cannot_be_copied() -> None:
    model = net()
    optimizer = oktopk.DistributedOptimizer(sgd(model), model.named_parameters(), OKTOPK)
    with pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(optimizer)


def test_mistakes_are_explained() -> None:
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match="2 parameters of the optimizer are not in named"):
        oktopk.DistributedOptimizer(sgd(model), named[2:], OKTOPK)
    with pytest.raises(ValueError, match="not unique"):
        oktopk.DistributedOptimizer(sgd(model), named + named[:1], OKTOPK)
    with pytest.raises(ValueError, match="both the optimizer and its wrapper have momentum"):
        oktopk.DistributedOptimizer(sgd(model), named, OKTOPK, momentum=0.9)
    with pytest.raises(ValueError, match=r"norm_clip is -1\.0"):
        oktopk.DistributedOptimizer(sgd(model), named, OKTOPK, norm_clip=-1.0)
    with pytest.raises(ValueError, match="there is no option 'fast'"):
        oktopk.DistributedOptimizer(sgd(model), named, OKTOPK, fast=True)
    embedding = nn.Embedding(64, 8, sparse=True)
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=0.1), embedding.named_parameters(), OKTOPK
    )
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        embedding(torch.arange(4)).sum().backward()
    with pytest.raises(ValueError, match="wrap it when it has them all"):
        optimizer.add_param_group({"params": []})
