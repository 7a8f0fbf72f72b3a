"""Regions: consecutive ranges of elements, each summed by the rank that owns it."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..core.comm import Comm
from ..wire.message import Entries


def agree_on_regions(comm: Comm, offered: Entries) -> tuple[int, ...]:
    """Boundaries that every rank agrees on: the mean of where each would cut its own offer."""
    cuts = torch.tensor(equal_cuts(comm, offered), device=comm.device)
    comm.transport.all_reduce(cuts)
    boundaries = (0, *(cuts // comm.size).tolist(), comm.numel)
    if any(low > high for low, high in pairwise(boundaries)):
        raise comm.nonsense(f"boundaries of regions {boundaries}")
    return boundaries


def equal_cuts(comm: Comm, entries: Entries) -> list[int]:
    """Where to cut entries into parts of equal count, one for each rank."""
    if not len(entries):
        return [comm.numel * j // comm.size for j in range(1, comm.size)]
    positions = (
        torch.arange(1, comm.size, device=entries.indices.device) * len(entries) // comm.size
    )
    cuts: list[int] = entries.indices[positions].tolist()
    return cuts
