"""Write and read messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..numbers import QUANTUM
from .arrays import as_bits, as_unsigned
from .compiling import I32, compiled

_WIDTHS = {"int8": 8, "int4": 4}
"""Formats whose messages are written and read in one call, and the bits of their codes."""


def pack_elias_fano(indices: Tensor, low: int, bits: int, out: Tensor) -> None:
    loop = compiled[None, indices.dtype]["pack_elias_fano"]
    loop(indices.numpy(), low, bits, out.numpy())


def unpack_elias_fano(
    coded: Tensor, count: int, bits: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    if not 0 < count <= high - low:
        return torch.empty(0, dtype=dtype, device="cpu")
    found = torch.empty(count, dtype=dtype, device="cpu")
    loop = compiled[None, dtype]["unpack_elias_fano"]
    return found[: loop(coded.numpy(), bits, low, high, found.numpy())]


def pack_bits(indices: Tensor, low: int, out: Tensor) -> None:
    compiled[None, indices.dtype]["pack_bits"](indices.numpy(), low, out.numpy())


def unpack_bits(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    most = min(8 * bits.numel(), high - low + 7)
    found = torch.empty(most + 1, dtype=dtype, device="cpu")
    return found[: compiled[None, dtype]["unpack_bits"](bits.numpy(), low, high, found.numpy())]


def quantise(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(-(-values.numel() * width // 8), dtype=torch.uint8, device="cpu")
    scales = torch.empty(-(-values.numel() // QUANTUM), dtype=torch.int32, device="cpu")
    bits = as_bits(values.numpy())
    compiled[None, I32]["quantise"](bits, width, codes.numpy(), as_unsigned(scales))
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, count: int, width: int) -> Tensor:
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    bits = as_bits(values.numpy())
    compiled[None, I32]["dequantise"](codes.numpy(), as_unsigned(scales), width, bits)
    return values


def checksum(words: Tensor) -> int:
    total = int(compiled[None, I32]["checksum"](as_unsigned(words)))
    return total - 2**64 if total >= 2**63 else total


def pack(
    form: str,
    indices: Tensor,
    values: Tensor,
    ends: Sequence[int],
    own: int,
    sizes: Sequence[int],
    added: Sequence[int],
    what: int,
) -> tuple[Tensor, Tensor] | None:
    if form not in _WIDTHS:
        return None
    messages, sent = torch.empty(sum(sizes), dtype=torch.uint8), torch.empty_like(values)
    raw, ranks = messages.numpy(), len(sizes)
    numbers = np.array([*ends, *sizes, *added], np.int64)
    failed = compiled[values.dtype, indices.dtype]["pack"](
        *(indices.numpy(), values.numpy(), _WIDTHS[form]),
        *(numbers[:ranks], own, numbers[ranks : 2 * ranks], numbers[2 * ranks :], what),
        *(raw, raw.view(np.uint64), sent.numpy()),
    )
    if failed >= 0:
        raise ValueError(f"the entries for rank {failed} need more than {sizes[failed]} bytes")
    return messages, sent


def unpack(
    form: str,
    messages: Tensor,
    sizes: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    rank: int,
    indices: Tensor,
    values: Tensor,
    added: int,
    what: int,
) -> tuple[Tensor, Tensor, list[int], list[list[int]]] | None:
    if form not in _WIDTHS or any(size % 8 for size in sizes):
        return None
    width, ours, ranks = _WIDTHS[form], indices.numel(), len(sizes)
    # A message has fewer entries than room for codes of values. The loop that reads a bitmap needs
    # some places behind the last entry.
    most = sum(sizes) * (8 // width) + ours + 8
    all_indices, all_values = indices.new_empty(most), values.new_empty(most)
    lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
    numbers = np.array([*sizes, *lows, *highs], np.int64)
    found = np.zeros((ranks, 1 + added), np.int64)
    raw = messages.numpy()
    failed = compiled[values.dtype, indices.dtype]["unpack"](
        *(raw, raw.view(np.uint64), width, numbers[:ranks], numbers[ranks : 2 * ranks]),
        *(numbers[2 * ranks :], rank, added, what, indices.numpy(), values.numpy()),
        *(all_indices.numpy(), all_values.numpy(), found),
    )
    if failed >= 0:
        return None
    rows: list[list[int]] = found.tolist()
    count = rows[-1][0]
    ends, notes = [row[0] for row in rows], [row[1:] for row in rows]
    return all_indices[:count], all_values[:count], ends, notes
