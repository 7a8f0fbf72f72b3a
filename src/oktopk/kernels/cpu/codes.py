"""Write and read messages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numbers import QUANTUM
from .arrays import as_bits, as_unsigned
from .compiling import compiled_codes


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
