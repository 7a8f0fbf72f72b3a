"""What becomes of averages: steps that are thrown away, skipped, or do not fit the optimizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from models import SMALL, attached, loss_of, net, parameters, run, sgd
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)


class Records(logging.Handler):
    """The messages of oktopk's log while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("oktopk").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("oktopk").removeHandler(self)


def assert_same(one: Any, other: Any) -> None:
    """Nested states, bitwise."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# One vector.


def take_back(rank: Rank, name: str, dtype: torch.dtype, momentum: float) -> None:
    algorithm = oktopk.algorithm(name, density=0.05, warmup_steps=2)
    random = torch.Generator().manual_seed(rank.rank)
    gradients = [torch.randn(500, generator=random).to(dtype) for _ in range(9)]
    reduces = [
        oktopk.SparseAllreduce(algorithm, 500, rank.group, dtype=dtype, momentum=momentum)
        for _ in range(2)
    ]
    for number, gradient in enumerate(gradients):
        averages = []
        for reduce in reduces:
            before = reduce.state_dict()
            if reduce is reduces[1]:  # dense and sparse steps are taken back, and taken again
                reduce(gradient * 3 + number)
                reduce.discard()
                assert_same(reduce.state_dict(), before)
                with pytest.raises(RuntimeError, match="no step to discard"):
                    reduce.discard()
            averages.append(reduce(gradient))
        assert_same(averages[0], averages[1])
        assert_same(reduces[0].state_dict(), reduces[1].state_dict())
        if number == 6:  # a dense step that applies all that waits
            for reduce in reduces:
                reduce.change(oktopk.Dense())


@pytest.mark.parametrize("name", oktopk.names())
def test_a_discarded_step_leaves_no_trace(ranks: Ranks, name: str) -> None:
    for dtype, momentum in ((torch.float32, 0.9), (torch.bfloat16, 0.0)):
        ranks.run(3, take_back, name, dtype, momentum)


# A model.


def setup(rank: Rank, how: str, warmup_steps: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    """Model, handle and optimizer, with DDP or with the wrapper."""
    algorithm = oktopk.OkTopk(density=0.05, warmup_steps=warmup_steps)
    if how == "ddp":
        model, handle = attached(rank, algorithm, **options)
        return model, handle, oktopk.AdamW(model.parameters(), lr=1e-3, refresh_interval=2)
    plain = net()
    wrapper = oktopk.DistributedOptimizer(
        oktopk.AdamW(plain.parameters(), lr=1e-3, refresh_interval=2),
        plain.named_parameters(),
        algorithm,
        group=rank.own_group,
        **(SMALL | options),
    )
    return plain, wrapper, wrapper


def in_vain(rank: Rank, step: int, way: str, model: Any, handle: Any, optimizer: Any) -> None:
    """A backward whose averages are not used."""
    loss = 10 * loss_of(model, 50 + step, rank.rank)
    optimizer.zero_grad()
    loss.backward()
    if way == "explicit":
        handle.discard()


def with_extras(rank: Rank, how: str, way: str, steps: int = 12) -> dict[str, Any]:
    """Train; before each step but the first comes a backward in vain."""
    model, handle, optimizer = setup(rank, how)
    with Records() as messages:
        for step in range(steps):
            if way == "resumed" and step == 7:
                kept = model.state_dict(), optimizer.state_dict(), handle.state_dict()
                handle.close()
                model, handle, optimizer = setup(rank, how)
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                if how == "ddp":
                    handle.load_state_dict(kept[2])
            if way != "never" and step:
                in_vain(rank, step, way, model, handle, optimizer)
            if way == "late":  # gradients are cleared between forward and backward
                loss = loss_of(model, step, rank.rank)
                optimizer.zero_grad(set_to_none=False)
            else:
                model.zero_grad(set_to_none=way != "zeros")
                loss = loss_of(model, step, rank.rank)
            loss.backward()
            optimizer.step()
    handle.check_replicas()
    state = handle.reducer.state_dict()
    state["moments"].pop("discards")
    return {
        "parameters": parameters(model),
        "optimizer": [optimizer.state[p] for p in model.parameters()],
        "compression": state,
        "discarded": handle.stats().totals.discarded_steps,
        "told": sum("cleared before" in message for message in messages),
    }


@pytest.mark.parametrize("how", ["ddp", "wrapper"])
def test_averages_that_are_thrown_away_do_not_come_back(ranks: Ranks, how: str) -> None:
    usual = ranks.run(2, with_extras, how, "never")
    for way in ("explicit", "resumed", "none", "zeros", "late"):
        for rank, (mine, want) in enumerate(
            zip(ranks.run(2, with_extras, how, way), usual, strict=True)
        ):
            assert_same(mine["parameters"], want["parameters"])
            assert_same(mine["optimizer"], want["optimizer"])
            assert_same(mine["compression"], want["compression"])
            assert mine["discarded"] == (5 if way == "resumed" else 11)
            by_itself = 0 if way == "explicit" else 2 if way == "resumed" else 1
            assert mine["told"] == (by_itself if rank == 0 else 0)


def legal(rank: Rank, what: str) -> int:
    """Loops in which averages are used, though an optimizer does not step with each of them."""
    model, handle = attached(rank, OKTOPK, cleared="keep" if what == "keep" else "discard")
    optimizer = sgd(model)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(3):
        if what == "by hand":
            model.zero_grad()
            loss_of(model, step, rank.rank).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.data.sub_(p.grad, alpha=0.1)
        elif what == "closure":

            def closure(step: int = step) -> Tensor:
                lbfgs.zero_grad()
                loss = loss_of(model, step, rank.rank)
                loss.backward()
                return loss

            lbfgs.step(closure)
        else:
            optimizer.zero_grad()
            loss_of(model, step, rank.rank).backward()
            if what == "keep":
                optimizer.zero_grad()
            loss_of(model, 10 + step, rank.rank).backward()  # else they accumulate
            optimizer.step()
    handle.check_replicas()
    return handle.stats().totals.discarded_steps


@pytest.mark.parametrize("what", ["by hand", "closure", "accumulated", "keep"])
def test_averages_that_are_used_are_not_taken_back(ranks: Ranks, what: str) -> None:
    assert ranks.run(2, legal, what) == [0, 0]


def discard_wrongly(rank: Rank) -> None:
    model, handle = attached(rank, OKTOPK)
    optimizer = sgd(model)
    for before in ("nothing", "step"):
        if before == "step":
            run(rank, model, optimizer, range(2))
        with pytest.raises(RuntimeError, match="there is no step to discard"):
            handle.discard()
    loss_of(model, 2, rank.rank).backward()
    if rank.rank == 0:
        handle.discard()
    with pytest.raises(oktopk.PeerError):
        loss_of(model, 3, rank.rank).backward()


def test_a_step_is_discarded_once_and_by_all(ranks: Ranks) -> None:
    ranks.run(2, discard_wrongly)


# What does not fit the optimizer.


def two_momentums(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK, momentum=0.9)
    with pytest.raises(ValueError, match="give the optimizer momentum=0"):
        run(rank, model, sgd(model, momentum=0.9), range(1))
    run(rank, model, sgd(model, momentum=0.0), range(1))


def forgotten_scaler(rank: Rank, nonfinite: str) -> None:
    model, _ = attached(rank, OKTOPK, nonfinite=nonfinite)
    scaler = torch.amp.grad_scaler.GradScaler("cpu")
    optimizer = sgd(model)
    scale = torch.inf if nonfinite == "skip" else 1.0  # every step overflows
    scaler.scale(loss_of(model, 0, rank.rank) * scale).backward()
    with pytest.raises(ValueError, match="attach with grad_scaler=scaler"):
        scaler.step(optimizer)


def test_mistakes_are_found_in_the_first_step(ranks: Ranks) -> None:
    ranks.run(2, two_momentums)
    ranks.run(2, forgotten_scaler, "raise")
    ranks.run(2, forgotten_scaler, "skip")


def skip(rank: Rank) -> list[str]:
    model, handle = attached(rank, OKTOPK, nonfinite="skip")
    optimizer = sgd(model, weight_decay=0.1)
    run(rank, model, optimizer, range(2))
    before = parameters(model)
    with Records() as messages:
        for step in range(2, 7):
            optimizer.zero_grad()
            (loss_of(model, step, rank.rank) * (torch.nan if rank.rank else 1.0)).backward()
            optimizer.step()
    assert torch.equal(parameters(model), before)
    run(rank, model, optimizer, range(7, 8))
    assert not torch.equal(parameters(model), before)
    handle.check_replicas()
    return messages


def test_a_skipped_step_moves_nothing_and_is_logged(ranks: Ranks) -> None:
    logs = ranks.run(2, skip)
    assert [message.partition(" is skipped")[0] for message in logs[0]] == [
        "step 2",
        "step 3",
        "step 5",  # the 1st, 2nd, 4th ... one
    ]
    assert "so far 4 of 6 steps" in logs[0][2]
    assert logs[1] == []


def test_the_error_of_a_nan_names_the_scaler(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(2, overflow):
        assert error is not None
        assert "grad_scaler=" in error


def overflow(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK)
    (loss_of(model, 0, rank.rank) * torch.inf).backward()
