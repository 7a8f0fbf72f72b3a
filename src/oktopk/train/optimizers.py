"""Optimizers and learning rates by configuration."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import nn

from ..adam import AdamW
from .config.config import Optimizer


def make_optimizer(config: Optimizer, net: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW; weights of matrices decay, biases and norms do not."""
    groups = [
        {
            "params": [p for p in net.parameters() if p.ndim > 1],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.momentum, 0.98)
    if config.name == "adamw":
        refresh = config.refresh_interval or None
        return AdamW(groups, config.lr, betas, refresh_interval=refresh, fused=True)
    if config.name == "torch-adamw":
        return torch.optim.AdamW(groups, config.lr, betas, fused=True)
    momentum = 0.0 if config.momentum_correction else config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=momentum > 0)


def learning_rate(config: Optimizer, step: int, steps: int, epoch: int) -> float:
    """Of a step. It depends on nothing else, so that a resumed run needs no more."""
    if config.schedule == "anneal":
        with contextlib.suppress(OverflowError):  # after very many epochs nothing is left of it
            return config.lr / config.anneal ** (epoch - 1)
        return 0.0
    if config.schedule == "onecycle":  # linear rise over a tenth of the run, then half a cosine
        rise = max(1, steps // 10)
        if step < rise:
            return config.lr * (step + 1) / rise
        return config.lr * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
    return config.lr
