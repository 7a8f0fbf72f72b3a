"""Copies of compressed models: pickled, deep-copied, averaged over time."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oktopk
from models import SMALL, logged, net, parameters, run, sgd
from ranks import Rank, Ranks

OKTOPK = oktopk.OkTopk(density=0.05)
EVERYBODY = 8
"""DDP's own copies need the group of all ranks."""


def compressed(rank: Rank) -> tuple[DDP, oktopk.Compression]:
    ddp = DDP(net(), bucket_cap_mb=0.01)
    return ddp, oktopk.attach(ddp, OKTOPK, group=rank.own_group, **SMALL)


def pickled(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def copied(rank: Rank, how: str) -> tuple[list[str], Tensor, Tensor, list[int]]:
    """Copy in mid-training, and go on with the copy, densely and then compressed, and with the
    original."""
    ddp, handle = compressed(rank)
    run(rank, ddp, sgd(ddp), range(2))
    plain = DDP(copy.deepcopy(ddp.module), bucket_cap_mb=0.01)
    with logged() as told:
        twin = copy.deepcopy(ddp) if how == "copy" else unpickled(pickled(ddp))
    for model in (plain, twin):
        run(rank, model, sgd(model), range(2, 4))
    dense = parameters(twin)
    twin = copy.deepcopy(twin)
    again = oktopk.attach(twin, OKTOPK, group=rank.own_group, **SMALL)
    run(rank, twin, sgd(twin), range(4, 6))
    run(rank, ddp, sgd(ddp), range(2, 5))
    steps = [kept.stats().totals.steps for kept in (handle, again)]
    return told, parameters(plain), dense, steps


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_a_copy_averages_densely_and_says_so(ranks: Ranks, how: str) -> None:
    for told, plain, dense, steps in ranks.run(EVERYBODY, copied, how):
        assert len(told) == 1
        assert "is not compressed itself" in told[0]
        assert torch.equal(plain, dense)
        assert steps == [5, 2]


def both_pickled(rank: Rank) -> tuple[bytes, bytes]:
    return pickled(DDP(net())), pickled(compressed(rank)[0])


def test_a_process_without_ranks_says_what_plain_ddp_says(ranks: Ranks) -> None:
    errors = []
    for data in ranks.run(EVERYBODY, both_pickled)[0]:
        with pytest.raises(ValueError, match="process group has not been initialized") as caught:
            unpickled(data)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def averaged(rank: Rank) -> tuple[Tensor, ...]:
    """Means of the parameters over steps: equal and exponential ones, and as they should be."""
    ddp, _ = compressed(rank)
    equal = AveragedModel(ddp)
    exponential = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen: list[Tensor] = []

    def each(step: int) -> None:
        equal.update_parameters(ddp)
        exponential.update_parameters(ddp)
        seen.append(parameters(ddp))

    run(rank, ddp, sgd(ddp), range(4), each)
    expected = seen[0]
    for weights in seen[1:]:
        expected = 0.9 * expected + 0.1 * weights
    return parameters(equal), torch.stack(seen).mean(0), parameters(exponential), expected


def test_averages_of_models(ranks: Ranks) -> None:
    for equal, mean, exponential, expected in ranks.run(EVERYBODY, averaged):
        torch.testing.assert_close(equal, mean)
        torch.testing.assert_close(exponential, expected)
        assert not torch.equal(equal, exponential)
