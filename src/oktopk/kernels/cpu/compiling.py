"""Loops are compiled on first use, or when `prepare` says so.

numba caches compiled code beside the loops, or in the user's cache folder; without a place that it
can write to, each process compiles for itself. Loops are made of parts from many files, so the code
of a loop is used only if none of these files has changed. Processes take turns through a lock file:
numba's cache is not safe alone, and one of several ranks compiles while the others wait and then
load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from .. import numbers
from .arrays import as_bits, limits
from .form import NOTHING
from .loops import codes, optimizer, selection, step

log = logging.getLogger(__name__)


def _digest() -> str:
    """Of all sources that loops are made of."""
    here = Path(__file__).parent
    files = sorted([*here.rglob("*.py"), *here.parent.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _digest()


def _jit(loop: Any) -> Any:
    # As in numpy, a division by zero is no exception: to look for one costs more than the division.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(loop)
    except RuntimeError:  # no place to cache: neither the package, nor a home directory
        return numba.njit(**options)(loop)
    # numba itself looks at the one file that the loop stands in.
    compiled._cache._cache_file._source_stamp = _SOURCES
    return compiled


_LOOPS = {
    name: _jit(loop)
    for module in (selection, codes, optimizer, step)
    for name, loop in inspect.getmembers(module, inspect.isfunction)
    # Others are parts of loops.
    if loop.__module__ == module.__name__ and not name.startswith("_")
}
_Key = tuple[torch.dtype | None, torch.dtype]
"""Types of values (None: loops of messages) and of indexes."""
_announced = False
_lock = threading.Lock()


def prepare(dtype: torch.dtype, numel: int, steps: bool, device: torch.device) -> None:
    index = numbers.index_dtype(numel)
    types = sorted({I32, index}, key=str)
    compiled.ensure(*((kind, indices) for kind in (None, dtype) for indices in types))
    if steps:
        steps_compiled.ensure((dtype, index))


class _Compiled(dict[_Key, dict[str, Any]]):
    """The loops by types: compiled[dtype, indices]["accumulate"]. A lookup is no call.

    Args:
        calls: gives the loops of these types, and arguments for each.
    """

    def __init__(self, calls: Callable[..., Iterator[tuple[Any, ...]]]) -> None:
        self._calls = calls

    def __missing__(self, key: _Key) -> dict[str, Any]:
        self.ensure(key)
        return _LOOPS

    def ensure(self, *keys: _Key) -> None:
        """Compile under a lock that all processes share, unless that has been done."""
        if not all(key in self for key in keys):
            with _lock, _file_lock():
                for key in keys:
                    if key not in self:
                        _compile(self._calls(*key))
                        self[key] = _LOOPS


def _compile(calls: Iterator[tuple[Any, ...]]) -> None:
    """Call each loop once on nothing; numba compiles it or loads it from its cache."""
    for name, *nothing in calls:
        loop = _LOOPS[name]
        before = sum(loop.stats.cache_misses.values())
        loop(*nothing)
        if sum(loop.stats.cache_misses.values()) > before:
            _announce(loop.stats.cache_path)


def _announce(folder: str | None) -> None:
    """Say what takes so long, after the first loop that was not in the cache."""
    global _announced
    if not _announced and folder:
        log.warning("compiling kernels for this machine, once: about a minute")
    elif not _announced:
        log.warning(
            "compiling kernels: about a minute in each process, as there is no place to cache "
            "them; set NUMBA_CACHE_DIR to a folder that can be written to"
        )
    _announced = True


def _calls_of_most(dtype: torch.dtype | None, indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Each loop and its arguments, but those of fixed-size steps."""
    return _calls_of_messages(indices) if dtype is None else _calls_over_values(dtype, indices)


def _calls_of_messages(indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """A short loop first, to see soon whether it is cached."""
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    u8, u32, u64 = (np.empty(0, f"u{size}") for size in (1, 4, 8))
    yield "pack_bits", i, 0, u8
    yield "unpack_bits", u8, 0, 0, i
    yield "pack_elias_fano", i, 0, 4, u8
    yield "unpack_elias_fano", u8, 4, 0, 0, i
    yield "quantise", u32, 8, u8, u32
    yield "dequantise", u8, u32, 8, u32
    yield "checksum", u64


def _calls_over_values(dtype: torch.dtype, indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    v = torch.empty(0, dtype=dtype, device="cpu").numpy()
    bits, (limit, mask, _) = as_bits(v), limits(0.0, dtype)
    yield "add_at", v, i, v
    yield "accumulate", v, v, v, bits, 0, limit, mask, -1, 0, i, v
    yield "select", v, bits, 0, 0, limit, mask, i, v
    yield "histogram", bits, 0, 0, mask, limit, limit, limit, np.zeros((2, 1), np.int64)
    yield "keep", i, v, bits, limit, mask, 0, i, v
    yield "keep_largest", i, v, bits, mask, limit, 1, 1, i, v
    yield "merge", i, v, i, v, i, v
    yield "scatter", v, 0, i, v, -1
    yield "take_common", v, i, v, i
    yield "step_square", v, bits, v, 0, 0, mask, *[v.dtype.type(0)] * 2, 0.0, 0.0
    yield "adam", v, v, v, v, 0, 0, *[v.dtype.type(0)] * 9
    yield "sum_select", i, v, np.empty(0, np.int64), 0, 0, 0, limit, mask, bits, i, v


def _calls_of_steps(dtype: torch.dtype, indices: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """These take by far the longest to compile."""
    i = torch.empty(0, dtype=indices, device="cpu").numpy()
    v = torch.empty(0, dtype=dtype, device="cpu").numpy()
    bits = as_bits(v)
    n, word, message = np.empty(0, np.int64), np.zeros(16, np.int64), np.zeros(40, np.uint8)
    offered = i.reshape(0, 0), v.reshape(0, 0), word
    messages, scratch = message.reshape(1, 40), (i, v, bits)
    add = word, n, 0, 1.0, 0.0
    yield "find", NOTHING, word, *add, 0, 0, *scratch
    yield "prepare", NOTHING, word, word, *add, 0, 0, n.reshape(0, 3), *offered, messages, *scratch
    yield "combine", NOTHING, word, word, *offered, messages, message, i, v, *scratch
    yield "apply", NOTHING, word, word, word, n, 0, 1.0, 0, *offered, messages, i, v, *scratch
    yield "write_parts", NOTHING, word, n, 0, 0, 0, 0, *scratch


compiled = _Compiled(_calls_of_most)
steps_compiled = _Compiled(_calls_of_steps)
"""Loops of fixed-size steps."""
I32 = torch.int32
"""For loops without indexes, which are compiled with those of 32-bit ones."""


@contextlib.contextmanager
def _file_lock() -> Iterator[None]:
    """One process at a time, where there can be a lock file."""
    with contextlib.ExitStack() as stack:
        folder = getattr(_LOOPS["accumulate"].stats, "cache_path", None)
        # No cache, a folder that cannot be written to, a file system without locks: no lock.
        with contextlib.suppress(OSError):
            if folder:
                os.makedirs(folder, exist_ok=True)
                file = stack.enter_context(open(os.path.join(folder, "oktopk.lock"), "w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget() -> None:
    """A forked child may have inherited the lock from a thread that it does not have."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
