"""Write and read messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..numbers import QUANTUM
from .arrays import as_bits, as_unsigned
from .compiling import compiled, compiled_codes


def count_gaps(indices: Tensor, low: int) -> tuple[int, int]:
    short, long = compiled_codes(indices.dtype)["count_gaps"](indices.numpy(), low)
    return int(short), int(long)


def pack_gaps(indices: Tensor, low: int, out: Tensor) -> None:
    compiled_codes(indices.dtype)["pack_gaps"](indices.numpy(), low, as_unsigned(out))


def unpack_gaps(stream: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    found = torch.empty(stream.numel() + 1, dtype=dtype, device="cpu")
    loop = compiled_codes(dtype)["unpack_gaps"]
    return found[: loop(as_unsigned(stream), low, high, found.numpy())]


def pack_bits(indices: Tensor, low: int, out: Tensor) -> None:
    compiled_codes(indices.dtype)["pack_bits"](indices.numpy(), low, out.numpy())


def unpack_bits(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    most = min(8 * bits.numel(), high - low + 7)
    found = torch.empty(most + 1, dtype=dtype, device="cpu")
    return found[: compiled_codes(dtype)["unpack_bits"](bits.numpy(), low, high, found.numpy())]


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8, device="cpu")
    scales = torch.empty(-(-values.numel() // QUANTUM), dtype=torch.int32, device="cpu")
    compiled_codes()["quantise"](as_bits(values.numpy()), codes.numpy(), as_unsigned(scales))
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    compiled_codes()["dequantise"](codes.numpy(), as_unsigned(scales), as_bits(values.numpy()))
    return values


def checksum(words: Tensor) -> int:
    total = int(compiled_codes()["checksum"](as_unsigned(words)))
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
    if form != "int8":
        return None
    messages, sent = torch.empty(sum(sizes), dtype=torch.uint8), torch.empty_like(values)
    raw = messages.numpy()
    e, s, a = (np.array(part, np.int64) for part in (ends, sizes, added))
    failed = compiled(values.dtype, indices.dtype)["pack"](
        *(indices.numpy(), values.numpy(), e, own, s, a, what),
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
    if form != "int8" or any(size % 8 for size in sizes):
        return None
    # A message has fewer entries than bytes. A code may need some places behind its last entry.
    most, ours = sum(sizes) + indices.numel() + 8, indices.numel()
    all_indices, all_values = indices.new_empty(most), values.new_empty(most)
    ends, notes = np.full(len(sizes), ours), np.zeros((len(sizes), added), np.int64)
    limits = np.array(bounds, np.int64)
    raw = messages.numpy()
    failed = compiled(values.dtype, indices.dtype)["unpack"](
        *(raw, raw.view(np.uint64), np.array(sizes, np.int64), limits[:, 0].copy()),
        *(limits[:, 1].copy(), rank, added, what, all_indices.numpy(), all_values.numpy()),
        *(ends, notes),
    )
    if failed >= 0:
        return None
    stops: list[int] = ends.tolist()
    own = slice(stops[rank] - ours, stops[rank])
    all_indices[own], all_values[own] = indices, values
    return all_indices[: stops[-1]], all_values[: stops[-1]], stops, notes.tolist()
