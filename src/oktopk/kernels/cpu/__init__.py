"""The kernels for CPUs: numba loops without the GIL, on as many threads as torch uses.

How they are fast: a loop looks at 64 elements at a time, with vector instructions, and only at
those that reach the threshold one by one. It reads and writes memory once, and writes large
results past the caches.

How they are safe: numba's own parallel loops must not be entered from two threads at once, so a
plain thread pool runs the ranges of a loop (`threads.py`). Compiled code is cached on disk, and
ranks that start together take turns, so that one compiles and the others load (`compiling.py`).
"""

from __future__ import annotations

from .. import Kernels
from . import codes, compiling, optimizer, selection
from .step import CpuStep


class CpuKernels(Kernels):
    """The reference documents each function."""

    prepare = staticmethod(compiling.prepare)

    Step = CpuStep

    accumulate = staticmethod(selection.accumulate)
    offer = staticmethod(selection.offer)
    select = staticmethod(selection.select)
    histogram = staticmethod(selection.histogram)
    keep = staticmethod(selection.keep)
    keep_largest = staticmethod(selection.keep_largest)
    merge = staticmethod(selection.merge)
    add_at = staticmethod(selection.add_at)
    scatter = staticmethod(selection.scatter)
    take_common = staticmethod(selection.take_common)
    sum_select = staticmethod(selection.sum_select)

    pack_elias_fano = staticmethod(codes.pack_elias_fano)
    unpack_elias_fano = staticmethod(codes.unpack_elias_fano)
    pack_bits = staticmethod(codes.pack_bits)
    unpack_bits = staticmethod(codes.unpack_bits)
    quantise = staticmethod(codes.quantise)
    dequantise = staticmethod(codes.dequantise)
    checksum = staticmethod(codes.checksum)

    step_square = staticmethod(optimizer.step_square)
    adam = staticmethod(optimizer.adam)
