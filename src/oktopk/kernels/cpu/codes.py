"""Write and read messages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numbers import QUANTUM
from .arrays import as_bits, as_unsigned
from .compiling import I32, compiled


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
