"""The kernels for CPUs: numba, without the GIL, on as many threads as torch uses.

How it is fast: loops look at 64 elements at a time, with vector instructions, and only at those
that reach the threshold one by one. Memory is read and written once, and what is not needed soon
is written past the caches.

How it is safe: numba's own parallel loops must not be entered from two threads at once, so
ranges are handed to a plain thread pool instead. Compiled code is cached on disk beside this
file, or where numba finds a writable place; without one it is compiled anew in each process.
Ranks that start together take turns through a lock file, so that one compiles and the others
load.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from . import loops, reference
from .reference import QUANTUM, index_dtype

log = logging.getLogger(__name__)

_UNSIGNED: dict[Any, Any] = {np.float32: np.uint32, np.float64: np.uint64}
_MIN_CHUNK = 1 << 16
"""Elements below which a second thread costs more than it saves."""

_LARGE = 1 << 25
"""Bytes of a vector that would push everything else out of the caches."""

_Result = TypeVar("_Result")


def accumulate(
    residual: Tensor, gradient: Sequence[Tensor], out: Tensor, threshold: float
) -> tuple[Tensor, Tensor, list[bool]]:
    r, o, parts = residual.numpy(), out.numpy(), [part.numpy() for part in gradient]
    stops = list(itertools.accumulate(part.size for part in parts))
    bits, (limit, mask, infinity) = _bits(o), _limits(threshold, out.dtype)
    loop = _compiled(out.dtype, index_dtype(o.size))["accumulate"]
    finite = [True] * len(parts)

    def run(low: int, high: int, i: Any, v: Any) -> int:
        end = low
        for number, (part, stop) in enumerate(zip(parts, stops, strict=True)):
            start = stop - part.size
            here = slice(max(low, start), min(high, stop))
            if here.start < here.stop:
                g, aligned = part[here.start - start : here.stop - start], _aligned(o, here.start)
                where = (r[here], g, o[here], bits[here], here.start)
                end, peak = loop(*where, limit, mask, aligned, end, i, v)
                if peak >= infinity:
                    finite[number] = False
        return int(end)

    indices, values = _compact(run, o.size, out.dtype)
    return indices, values, finite


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
        counts = np.zeros((2, 2**bits), np.int64)
        loop(v, low, high, mask, unsigned(prefix), unsigned(shift), unsigned(bits), counts)
        return counts.sum(0)

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


def scatter(parts: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64):
        reference.scatter(parts, indices, values)
        return
    i, v = indices.numpy(), values.numpy()
    loop = _compiled(values.dtype, indices.dtype)["scatter"]

    def write(part: Tensor, start: int) -> None:
        d = part.numpy()
        _parallel(
            lambda low, high: loop(d[low:high], start + low, i, v, _aligned(d, low)),
            _chunks(d.size),
        )

    start = 0
    for part in parts:
        write(part, start)
        start += part.numel()


def take_common(dense: Tensor, indices: Tensor, values: Tensor, applied: Tensor) -> None:
    loop = _compiled(dense.dtype, indices.dtype)["take_common"]
    loop(dense.numpy(), indices.numpy(), values.numpy(), applied.numpy())


def sum_select(
    indices: Tensor, values: Tensor, ends: list[int], low: int, high: int, threshold: float
) -> tuple[Tensor, Tensor]:
    i, v, e = indices.numpy(), values.numpy(), np.array(ends, np.int64)
    bits, (limit, mask, _) = _bits(v), _limits(threshold, values.dtype)
    loop = _compiled(values.dtype, indices.dtype)["sum_select"]

    def run(start: int, stop: int, found: Any, sums: Any) -> int:
        return int(loop(i, v, e, low, start, stop, limit, mask, bits, found, sums))

    return _compact(run, high - low, values.dtype, indices.dtype)


def step_square(gradient: Tensor, moment: Tensor, *, grown: float, least: float) -> Tensor:
    vectors = _flat((gradient, moment))
    if vectors is None:
        return reference.step_square(gradient, moment, grown=grown, least=least)
    g, v = vectors
    bits, (_, mask, _) = _bits(g), _limits(0.0, gradient.dtype)
    most, scale = reference.fixed_point(least, g.size)
    scalars = [mask, *(g.dtype.type(x) for x in (grown, least)), most, scale]
    loop = _compiled(gradient.dtype)["step_square"]
    sums = _parallel(lambda low, high: int(loop(g, bits, v, low, high, *scalars)), _chunks(g.size))
    return torch.tensor(sum(sums) / (scale * g.size), dtype=torch.float64, device="cpu")


def adam(
    parameter: Tensor, gradient: Tensor, average: Tensor, moment: Tensor, **factors: float
) -> None:
    vectors = _flat((parameter, gradient, average, moment))
    if vectors is None:
        reference.adam(parameter, gradient, average, moment, **factors)
        return
    names = ("sign", "grown", "least", "weight", "decay", "shrink", "unbias", "eps", "lr")
    scalars = [vectors[0].dtype.type(factors[name]) for name in names]
    loop = _compiled(parameter.dtype)["adam"]
    _parallel(lambda low, high: loop(*vectors, low, high, *scalars), _chunks(parameter.numel()))


def count_gaps(indices: Tensor, low: int) -> tuple[int, int]:
    short, long = _compiled_codes(indices.dtype)["count_gaps"](indices.numpy(), low)
    return int(short), int(long)


def pack_gaps(indices: Tensor, low: int, out: Tensor) -> None:
    _compiled_codes(indices.dtype)["pack_gaps"](indices.numpy(), low, _unsigned(out))


def unpack_gaps(stream: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    found = torch.empty(stream.numel() + 1, dtype=dtype, device="cpu")
    loop = _compiled_codes(dtype)["unpack_gaps"]
    return found[: loop(_unsigned(stream), low, high, found.numpy())]


def pack_bits(indices: Tensor, low: int, out: Tensor) -> None:
    _compiled_codes(indices.dtype)["pack_bits"](indices.numpy(), low, out.numpy())


def unpack_bits(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    most = min(8 * bits.numel(), high - low + 7)
    found = torch.empty(most + 1, dtype=dtype, device="cpu")
    return found[: _compiled_codes(dtype)["unpack_bits"](bits.numpy(), low, high, found.numpy())]


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8, device="cpu")
    scales = torch.empty(-(-values.numel() // QUANTUM), dtype=torch.int32, device="cpu")
    _compiled_codes()["quantise"](_bits(values.numpy()), codes.numpy(), _unsigned(scales))
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    _compiled_codes()["dequantise"](codes.numpy(), _unsigned(scales), _bits(values.numpy()))
    return values


def checksum(words: Tensor) -> int:
    total = int(_compiled_codes()["checksum"](_unsigned(words)))
    return total - 2**64 if total >= 2**63 else total


# ---------------------------------------------------------------------------------------------
# Around the loops: views, ranges, threads.


def _bits(array: Any) -> Any:
    assert array.flags.c_contiguous  # loops look at memory, not at strides
    return array.view(_UNSIGNED[array.dtype.type])


def _flat(tensors: tuple[Tensor, ...]) -> list[Any] | None:
    """Their elements as they lie in memory; None if they do not lie densely, in the same order."""
    first = tensors[0]
    if first.dtype not in (torch.float32, torch.float64) or len({t.dtype for t in tensors}) > 1:
        return None
    if all(t.is_contiguous() for t in tensors):
        return [t.detach().numpy().reshape(-1) for t in tensors]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    same = all(t.stride() == first.stride() for t in tensors) and first.ndim in layouts
    if not (same and first.is_contiguous(memory_format=layouts[first.ndim])):
        return None
    return [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]


def _unsigned(tensor: Tensor) -> Any:
    array = tensor.numpy()
    return array.view(f"u{array.itemsize}")


def _aligned(array: Any, start: int) -> int:
    """How far behind `start` whole vectors can be written past the caches; -1 where the array is so
    small that it had better stay in them."""
    if array.nbytes < _LARGE:
        return -1
    return int((-array.ctypes.data // array.itemsize - start) % (64 // array.itemsize))


def _limits(threshold: float, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The threshold's bits, the mask that removes the sign, and the bits of infinity."""
    kind = np.float32 if dtype == torch.float32 else np.float64
    with np.errstate(over="ignore"):  # it is infinite then
        limit, infinity = (kind(number).view(_UNSIGNED[kind]) for number in (threshold, math.inf))
    mask = _UNSIGNED[kind](np.iinfo(_UNSIGNED[kind]).max >> 1)
    return limit & mask, mask, infinity


def _chunks(numel: int) -> list[tuple[int, int]]:
    parts = max(1, min(torch.get_num_threads(), numel // _MIN_CHUNK))
    return [(numel * j // parts, numel * (j + 1) // parts) for j in range(parts)]


_room = threading.local()


def _compact(
    run: Callable[[int, int, Any, Any], int],
    numel: int,
    dtype: torch.dtype,
    index: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The entries that run(low, high, indices, values) writes from position `low` onward.

    The room it writes to has a place for every element, so no selection can overflow; it is
    kept for the next call, and pages that were never written to never become real memory.
    """
    room: tuple[Tensor, Tensor] | None = getattr(_room, str(dtype), None)
    index = index or index_dtype(numel)
    if room is None or room[0].numel() < numel or room[0].dtype != index:
        room = (
            torch.empty(numel, dtype=index, device="cpu"),
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
# Compiling.


def _jit(function: Any) -> Any:
    # As in numpy, a division by zero is no exception: to look for one costs more than the division.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place to cache: neither the package, nor a home directory
        return numba.njit(**options)(function)


_OVER_VALUES = (
    *("accumulate", "select", "histogram", "keep", "merge", "add_at", "scatter", "take_common"),
    *("sum_select", "step_square", "adam"),
)
_OF_MESSAGES = (
    *("count_gaps", "pack_gaps", "unpack_gaps", "pack_bits", "unpack_bits"),
    *("quantise", "dequantise", "checksum"),
)
_JITTED = {name: _jit(getattr(loops, name)) for name in _OVER_VALUES + _OF_MESSAGES}
_Key = tuple[torch.dtype | None, torch.dtype]
"""Types of values (None: loops of messages) and of indexes."""
_ready: set[_Key] = set()
_announced = False


def prepare(dtype: torch.dtype, numel: int) -> None:
    # Loops without indexes are those of 32-bit ones.
    types = sorted({torch.int32, index_dtype(numel)}, key=str)
    _ensure(*((kind, indices) for kind in (None, dtype) for indices in types))


def _compiled(dtype: torch.dtype, indices: torch.dtype = torch.int32) -> dict[str, Any]:
    """The loops over values, compiled for these types."""
    return _ensure((dtype, indices))


def _compiled_codes(indices: torch.dtype = torch.int32) -> dict[str, Any]:
    """The loops of messages, compiled for this type."""
    return _ensure((None, indices))


def _ensure(*keys: _Key) -> dict[str, Any]:
    """Compile under a lock that all processes share, unless that has been done."""
    if not _ready.issuperset(keys):
        with _compile_lock, _file_lock():
            for key in keys:
                if key not in _ready:
                    _compile(*key)
                    _ready.add(key)
    return _JITTED


def _compile(dtype: torch.dtype | None, indices: torch.dtype) -> None:
    """Call each loop once on nothing; numba compiles it or loads it from its cache."""
    calls = _calls_of_messages(indices) if dtype is None else _calls_over_values(dtype, indices)
    for name, *nothing in calls:
        loop = _JITTED[name]
        before = sum(loop.stats.cache_misses.values())
        loop(*nothing)
        if sum(loop.stats.cache_misses.values()) > before:
            _announce(loop.stats.cache_path)


def _announce(folder: str | None) -> None:
    """Say what takes so long, after the first loop that was not in the cache."""
    global _announced
    if not _announced and folder:
        log.warning("compiling kernels for this machine, once: 5 to 10 s")
    elif not _announced:
        log.warning(
            "compiling kernels: 5 to 10 s in each process, for want of a place to cache them; set "
            "NUMBA_CACHE_DIR to a folder that can be written to"
        )
    _announced = True


def _calls_of_messages(indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Each loop and its arguments; a short loop first, to see soon whether it is cached."""
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    u8, u16, u32, u64 = (np.empty(0, f"u{size}") for size in (1, 2, 4, 8))
    yield "count_gaps", i, 0
    for words in (u8, u16):
        yield "pack_gaps", i, 0, words
        yield "unpack_gaps", words, 0, 0, i
    yield "pack_bits", i, 0, u8
    yield "unpack_bits", u8, 0, 0, i
    yield "quantise", u32, u8, u32
    yield "dequantise", u8, u32, u32
    yield "checksum", u64


def _calls_over_values(dtype: torch.dtype, indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    v = torch.empty(0, dtype=dtype, device="cpu").numpy()
    bits, (limit, mask, _) = _bits(v), _limits(0.0, dtype)
    yield "add_at", v, i, v
    yield "accumulate", v, v, v, bits, 0, limit, mask, -1, 0, i, v
    yield "select", v, bits, 0, 0, limit, mask, i, v
    yield "histogram", bits, 0, 0, mask, limit, limit, limit, np.zeros((2, 1), np.int64)
    yield "keep", i, v, bits, limit, mask, 0, i, v
    yield "merge", i, v, i, v, i, v
    yield "scatter", v, 0, i, v, -1
    yield "take_common", v, i, v, i
    yield "step_square", v, bits, v, 0, 0, mask, *[v.dtype.type(0)] * 2, 0.0, 0.0
    yield "adam", v, v, v, v, 0, 0, *[v.dtype.type(0)] * 9
    yield "sum_select", i, v, np.empty(0, np.int64), 0, 0, 0, limit, mask, bits, i, v


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
