"""The kernels for CPUs: numba, without the GIL, on as many threads as torch uses.

How it is fast: the loop that accumulates looks at 64 elements at a time, which the compiler
turns into vector instructions, and only blocks that hold a large element are looked at one by
one. Memory is read and written once.

How it is safe: numba's own parallel loops must not be entered from two threads at once, so
ranges are handed to a plain thread pool instead. Compiled code is cached on disk beside this
file, or where numba finds a writable place; without one it is compiled anew in each process.
Ranks that start together take turns through a lock file, so that one compiles and the others
load.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba import uintp
from torch import Tensor

from .reference import index_dtype, threshold_bits

log = logging.getLogger(__name__)

_UNSIGNED = {np.dtype("float32"): np.dtype("uint32"), np.dtype("float64"): np.dtype("uint64")}
_BLOCK = 64
_MIN_CHUNK = 1 << 16
"""Elements below which a second thread costs more than it saves."""

_Result = TypeVar("_Result")


def accumulate(
    residual: Tensor, gradient: Tensor, out: Tensor, threshold: float
) -> tuple[Tensor, Tensor, bool]:
    r, g, o = residual.numpy(), gradient.numpy(), out.numpy()
    bits, (limit, mask, infinity) = _bits(o), _limits(threshold, out.dtype)
    loop = _compiled(out.dtype, index_dtype(out.numel()))["accumulate"]
    peaks = []

    def run(low: int, high: int, i: Any, v: Any) -> int:
        end, peak = loop(r, g, o, bits, low, high, limit, mask, i, v)
        peaks.append(peak)
        return int(end)

    indices, values = _compact(run, out.numel(), out.dtype)
    return indices, values, all(peak < infinity for peak in peaks)


def select(dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    d = dense.numpy()
    bits, (limit, mask, _) = _bits(d), _limits(threshold, dense.dtype)
    loop = _compiled(dense.dtype, index_dtype(dense.numel()))["select"]

    def run(low: int, high: int, i: Any, v: Any) -> int:
        return int(loop(d, bits, low, high, limit, mask, i, v))

    return _compact(run, dense.numel(), dense.dtype)


def histogram(values: Tensor, prefix: int, shift: int, bits: int) -> Tensor:
    v = _bits(values.numpy())
    unsigned = v.dtype.type
    _, mask, _ = _limits(0.0, values.dtype)
    loop = _compiled(values.dtype)["histogram"]

    def run(low: int, high: int) -> Any:
        counts = np.zeros(2**bits, np.int64)
        loop(v, low, high, mask, unsigned(prefix), unsigned(shift), unsigned(bits), counts)
        return counts

    return torch.from_numpy(sum(_parallel(run, _chunks(values.numel()))))


def keep(indices: Tensor, values: Tensor, threshold: float, ties: int) -> tuple[Tensor, Tensor]:
    limit, mask, _ = _limits(threshold, values.dtype)
    i, v = indices.numpy(), values.numpy()
    kept_indices, kept_values = torch.empty_like(indices), torch.empty_like(values)
    count = _compiled(values.dtype, indices.dtype)["keep"](
        i, v, _bits(v), limit, mask, ties, kept_indices.numpy(), kept_values.numpy()
    )
    return kept_indices[:count], kept_values[:count]


def merge(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
) -> tuple[Tensor, Tensor]:
    most = indices.numel() + other_indices.numel()
    union, total = indices.new_empty(most), values.new_empty(most)
    count = _compiled(values.dtype, indices.dtype)["merge"](
        indices.numpy(),
        values.numpy(),
        other_indices.numpy(),
        other_values.numpy(),
        union.numpy(),
        total.numpy(),
    )
    return union[:count], total[:count]


def add_at(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    loop = _compiled(dense.dtype, indices.dtype)["add_at"]
    loop(dense.numpy(), indices.numpy(), values.numpy())


def clear_common(dense: Tensor, indices: Tensor, applied: Tensor) -> None:
    loop = _compiled(dense.dtype, indices.dtype)["clear_common"]
    loop(dense.numpy(), indices.numpy(), applied.numpy())


# ---------------------------------------------------------------------------------------------
# Around the loops: views, ranges, threads.


def _bits(array: Any) -> Any:
    return array.view(_UNSIGNED[array.dtype])


def _limits(threshold: float, dtype: torch.dtype) -> tuple[Any, Any, int]:
    """The threshold's bits, the mask that removes the sign, and the bits of infinity."""
    unsigned = np.uint32 if dtype == torch.float32 else np.uint64
    mask = unsigned(np.iinfo(unsigned).max >> 1)
    return unsigned(threshold_bits(threshold, dtype)), mask, threshold_bits(float("inf"), dtype)


def _chunks(numel: int) -> list[tuple[int, int]]:
    parts = max(1, min(torch.get_num_threads(), numel // _MIN_CHUNK))
    return [(numel * j // parts, numel * (j + 1) // parts) for j in range(parts)]


_room = threading.local()


def _compact(
    run: Callable[[int, int, Any, Any], int], numel: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The entries that run(low, high, indices, values) writes from position `low` onward.

    The room it writes to has a place for every element, so no selection can overflow; it is
    kept for the next call, and pages that were never written to never become real memory.
    """
    room: tuple[Tensor, Tensor] | None = getattr(_room, str(dtype), None)
    if room is None or room[0].numel() < numel or room[0].dtype != index_dtype(numel):
        room = (
            torch.empty(numel, dtype=index_dtype(numel), device="cpu"),
            torch.empty(numel, dtype=dtype, device="cpu"),
        )
    indices, values = room
    i, v = indices.numpy(), values.numpy()
    chunks = _chunks(numel)
    ends = _parallel(lambda low, high: run(low, high, i, v), chunks)
    pieces = [slice(low, end) for (low, _), end in zip(chunks, ends, strict=True)]
    crowded = sum(end - low for (low, _), end in zip(chunks, ends, strict=True)) > numel // 4
    setattr(_room, str(dtype), None if crowded else room)
    return torch.cat([indices[p] for p in pieces]), torch.cat([values[p] for p in pieces])


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()
_compile_lock = threading.Lock()


def _forget_threads() -> None:
    """A forked child has none of its parent's threads, and perhaps a lock held by one."""
    global _pool, _pool_lock, _compile_lock
    _pool, _pool_lock, _compile_lock = None, threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


def _parallel(run: Callable[[int, int], _Result], chunks: list[tuple[int, int]]) -> list[_Result]:
    """run(low, high) for every range, the first one here and the others in the pool."""
    global _pool
    if len(chunks) == 1:
        return [run(*chunks[0])]
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="oktopk-kernel")
    others = [_pool.submit(run, *chunk) for chunk in chunks[1:]]
    return [run(*chunks[0]), *(other.result() for other in others)]


# ---------------------------------------------------------------------------------------------
# The loops. Unsigned loop variables spare numba its check for negative indexes, which would
# keep the compiler from using vector instructions.


def _accumulate(r, g, o, bits, low, high, limit, mask, indices, values):  # type: ignore[no-untyped-def]
    word = bits.dtype.type
    end, peak, j, high = uintp(low), word(0), uintp(low), uintp(high)
    while j < high:
        width = min(uintp(_BLOCK), high - j)
        largest = word(0)
        if width == uintp(_BLOCK):
            for q in range(uintp(_BLOCK)):
                o[j + q] = r[j + q] + g[j + q]
            for q in range(uintp(_BLOCK)):
                largest = max(largest, word(bits[j + q] & mask))
        else:
            for q in range(width):
                o[j + q] = r[j + q] + g[j + q]
                largest = max(largest, word(bits[j + q] & mask))
        if largest >= limit:
            peak = max(peak, largest)
            for q in range(width):
                # Written always, kept if large: a branch here would be mispredicted. There is
                # room, since no more entries were kept than elements seen.
                indices[end] = j + q
                values[end] = o[j + q]
                end += uintp((bits[j + q] & mask) >= limit)
        j += width
    return end, peak


def _select(dense, bits, low, high, limit, mask, indices, values):  # type: ignore[no-untyped-def]
    word = bits.dtype.type
    end, j, high = uintp(low), uintp(low), uintp(high)
    while j < high:
        width = min(uintp(_BLOCK), high - j)
        largest = word(0)
        if width == uintp(_BLOCK):
            for q in range(uintp(_BLOCK)):
                largest = max(largest, word(bits[j + q] & mask))
        else:
            for q in range(width):
                largest = max(largest, word(bits[j + q] & mask))
        if largest >= limit:
            for q in range(width):
                indices[end] = j + q
                values[end] = dense[j + q]
                end += uintp((bits[j + q] & mask) >= limit)
        j += width
    return end


def _histogram(bits, low, high, mask, prefix, shift, width, counts):  # type: ignore[no-untyped-def]
    digit_mask = uintp(counts.size - 1)
    for j in range(uintp(low), uintp(high)):
        digit = (bits[j] & mask) >> shift
        if digit >> width == prefix:
            counts[uintp(digit) & digit_mask] += 1


def _keep(indices, values, bits, limit, mask, ties, kept_indices, kept_values):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(indices.size):
        magnitude = bits[j] & mask
        if magnitude > limit or (magnitude == limit and ties > 0):
            ties -= magnitude == limit
            kept_indices[count] = indices[j]
            kept_values[count] = values[j]
            count += 1
    return count


def _merge(a_indices, a_values, b_indices, b_values, indices, values):  # type: ignore[no-untyped-def]
    a = b = count = 0
    while a < a_indices.size or b < b_indices.size:
        take_a = b == b_indices.size or (a < a_indices.size and a_indices[a] <= b_indices[b])
        take_b = a == a_indices.size or (b < b_indices.size and b_indices[b] <= a_indices[a])
        if take_a and take_b:
            indices[count], values[count] = a_indices[a], a_values[a] + b_values[b]
        elif take_a:
            indices[count], values[count] = a_indices[a], a_values[a]
        else:
            indices[count], values[count] = b_indices[b], b_values[b]
        a += take_a
        b += take_b
        count += 1
    return count


def _add_at(dense, indices, values):  # type: ignore[no-untyped-def]
    for j in range(indices.size):
        dense[indices[j]] += values[j]


def _clear_common(dense, indices, applied):  # type: ignore[no-untyped-def]
    a = 0
    for j in range(indices.size):
        while a < applied.size and applied[a] < indices[j]:
            a += 1
        if a < applied.size and applied[a] == indices[j]:
            dense[indices[j]] = 0


# ---------------------------------------------------------------------------------------------
# Compiling.


def _jit(function: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no place to cache: neither the package, nor a home directory
        log.info("no writable place to cache compiled kernels; set NUMBA_CACHE_DIR to name one")
        return numba.njit(nogil=True)(function)


_JITTED = {
    name: _jit(function)
    for name, function in {
        "accumulate": _accumulate,
        "select": _select,
        "histogram": _histogram,
        "keep": _keep,
        "merge": _merge,
        "add_at": _add_at,
        "clear_common": _clear_common,
    }.items()
}
_ready: set[tuple[torch.dtype, torch.dtype]] = set()


def _compiled(dtype: torch.dtype, indices: torch.dtype = torch.int32) -> dict[str, Any]:
    """The loops, compiled for these types under a lock that all processes share."""
    key = (dtype, indices)
    if key not in _ready:
        with _compile_lock, _file_lock():
            if key not in _ready:
                _compile(*key)
                _ready.add(key)
    return _JITTED


def _compile(dtype: torch.dtype, indices: torch.dtype) -> None:
    """Call each loop once on nothing; numba compiles it or loads it from its cache."""
    v = torch.empty(0, dtype=dtype, device="cpu").numpy()
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    bits, (limit, mask, _) = _bits(v), _limits(0.0, dtype)
    _JITTED["accumulate"](v, v, v, bits, 0, 0, limit, mask, i, v)
    _JITTED["select"](v, bits, 0, 0, limit, mask, i, v)
    _JITTED["histogram"](bits, 0, 0, mask, limit, limit, limit, np.zeros(1, np.int64))
    _JITTED["keep"](i, v, bits, limit, mask, 0, i, v)
    _JITTED["merge"](i, v, i, v, i, v)
    _JITTED["add_at"](v, i, v)
    _JITTED["clear_common"](v, i, i)


@contextlib.contextmanager
def _file_lock() -> Iterator[None]:
    """One process at a time, where a lock file can be had; numba's cache is not safe alone."""
    with contextlib.ExitStack() as stack:
        folder = getattr(_JITTED["accumulate"].stats, "cache_path", None)
        # No cache, a folder that cannot be written to, a file system without locks: no lock.
        with contextlib.suppress(OSError):
            if folder:
                os.makedirs(folder, exist_ok=True)
                file = stack.enter_context(open(os.path.join(folder, "oktopk.lock"), "w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
