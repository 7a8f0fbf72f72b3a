"""Unusual but legal ways to train with DDP: where everything is sent, results are plain DDP's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import oktopk
from models import (
    assert_conserved,
    attached,
    batch,
    gradients,
    loss_of,
    net,
    parameters,
    run,
    sgd,
)
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)
Wrap = Callable[..., DDP]
Form = Callable[[Rank, Wrap], Tensor]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    """It trains with models from `wrap(module, **options of DDP)`, and returns what to compare."""
    FORMS[function.__name__] = function
    return function


def grads(*models: nn.Module) -> Tensor:
    """All gradients as one vector; -1 where there is none."""
    found = [p.grad if p.grad is not None else p - p - 1 for m in models for p in m.parameters()]
    return torch.cat([gradient.detach().flatten().double() for gradient in found])


def noise(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@form
def two_backwards_of_one_graph(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    for step in range(3):
        loss = loss_of(model, step, rank.rank)
        loss.backward(retain_graph=True)
        loss.backward()
    return grads(model)


@form
def backwards_that_accumulate_averages(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    for step in range(4):
        loss_of(model, step, rank.rank).backward()
    return grads(model)


@form
def two_forwards_for_one_backward(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(model, step, rank.rank) + loss_of(model, step + 50, rank.rank)).backward()
        optimizer.step()
    return parameters(model)


@form
def gradients_that_stay_in_the_buckets(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step, rank.rank).backward()
        optimizer.step()
    return parameters(model)


@form
def a_penalty_on_gradients(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, rank.rank)
        loss = nn.functional.cross_entropy(model(x.requires_grad_()), y)
        [slope] = torch.autograd.grad(loss, [x], create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    return parameters(model)


@form
def a_graph_of_backward(rank: Rank, wrap: Wrap) -> Tensor:
    """Only these two work with plain DDP."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(9, 9))

        def forward(self, x: Tensor) -> Tensor:
            return (self.p**3 * x).sum()

    one, model = wrap(One()), wrap(net(), gradient_as_bucket_view=True)
    for step in range(3):
        one(noise(step + 9 * rank.rank, 9, 9)).backward(create_graph=True)
        if step < 2:
            loss_of(model, step, rank.rank).backward(create_graph=step == 1)
    assert all(p.grad is not None and p.grad.requires_grad for p in model.parameters())
    return grads(one, model)


class Blocks(nn.Module):
    """Blocks that are checkpointed, one of them used twice; with a dead end, if wanted."""

    def __init__(self, reentrant: bool, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.unused = nn.Linear(32, 32) if unused else None
        self.head = nn.Linear(32, 10)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpoint(block, x, use_reentrant=self.reentrant).relu()
        return self.head(x)  # type: ignore[no-any-return]


@form
def checkpoints_in_a_static_graph(rank: Rank, wrap: Wrap) -> Tensor:
    found = []
    for reentrant in (True, False):
        for unused in (True, False):
            model = wrap(Blocks(reentrant, unused), static_graph=True, bucket_cap_mb=0.003)
            run(rank, model, sgd(model), range(4))
            found.append(parameters(model))
    return torch.cat(found)


@form
def a_static_graph_that_is_set_later(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(Blocks(True, True))
    model._set_static_graph()
    run(rank, model, sgd(model), range(4))
    return parameters(model)


class Parts(nn.Module):
    """Returns objects; a part of it is not for training, a part is used in some steps only."""

    @dataclass
    class Output:
        logits: Tensor
        extra: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fixed = nn.Linear(32, 32)
        self.body = nn.Linear(32, 32)
        self.sometimes = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, sometimes: bool) -> Output:
        with torch.no_grad():
            fixed = self.fixed(x)
        x = self.body(fixed).relu()
        if sometimes:
            x = self.sometimes(x)
        return self.Output(self.head(x), {"fixed": fixed, "body": x})


@form
def objects_and_branches_without_gradients(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(Parts(), find_unused_parameters=True, bucket_cap_mb=0.003)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step, rank.rank)
        output = model(x, sometimes=step % 2 == rank.rank % 2)
        nn.functional.cross_entropy(output.logits, y).backward()
        optimizer.step()
        with torch.inference_mode():
            model.eval()(x, True)
        model.train()
    return parameters(model)


@form
def a_layer_frozen_after_attaching(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), find_unused_parameters=True)
    model.module[3].requires_grad_(False)
    run(rank, model, sgd(model), range(3))
    return parameters(model)


@form
def parameters_that_are_averaged_later(rank: Rank, wrap: Wrap) -> Tensor:
    module = net()
    late = [(name, p) for name, p in module.named_parameters() if name.startswith("5.")]
    first = module.get_parameter("0.weight")
    model = wrap(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first)
    for step in range(3):
        loss_of(model, step, rank.rank).backward()
    return grads(model.module[:5])  # DDP does not wait for the others


@form
def parameters_that_are_ignored(rank: Rank, wrap: Wrap) -> Tensor:
    """By name. One of them is tied to one that is not, one is at the top."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
            self.two.weight = self.one.weight
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)) * self.scale  # type: ignore[no-any-return]

    module = Tied()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["one.weight", "one.bias", "scale"])
    model = wrap(module)
    for step in range(2):
        model(noise(step + 9 * rank.rank, 4, 32)).square().sum().backward()
    return grads(model)


@form
def buffers_of_each_rank(rank: Rank, wrap: Wrap) -> Tensor:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 10))
    model = wrap(module, broadcast_buffers=False)
    run(rank, model, sgd(model), range(4))
    return torch.cat([parameters(model), *(b.flatten() for b in model.buffers())])


@form
def two_models_in_one_graph(rank: Rank, wrap: Wrap) -> Tensor:
    one, two = wrap(net(1), bucket_cap_mb=0.01), wrap(net(2))
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, rank.rank)
        nn.functional.cross_entropy(one(x) * two(x), y).backward()
        optimizer.step()
    return torch.cat([parameters(one), parameters(two)])


@form
def a_ddp_model_inside_another(rank: Rank, wrap: Wrap) -> Tensor:
    class Outer(nn.Module):
        def __init__(self, inner: DDP) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))  # type: ignore[no-any-return]

    module = Outer(wrap(net()))
    names = [f"inner.{name}" for name, _ in module.inner.named_parameters()]
    DDP._set_params_and_buffers_to_ignore_for_model(module, names)
    model = wrap(module)
    run(rank, model, sgd(model), range(3))
    return parameters(model)


@form
def parameters_of_several_types(rank: Rank, wrap: Wrap) -> Tensor:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.narrow, self.wide = nn.Linear(32, 32), nn.Linear(32, 10).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.narrow(x).double())  # type: ignore[no-any-return]

    model = wrap(Mixed())
    run(rank, model, sgd(model), range(3))
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@form
def empty_batches(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        count = 0 if step == rank.rank else 4
        model(noise(step + 9 * rank.rank, count, 32)).square().sum().mul(0.01).backward()
        optimizer.step()
    return parameters(model)


@form
def training_in_another_thread(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    thread = threading.Thread(target=run, args=(rank, model, sgd(model), range(3)))
    thread.start()
    thread.join()
    return parameters(model)


@form
def several_losses_in_one_backward(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    for step in range(3):
        x, y = batch(step, rank.rank)
        output = model(x)
        losses = [nn.functional.cross_entropy(output, y), output.square().mean()]
        torch.autograd.backward(losses)
    return grads(model)


@form
def other_parameters_for_one_call(rank: Rank, wrap: Wrap) -> Tensor:
    """torch.func.functional_call: gradients go to other tensors, and come to DDP later again."""
    model = wrap(net(), find_unused_parameters=True)
    run(rank, model, sgd(model), range(1))
    others = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with model.no_sync():
        x, _ = batch(7, rank.rank)
        torch.func.functional_call(model, others, (x,)).sum().backward()
    run(rank, model, sgd(model), range(1, 3))
    return torch.cat(
        [parameters(model), *(p.grad.flatten() for p in others.values() if p.grad is not None)]
    )


@form
def a_device_mesh(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), mesh=True)
    run(rank, model, sgd(model), range(3))
    return parameters(model)


@form
def uneven_inputs(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), bucket_cap_mb=0.01)
    with model.join():
        run(rank, model, sgd(model, momentum=0.0), range(2 + 2 * rank.rank))
    return parameters(model)


@form
def uneven_inputs_averaged_over_those_that_are_left(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), bucket_cap_mb=0.01)
    optimizer = sgd(model, momentum=0.0)
    for first in (0, 10):
        with model.join(divide_by_initial_world_size=False):
            run(rank, model, optimizer, range(first, first + 2 + 2 * rank.rank))
    run(rank, model, optimizer, range(20, 22))
    return parameters(model)


@form
def accumulation_in_the_buckets(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync():
            loss_of(model, step, rank.rank).backward()
        loss_of(model, step + 50, rank.rank).backward()
        optimizer.step()
    return parameters(model)


@form
def steps_past_ddp(rank: Rank, wrap: Wrap) -> Tensor:
    model = wrap(net())
    for step in range(4):
        loss_of(model.module if step % 2 else model, step, rank.rank).backward()
    return grads(model)


@form
def layers_unfrozen_in_stages(rank: Rank, wrap: Wrap) -> Tensor:
    module = net()
    layers = module[0], module[3], module[5]
    for stage in range(3):
        for number, layer in enumerate(layers):
            layer.requires_grad_(number >= 2 - stage)
        model = wrap(module)
        run(rank, model, sgd(model), range(2))
    return parameters(module)


@form
def parameters_with_gaps(rank: Rank, wrap: Wrap) -> Tensor:
    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gaps = nn.Parameter(noise(1, 32, 64)[:, ::2])
            self.turned = nn.Parameter(noise(2, 32, 32).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.gaps @ self.turned

    model = wrap(Gaps())
    for step in range(3):
        model(noise(step + 9 * rank.rank, 4, 32)).square().mean().backward()
    return grads(model)


@form
def an_optimizer_in_shards(rank: Rank, wrap: Wrap) -> Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of much

    model = wrap(net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=rank.group, lr=0.01
    )
    run(rank, model, optimizer, range(3))
    return parameters(model)


@form
def uneven_inputs_of_two_models(rank: Rank, wrap: Wrap) -> Tensor:
    """The second is without some parameters in some steps."""
    one, two = wrap(net()), wrap(Parts(), find_unused_parameters=True, bucket_cap_mb=0.003)
    with Join([one, two]):
        for step in range(1 + 2 * rank.rank):
            loss_of(one, step, rank.rank).backward()
            x, y = batch(step, rank.rank)
            nn.functional.cross_entropy(two(x, step % 2 == 0).logits, y).backward()
            for model in (one, two):
                sgd(model, momentum=0.0).step()
                model.zero_grad()
    return torch.cat([parameters(one), parameters(two)])


class Ends(nn.Module):
    """Its first and its last layer are used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.common, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, first: bool, last: bool) -> Tensor:
        x = self.common(self.first(x) if first else x)
        return self.last(x) if last else x


SKIP: dict[str, Any] = {
    "skip_all_reduce_unused_params": True,
    "find_unused_parameters": True,
    "bucket_cap_mb": 0.001,
}


@form
def buckets_that_are_left_out(rank: Rank, wrap: Wrap) -> Tensor:
    found = []
    for static in (False, True):
        for used in ([(0, 0)] * 3, [(1, 0)] * 3, [(0, 1)] * 3, [(1, 1), (0, 1), (1, 0), (0, 0)]):
            if static and len(used) == 4:
                continue
            model = wrap(Ends(), **SKIP, static_graph=static)
            for step, (first, last) in enumerate(used):
                x = noise(step + 9 * rank.rank, 4, 32)
                model(x, bool(first), bool(last)).square().mean().backward()
            found.append(grads(model))
    return torch.cat(found)


def compare(rank: Rank, name: str) -> tuple[Tensor, Tensor]:
    """What plain DDP comes to, and DDP with compression that leaves nothing out."""

    def plain(module: nn.Module, mesh: bool = False, **options: Any) -> DDP:
        group: dict[str, Any] = {"process_group": rank.group}
        if mesh:
            group = {"device_mesh": DeviceMesh.from_group(rank.group, "cpu")}
        return DDP(module, **group, **options)

    def compressed(module: nn.Module, **options: Any) -> DDP:
        model = plain(module, **options)
        algorithm = oktopk.OkTopk(density=1.0)
        oktopk.attach(model, algorithm, group=rank.own_group, dense_below=64, bucket_mb=0.018)
        return model

    return FORMS[name](rank, plain), FORMS[name](rank, compressed)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FORMS)
def test_results_are_those_of_plain_ddp(ranks: Ranks, name: str, size: int) -> None:
    for plain, compressed in ranks.run(size, compare, name):
        assert bool(plain.isfinite().all())
        torch.testing.assert_close(compressed, plain, atol=1e-6, rtol=1e-5)


def left_out(rank: Rank) -> list[tuple[dict[str, Tensor], ...]]:
    """For each step: residuals before, this rank's gradient, the average, residuals after."""
    module = Ends()
    ddp = DDP(module, process_group=rank.group, **SKIP)
    handle = oktopk.attach(ddp, OKTOPK, group=rank.own_group, dense_below=64, cleared="keep")
    named = dict(module.named_parameters())
    seen: list[tuple[dict[str, Tensor], ...]] = []
    for step, (first, last) in enumerate([(1, 1), (0, 1), (0, 0), (1, 0), (1, 1)]):
        x = noise(step + 9 * rank.rank, 4, 32)
        before = handle.state_dict()["residual"]
        loss = module(x, bool(first), bool(last)).square().mean()
        own = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
        ddp.zero_grad()
        ddp(x, bool(first), bool(last)).square().mean().backward()
        averages = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        gradient = dict(zip(named, own, strict=True))
        seen.append((before, gradient, averages, handle.state_dict()["residual"]))
    return seen


def test_what_waits_for_parameters_that_are_left_out_goes_on_waiting(ranks: Ranks) -> None:
    outcomes = ranks.run(3, left_out)
    assert_conserved(outcomes)
    for step in (1, 2):
        assert not outcomes[0][step][2]["first.weight"].any()
        waiting = [sum(o[step][i]["first.weight"] for o in outcomes) for i in (0, 3)]
        torch.testing.assert_close(waiting[0], waiting[1])
        assert waiting[0].any()


def torn(rank: Rank) -> None:
    ddp = DDP(Ends(), process_group=rank.group, **SKIP)
    oktopk.attach(ddp, OKTOPK, group=rank.own_group)
    ddp(noise(rank.rank, 4, 32), rank.rank == 1, True).sum().backward()


def test_ranks_that_leave_out_different_parameters_are_told(ranks: Ranks) -> None:
    for _, error in ranks.outcomes(3, torn):
        assert error is not None
        assert "DDP has left out first.weight on some ranks" in error


Kept = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], list[dict[str, Tensor]]]


def leftover(rank: Rank, algorithm: oktopk.Algorithm, dtype: torch.dtype) -> Kept:
    """This rank's residuals before and after each step, its gradients, and the averages."""
    model, handle = attached(rank, algorithm, net().to(dtype))
    after = [handle.state_dict()["residual"]]
    handle.subscribe(lambda stats: after.append(handle.state_dict()["residual"]))
    own, averages = [], []
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + 2 * rank.rank):
            x = noise(step + 9 * rank.rank, 4, 32).to(dtype)
            named = dict(model.module.named_parameters())
            found = torch.autograd.grad(model.module(x).square().mean(), list(named.values()))
            own.append(dict(zip(named, found, strict=True)))
            model.zero_grad()
            model(x).square().mean().backward()
            averages.append(gradients(model))
    return after, own, averages


@pytest.mark.parametrize("name", [*oktopk.names(), "bfloat16"])
def test_nothing_is_lost_in_averages_over_the_ranks_that_are_left(ranks: Ranks, name: str) -> None:
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    algorithm = oktopk.algorithm("oktopk" if name == "bfloat16" else name, density=0.05)
    outcomes = ranks.run(3, leftover, algorithm, dtype)
    for step in range(5):
        having = [(own[step], averages[step]) for _, own, averages in outcomes if step < len(own)]
        assert len(having) == [3, 2, 2, 1, 1][step]
        average = having[0][1]
        for name in average:
            assert all(torch.equal(average[name], other[name]) for _, other in having)
            entered = sum(after[step][name] for after, *_ in outcomes)
            entered += sum(own[name].float() for own, _ in having)
            left = sum(after[step + 1][name] for after, *_ in outcomes)
            left += len(having) * average[name].float()
            torch.testing.assert_close(left, entered, atol=1e-5, rtol=1e-5)
