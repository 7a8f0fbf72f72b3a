"""A small step before the first one, so that kernels are compiled when a reduction is made."""

from __future__ import annotations

import functools

import torch

from ..plan import Plan, Vectors, rooms
from .step import GpuStep

_NUMEL, _K = 4096, 256


@functools.cache
def rehearse(device: torch.device) -> None:
    """Run all phases once. If Triton cannot compile here, this raises before any rank waits."""
    from ...wire.codecs import CODECS  # which imports kernels

    codec = CODECS["int8"](torch.float32)
    code, values_at, positions_at, room = rooms(codec, _K, _NUMEL, 4)
    plan = Plan(
        _NUMEL, 1, 0, _K, _K, _K, _K, 1, _K, _NUMEL, code, values_at, positions_at, room, room,
        (_NUMEL,), codec,
    )  # fmt: skip
    gradient = torch.linspace(-1, 1, _NUMEL, device=device)
    vectors = Vectors([gradient], [gradient], torch.zeros_like(gradient), gradient.clone())
    step = GpuStep(plan, torch.float32, device)
    step.begin([1, 0, 1, 0, 0, _NUMEL])
    step.prepare(vectors, _K, -1)
    step.combine()
    step.gathered[0] = step.reply
    step.apply(vectors)
    applied = step.read().applied
    if applied != (_K,):
        raise RuntimeError(
            f"Triton's kernels do not work on {device}: {applied[0]} of {_K} entries were applied. "
            "Please report this; without the package triton, slower kernels run"
        )
