"""What becomes of averages: steps that are thrown away, skipped, or do not fit the optimizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

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
    elif isinstance(one, list | tuple):
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


@pytest.mark.parametrize("name", [name for name in oktopk.names() if name != "auto"])
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
    state["moments"]["counters"].pop("discards", None)
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


class Ends(nn.Module):
    """A large head without a bias, which comes first in backward, and parts that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 3000, bias=False)

    def forward(self, x: Tensor, parts: str) -> Tensor:
        x = self.first(x) if "first" in parts else x
        x = self.middle(x) if "middle" in parts else x
        y: Tensor = self.head(x)[:, :10] if "head" in parts else x
        return y


def unlike(rank: Rank, what: str) -> tuple[int, Tensor, Any]:
    """Steps of which one is thrown away, by itself or, for comparison, explicitly."""
    unused = what == "other parts"
    model = DDP(Ends(), process_group=rank.group, find_unused_parameters=unused)
    handle = oktopk.attach(model, OKTOPK, group=rank.own_group, dense_below=2000)
    optimizer = sgd(model)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank.rank))
    everything = "first middle head"
    mine = ("first head", "middle")[rank.rank] if unused else everything
    for step in range(5):
        if step == 3:
            optimizer.zero_grad()
            (10 * model(x, everything)).square().mean().backward()
            if what == "explicit":
                handle.discard()
        optimizer.zero_grad()
        model(x + step, mine).square().mean().backward()
        optimizer.step()
    handle.check_replicas()
    return handle.stats().totals.discarded_steps, parameters(model), handle.state_dict()["residual"]


def test_it_is_noticed_whatever_comes_first_in_backward(ranks: Ranks) -> None:
    for explicit, by_itself in zip(
        ranks.run(2, unlike, "explicit"), ranks.run(2, unlike, "by itself"), strict=True
    ):
        assert explicit[0] == by_itself[0] == 1
        assert_same(explicit[1:], by_itself[1:])
    assert [discarded for discarded, *_ in ranks.run(2, unlike, "other parts")] == [1, 1]


def saved_undecided(rank: Rank, folder: str) -> None:
    """As a GAN does: the averages of the last backward of an iteration are cleared in the next."""
    trained = []
    for resumed in (False, True):
        model, handle, optimizer = setup(rank, "ddp")
        for step in range(10):
            if step == 6:
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                oktopk.checkpoint.save(f"{folder}/{resumed}", handle, shared=kept)
                if resumed:
                    model, handle, optimizer = setup(rank, "ddp")
                    kept = oktopk.checkpoint.load(f"{folder}/{resumed}", handle).shared
                    model.load_state_dict(kept["model"])
                    optimizer.load_state_dict(kept["optimizer"])
            optimizer.zero_grad()
            loss_of(model, step, rank.rank).backward()
            optimizer.step()
            in_vain(rank, step, "", model, handle, optimizer)
        trained.append((parameters(model), handle.state_dict()))
    assert_same(trained[0][0], trained[1][0])
    assert_same(trained[0][1], trained[1][1])


def test_a_checkpoint_holds_no_step_that_nobody_has_used(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saved_undecided, str(tmp_path))


def after_a_nan(rank: Rank, nonfinite: str) -> None:
    """Two backwards for a step, the second of which fails; then it goes on."""
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=8.0)
    options = {"grad_scaler": scaler} if nonfinite == "scaler" else {"nonfinite": nonfinite}
    model, handle = attached(rank, OKTOPK, None, **options)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            bad = torch.nan if (step, part, rank.rank) == (3, 1, 1) else 1.0
            loss = loss_of(model, 2 * step + part, rank.rank) * bad
            try:
                (scaler.scale(loss) if nonfinite == "scaler" else loss).backward()
            except oktopk.NonFiniteGradientError:
                assert (nonfinite, step) == ("raise", 3)
        if nonfinite == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert handle.stats().totals.discarded_steps == 0
    handle.check_replicas()


def zeros_at_the_ends(rank: Rank) -> None:
    """Gradients that are zero without having been cleared, and then accumulate."""
    model, handle = attached(rank, OKTOPK)
    optimizer = sgd(model)
    ends = [model.module[0], model.module[5]]
    for step in range(4):
        optimizer.zero_grad()
        hooks = [p.register_hook(torch.zeros_like) for end in ends for p in end.parameters()]
        loss_of(model, step, rank.rank).backward()
        for hook in hooks:
            hook.remove()
        loss_of(model, 10 + step, rank.rank).backward()
        optimizer.step()
    assert handle.stats().totals.discarded_steps == 0


def after_an_error_in_a_closure(rank: Rank) -> None:
    model, handle = attached(rank, OKTOPK)
    optimizer = sgd(model)

    def closure(factor: float = torch.nan) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank.rank) * factor
        loss.backward()
        return loss

    optimizer.step(lambda: closure(1.0).item())
    with pytest.raises(oktopk.NonFiniteGradientError):
        optimizer.step(lambda: closure().item())
    closure(1.0)
    handle.discard()


def test_what_is_left_of_a_failed_step(ranks: Ranks) -> None:
    for nonfinite in ("skip", "raise", "scaler"):
        ranks.run(2, after_a_nan, nonfinite)
    ranks.run(2, zeros_at_the_ends)
    ranks.run(2, after_an_error_in_a_closure)


# What does not fit the optimizer.


def two_momentums(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK, momentum=0.9)
    with pytest.raises(ValueError, match="give the optimizer momentum=0"):
        run(rank, model, sgd(model, momentum=0.9), range(1))
    other = {"params": [nn.Parameter(torch.zeros(3))], "momentum": 0.9}  # nobody averages it
    optimizer = sgd(model, momentum=0.0)
    optimizer.add_param_group(other)
    run(rank, model, optimizer, range(1))


def forgotten_scaler(rank: Rank, nonfinite: str) -> None:
    model, _ = attached(rank, OKTOPK, nonfinite=nonfinite)
    scaler = torch.amp.grad_scaler.GradScaler("cpu")
    optimizer = sgd(model)
    if nonfinite == "raise":
        run(rank, model, optimizer, range(1))  # at first it does without
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


def skip_in_a_closure(rank: Rank, how: str, skipped: bool) -> Tensor:
    """As Lightning does; batches before the last of a step are accumulated without averaging."""
    model: Any
    optimizer: Any
    if how == "ddp":
        model, _ = attached(rank, OKTOPK, nonfinite="skip")
        optimizer = sgd(model, weight_decay=0.1)
    else:
        model = net()
        inner = sgd(model, weight_decay=0.1)
        optimizer = oktopk.DistributedOptimizer(
            inner,
            model.named_parameters(),
            OKTOPK,
            group=rank.own_group,
            nonfinite="skip",
            **SMALL,
        )
    for step in range(5):
        if step == 2 and not skipped:
            continue
        optimizer.zero_grad()
        with (model if how == "ddp" else optimizer).no_sync():
            loss_of(model, step, rank.rank).backward()

        def closure(step: int = step) -> None:
            bad = step == 2 and rank.rank == 1
            (loss_of(model, 50 + step, rank.rank) * (torch.nan if bad else 1.0)).backward()

        optimizer.step(closure)
    return parameters(model)


@pytest.mark.parametrize("how", ["ddp", "wrapper"])
def test_a_step_that_is_skipped_in_a_closure(ranks: Ranks, how: str) -> None:
    """It moves nothing, and nothing of the next one is lost."""
    assert_same(
        ranks.run(2, skip_in_a_closure, how, True), ranks.run(2, skip_in_a_closure, how, False)
    )


def first_steps_with_closures(rank: Rank, how: str, earlier: bool) -> list[str]:
    """What is logged. The optimizer's first step begins before the first backward."""
    model = net()
    optimizer = sgd(model)
    if earlier:
        loss_of(model, 0, 0).backward()
        optimizer.step()
    ddp = DDP(model, process_group=rank.group)
    pair = oktopk.comm_hook if how == "comm_hook" else oktopk.attach
    found = pair(ddp, OKTOPK, group=rank.own_group, **SMALL)
    if isinstance(found, tuple):
        ddp.register_comm_hook(*found)
    with Records() as messages:
        for step in range(3):

            def closure(step: int = step) -> None:
                optimizer.zero_grad()
                loss_of(ddp, step, rank.rank).backward()

            optimizer.step(closure)
    return messages


@pytest.mark.parametrize("how", ["attach", "comm_hook"])
def test_a_new_optimizer_that_steps_with_a_closure_has_not_stepped_before(
    ranks: Ranks, how: str
) -> None:
    assert ranks.run(2, first_steps_with_closures, how, False) == [[], []]


def test_an_optimizer_that_steps_with_a_closure_may_have_stepped_before(ranks: Ranks) -> None:
    [line], nothing = ranks.run(2, first_steps_with_closures, "attach", True)
    assert "the optimizer has taken steps before" in line
    assert nothing == []


def test_the_error_of_a_nan_names_the_scaler(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(2, overflow):
        assert error is not None
        assert "grad_scaler=" in error


def overflow(rank: Rank) -> None:
    model, _ = attached(rank, OKTOPK)
    (loss_of(model, 0, rank.rank) * torch.inf).backward()
