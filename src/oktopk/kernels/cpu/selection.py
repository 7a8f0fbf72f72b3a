"""Select entries and put them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import numbers
from ..control import spread_evenly
from ..reference import selection as reference
from .arrays import alignment, as_bits, limits
from .compiling import I32, compiled
from .threads import compact, parallel


def accumulate(
    residual: Tensor,
    gradient: Sequence[Tensor],
    out: Tensor,
    threshold: float,
    copy: bool = True,
) -> tuple[Tensor, Tensor, list[bool]]:
    r, o, parts = residual.numpy(), out.numpy(), [part.numpy() for part in gradient]
    stops = [*itertools.accumulate([part.size for part in parts])]
    bits, (limit, mask, infinity) = as_bits(o), limits(threshold, out.dtype)
    index = numbers.index_dtype(o.size)
    loop = compiled[out.dtype, index]["accumulate"]
    finite = [True] * len(parts)

    def run(low: int, high: int, i: Any, v: Any) -> int:
        end, aligned, lanes, start = low, alignment(out, 0), 64 // out.itemsize, 0
        for number, (part, stop) in enumerate(zip(parts, stops, strict=True)):
            first, last = low if start < low else start, high if stop > high else stop
            if first < last:
                g, here = part[first - start : last - start], slice(first, last)
                head = aligned if aligned < 0 else (aligned - first) % lanes
                where = (r[here], g, o[here], bits[here], first)
                end, peak = loop(*where, limit, mask, head, end, i, v)
                if peak >= infinity:
                    finite[number] = False
            start = stop
        return int(end)

    indices, values = compact(run, o.size, out.dtype, index, copy)
    return indices, values, finite


def offer(
    residual: Tensor,
    gradient: Sequence[Tensor],
    out: Tensor,
    threshold: float,
    k: int,
    wanted: int,
) -> tuple[Tensor, Tensor, list[bool], int, float, float]:
    indices, values, finite = accumulate(residual, gradient, out, threshold, copy=False)
    found = indices.numel()
    if found <= k:
        return indices.clone(), values.clone(), finite, found, 0.0, 0.0
    indices, values, limit, about = keep_largest(indices, values, k, wanted)
    return indices, values, finite, found, limit, about


def select(dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    d = dense.numpy()
    bits, (limit, mask, _) = as_bits(d), limits(threshold, dense.dtype)
    index = numbers.index_dtype(d.size)
    loop = compiled[dense.dtype, index]["select"]

    def run(low: int, high: int, i: Any, v: Any) -> int:
        return int(loop(d, bits, low, high, limit, mask, i, v))

    return compact(run, d.size, dense.dtype, index)


def histogram(values: Tensor, prefix: int, shift: int, bits: int) -> Tensor:
    v = as_bits(values.numpy())
    unsigned = v.dtype.type
    _, mask, _ = limits(0.0, values.dtype)
    loop = compiled[values.dtype, I32]["histogram"]

    def run(low: int, high: int) -> Any:
        counts = np.zeros((2, 2**bits), np.int64)
        loop(v, low, high, mask, unsigned(prefix), unsigned(shift), unsigned(bits), counts)
        return counts.sum(0)

    return torch.from_numpy(sum(parallel(run, values.numel())))


def keep(indices: Tensor, values: Tensor, threshold: float, ties: int) -> tuple[Tensor, Tensor]:
    limit, mask, _ = limits(threshold, values.dtype)
    i, v = indices.numpy(), values.numpy()
    kept_indices, kept_values = torch.empty_like(indices), torch.empty_like(values)
    count = compiled[values.dtype, indices.dtype]["keep"](
        i, v, as_bits(v), limit, mask, ties, kept_indices.numpy(), kept_values.numpy()
    )
    return kept_indices[:count], kept_values[:count]


def keep_largest(
    indices: Tensor, values: Tensor, k: int, wanted: int = 0
) -> tuple[Tensor, Tensor, float, float]:
    dtype = values.dtype
    i, v = indices.numpy(), values.numpy()
    bits, (_, mask, _) = as_bits(v), limits(0.0, dtype)
    # The loop writes one place behind the last entry that it keeps.
    kept_indices, kept_values = indices.new_empty(k + 1), values.new_empty(k + 1)
    shift = bits.dtype.type(numbers.leading_shift(dtype))
    loop = compiled[dtype, indices.dtype]["keep_largest"]
    count, limit, digit, above, inside = loop(
        i, v, bits, mask, shift, k, wanted, kept_indices.numpy(), kept_values.numpy()
    )
    about = 0.0
    if inside:
        bits_of = spread_evenly(int(digit), above, inside, wanted, int(shift))
        about = numbers.from_bits(bits_of, dtype)
    threshold = float(bits.dtype.type(limit).view(v.dtype))
    return kept_indices[:count], kept_values[:count], threshold, about


def merge(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
) -> tuple[Tensor, Tensor]:
    most = indices.numel() + other_indices.numel()
    union, total = indices.new_empty(most), values.new_empty(most)
    count = compiled[values.dtype, indices.dtype]["merge"](
        indices.numpy(),
        values.numpy(),
        other_indices.numpy(),
        other_values.numpy(),
        union.numpy(),
        total.numpy(),
    )
    return union[:count], total[:count]


def add_at(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    loop = compiled[dense.dtype, indices.dtype]["add_at"]
    loop(dense.numpy(), indices.numpy(), values.numpy())


def scatter(parts: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64):
        reference.scatter(parts, indices, values)
        return
    i, v = indices.numpy(), values.numpy()
    loop = compiled[values.dtype, indices.dtype]["scatter"]

    def write(part: Tensor, d: Any, start: int) -> None:
        parallel(
            lambda low, high: loop(d[low:high], start + low, i, v, alignment(part, low)), d.size
        )

    start = 0
    for part in parts:
        d = part.numpy()
        write(part, d, start)
        start += d.size


def take_common(dense: Tensor, indices: Tensor, values: Tensor, applied: Tensor) -> None:
    loop = compiled[dense.dtype, indices.dtype]["take_common"]
    loop(dense.numpy(), indices.numpy(), values.numpy(), applied.numpy())


def sum_select(
    indices: Tensor, values: Tensor, ends: list[int], low: int, high: int, threshold: float
) -> tuple[Tensor, Tensor]:
    i, v, e = indices.numpy(), values.numpy(), np.array(ends, np.int64)
    bits, (limit, mask, _) = as_bits(v), limits(threshold, values.dtype)
    loop = compiled[values.dtype, indices.dtype]["sum_select"]

    def run(start: int, stop: int, found: Any, sums: Any) -> int:
        return int(loop(i, v, e, low, start, stop, limit, mask, bits, found, sums))

    return compact(run, high - low, values.dtype, indices.dtype)
