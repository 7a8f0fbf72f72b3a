"""PyTorch's own tests of DistributedDataParallel, with compression attached to every model.

They come with torch. Nearly all of them want GPUs, so they are told that CPUs are such. What is
sent is everything, so results must be those of plain DDP. Cases are found by what they use: those
of another version of torch are run, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import traceback
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import oktopk
from launch import Warm
from ranks import Rank, Ranks

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

GPU, OWN = "needs a GPU", "is about hooks of its own"
LEFT_OUT = {
    "SyncBatchNorm|sync_bn|ddp_inference": "needs a GPU for SyncBatchNorm",
    "ddp_device$|logging_data_gpu|apply_optim_in_backward|native_mixed_precision_.*grad_": GPU,
    "hook_parity_allreduce_process_group|hook_parity_post_localSGD|hook_with_optimizer": OWN,
    "hook_pickling_powerSGD": OWN,
    "test_ddp_uneven_inputs$": "takes minutes",
    "test_ddp_compile_static_graph": "takes half a minute; test_ddp.py has compiled models",
    "profiling": "counts the messages of plain DDP",
    "comm_hook_logging": "says that there is no hook",
    "optimizer_step_reload": "rank 0 may remove the file before the other rank has read it",
}
"""Patterns of names, and why these cases are not run."""
REFUSED = {
    "test_ddp_hook_parity_allreduce": "can only be called once",
    "test_ddp_hook_parity_powerSGD": "can only be called once",
    "test_ddp_native_mixed_precision_ignored_params": "none with mixed_precision=",
}
"""Cases in which DDP has another hook, or wants one, and what is said then."""


class OnCPU(TorchFunctionMode):
    """Tensors that should go to a GPU stay where they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        moves = func in (torch.Tensor.to, torch._C._nn._parse_to)
        args = tuple(_on_cpu(value, moves) for value in args)
        kwargs = {key: _on_cpu(value, key == "device") for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _on_cpu(value: Any, device: bool) -> Any:
    number = device and isinstance(value, int) and not isinstance(value, bool)
    name = isinstance(value, str) and value.startswith("cuda")
    return torch.device("cpu") if number or name or isinstance(value, torch.device) else value


class _Device(contextlib.nullcontext[None]):
    """For torch.cuda.device, of which torch wants to know that it is a class."""


@contextlib.contextmanager
def pretended_gpus() -> Iterator[None]:
    init = nn.parallel.DistributedDataParallel.__init__

    def without_devices(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **(options | {"device_ids": None, "output_device": None}))

    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.nn.Module.cuda": lambda self, *_: self,
            "torch.cuda.set_device": lambda *_: None,
            "torch.cuda.synchronize": lambda *_, **__: None,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.device": _Device,
            "torch.nn.parallel.DistributedDataParallel.__init__": without_devices,
        }.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(OnCPU())
        yield


@contextlib.contextmanager
def attached_to_every_model() -> Iterator[None]:
    init = nn.parallel.DistributedDataParallel.__init__

    def attaching(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        oktopk.attach(self, oktopk.OkTopk(density=1.0), dense_below=8, bucket_mb=0.01)

    with mock.patch("torch.nn.parallel.DistributedDataParallel.__init__", attaching):
        yield


@functools.cache
def suite() -> Any:
    """The class of the cases. Decorators that ask for GPUs are gone."""
    import torch.testing._internal.common_distributed as common

    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, lambda *_, **__: lambda function: function)
    common.skip_if_no_gpu = lambda function: function
    with mock.patch.dict(os.environ, BACKEND="gloo", WORLD_SIZE="2"):
        from torch.testing._internal.distributed.distributed_test import DistributedTest
    from torch.testing._internal.common_utils import TestCase

    class Cases(DistributedTest._DistTestBase, TestCase):
        world_size = 2

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    return Cases


def cases(rank: Rank) -> list[str]:
    """Names of all cases that use DDP, themselves or in methods that they call."""

    def uses_ddp(name: str) -> bool:
        source = inspect.getsource(inspect.unwrap(getattr(suite(), name)))
        if "DistributedDataParallel(" in source:
            return True
        called = set(re.findall(r"self\.(_test\w+|_run\w+)\(", source)) - {name}
        return any(uses_ddp(method) for method in called if hasattr(suite(), method))

    return [name for name in dir(suite()) if name.startswith("test_") and uses_ddp(name)]


def run_case(rank: Rank, name: str, compressed: bool) -> str:
    """Tell "passed", "skipped" or what went wrong."""
    from torch.testing._internal.common_utils import SEED, set_rng_seed

    set_rng_seed(SEED)
    dist.set_debug_level(dist.DebugLevel.OFF)  # type: ignore[attr-defined]
    case = suite()(name)
    case.rank = rank.rank
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, BACKEND="gloo", WORLD_SIZE="2"))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(pretended_gpus())
            if compressed:
                stack.enter_context(attached_to_every_model())
            getattr(case, name)()
    except unittest.SkipTest:
        return "skipped"
    except BaseException:
        return traceback.format_exc()
    return "passed"


@pytest.fixture(scope="module")
def pair(warm: Warm) -> Iterator[Ranks]:
    """Two processes of their own: the cases want all ranks, and may leave ranks in disorder."""
    pool = Ranks(warm, (2,), timeout=15.0)
    yield pool
    pool.stop()


def outcome(pair: Ranks, name: str, compressed: bool) -> str:
    """Tell "passed" or "skipped" if all ranks did. Else what went wrong, and ranks start anew."""
    told = [answer or error for answer, error in pair.outcomes(2, run_case, name, compressed)]
    if told[0] == told[1] and told[0] in ("passed", "skipped"):
        return told[0]
    pair.stop()
    return "\n".join(str(text) for text in told)


def test_cases_that_plain_ddp_passes(pair: Ranks) -> None:
    found = pair.run(2, cases)[0]
    chosen = [name for name in found if not any(re.search(p, name) for p in LEFT_OUT)]
    outcomes = {name: outcome(pair, name, True) for name in chosen if name not in REFUSED}
    passed = [name for name, told in outcomes.items() if told == "passed"]
    failed = {n: told for n, told in outcomes.items() if told not in ("passed", "skipped")}
    ours = [f"{n}\n{told}" for n, told in failed.items() if outcome(pair, n, False) == "passed"]
    assert not ours, "\n\n".join(ours)
    assert len(passed) > 40


@pytest.mark.parametrize("name", REFUSED)
def test_cases_with_another_hook_are_refused(pair: Ranks, name: str) -> None:
    assert outcome(pair, name, False) == "passed"
    assert REFUSED[name] in outcome(pair, name, True)
