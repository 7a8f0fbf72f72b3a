"""The model of a run: its workload, options of DDP, weights to begin with, and buffers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import checkpoint
from ..algorithms import Dense
from ..common.cache import expanded
from ..common.errors import UserError
from ..common.together import attempt
from ..workloads.base import Context, Workload
from .config.config import Config
from .folders import CHECKPOINT


def make_workload(config: Config, device: torch.device, local_rank: int) -> Workload[Any]:
    """The workload of a configuration. Collective."""
    sparse = not isinstance(config.compression.algorithm(), Dense)
    moments = 1 if config.optimizer.name == "sgd" else 2
    return config.workload.make(
        Context(
            device=device,
            local_rank=local_rank,
            batch_size=config.run.batch_size,
            nsteps_update=config.run.nsteps_update,
            seed=config.run.seed,
            copies=2 + sparse + moments,  # weights and gradients, residuals, the optimizer's
        )
    )


def no_broadcast() -> dict[str, Any]:
    """DDP's option not to broadcast buffers in every step; its name changed in torch 2.13.

    Running statistics are averaged once an epoch instead, when they are needed.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    new = "forward_sync_buffers"
    return {new if new in names else "broadcast_buffers": False}


def take_weights(net: nn.Module, path: str) -> None:
    """Begin with the weights that --pretrain names."""
    weights, problem = attempt(lambda: read_weights(expanded(path))), ""
    try:
        missing, others = net.load_state_dict(weights, strict=False)
        if missing:
            problem = f"it has no {missing[0]}"
        elif others:
            problem = f"the model has no {others[0]}"
    except RuntimeError as error:  # the first line is a heading
        problem = str(error).splitlines()[1].strip().rstrip(".")
    if problem:
        raise UserError(
            f"--pretrain {path} does not fit the model: {problem}. Use weights of the same "
            "workload, and the flags of the model that they belong to, such as --width and --depth"
        )


def read_weights(path: Path) -> dict[str, Tensor]:
    """A model's state_dict from a run's folder, a checkpoint, or a file."""
    try:
        if path.is_dir():
            inner = path / CHECKPOINT
            found: Any = checkpoint.read_shared(inner if inner.is_dir() else path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--pretrain {path}: there is no such file or folder") from None
    except Exception as error:  # torch.load raises all sorts
        problem = " ".join(str(error).split())[:200] or "it is no file that torch.save wrote"
        raise UserError(f"--pretrain {path} cannot be read: {problem}") from None
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise UserError(f"--pretrain {path} holds no state_dict of a model")
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def copy_buffers(net: nn.Module) -> dict[str, Tensor]:
    """The model's running statistics and the like."""
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def set_buffers(net: nn.Module, values: dict[str, Tensor]) -> None:
    """The reverse of `copy_buffers`."""
    for name, buffer in net.named_buffers():
        buffer.copy_(values[name])


def average_buffers(net: nn.Module) -> None:
    """Give all workers the mean of their running statistics."""
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
