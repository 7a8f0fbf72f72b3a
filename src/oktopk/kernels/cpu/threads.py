"""Ranges of a vector, on several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

_MIN_CHUNK = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_Result = TypeVar("_Result")
_room = threading.local()
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def parallel(run: Callable[[int, int], _Result], numel: int) -> list[_Result]:
    """Call run(low, high) for consecutive ranges of `numel` elements; returns all answers.

    The first range runs here, and the others run in the pool.
    """
    global _pool
    parts = torch.get_num_threads()
    if parts * _MIN_CHUNK > numel:
        parts = numel // _MIN_CHUNK
    if parts <= 1:
        return [run(0, numel)]
    chunks = [(numel * j // parts, numel * (j + 1) // parts) for j in range(parts)]
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="oktopk-kernel")
    others = [_pool.submit(run, *chunk) for chunk in chunks[1:]]
    return [run(*chunks[0]), *(other.result() for other in others)]


def compact(
    run: Callable[[int, int, Any, Any], int],
    numel: int,
    dtype: torch.dtype,
    index: torch.dtype,
    copy: bool = True,
) -> tuple[Tensor, Tensor]:
    """The entries that run(low, high, indices, values) writes from position `low` onward.

    `run` returns where they end. The room that it writes to has a place for every element, so no
    selection can overflow. It is kept for the next call; pages that were never written to never
    become real memory.

    Args:
        copy: False if the entries are used before the next call only.
    """
    room: tuple[Tensor, Tensor] | None = getattr(_room, str(dtype), None)
    if room is None or room[0].numel() < numel or room[0].dtype != index:
        room = (
            torch.empty(numel, dtype=index, device="cpu"),
            torch.empty(numel, dtype=dtype, device="cpu"),
        )
    indices, values = room
    i, v = indices.numpy(), values.numpy()
    pieces = parallel(lambda low, high: slice(low, run(low, high, i, v)), numel)
    count = sum([piece.stop - piece.start for piece in pieces])
    setattr(_room, str(dtype), None if count > numel // 4 else room)
    if len(pieces) == 1 and not copy:
        return indices[:count], values[:count]
    return torch.cat([indices[p] for p in pieces]), torch.cat([values[p] for p in pieces])


def _forget() -> None:
    """A forked child has none of its parent's threads, and perhaps a lock held by one."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
