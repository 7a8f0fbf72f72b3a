"""Kernels that write and read messages; `wire` says where their results go."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numbers import LARGEST, MIX, MOST_SHIFT, QUANTUM, magnitude


def count_gaps(indices: Tensor, low: int) -> tuple[int, int]:
    """The number of words that `pack_gaps` needs, with 8 and with 16 bits."""
    if indices.numel() == 0:
        return 0, 0
    gaps = _gaps(indices, low)
    return tuple(indices.numel() + int((gaps // most).sum()) for most in (255, 65535))  # type: ignore[return-value]


def pack_gaps(indices: Tensor, low: int, out: Tensor) -> None:
    """Write the number of elements between each entry and the one before, in words of 8 or 16 bits.

    The largest word means that as many elements lie between, and that the next word goes on.
    """
    if indices.numel() == 0:
        return
    most = 255 if out.dtype == torch.uint8 else 65535
    gaps = _gaps(indices, low)
    ends = (gaps // most + 1).cumsum(0)
    words = torch.full((out.numel(),), most, dtype=torch.int64, device=out.device)
    words[ends - 1] = gaps % most
    out.copy_(words if most == 255 else (words ^ 0x8000) - 0x8000)


def unpack_gaps(stream: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The indexes that `pack_gaps` wrote; none if the words lead to `high` or beyond."""
    most = 255 if stream.dtype == torch.uint8 else 65535
    words = stream.long() & most
    entry = words != most
    places = (words + entry).cumsum(0) + (low - 1)
    return places[entry & (places[-1:] < high)].to(dtype)


def _gaps(indices: Tensor, low: int) -> Tensor:
    before = torch.full((1,), low - 1, dtype=torch.int64, device=indices.device)
    return indices.long().diff(prepend=before) - 1


def pack_bits(indices: Tensor, low: int, out: Tensor) -> None:
    """Set bit i % 8 of byte i // 8 for each index low + i, and clear all others."""
    bits = torch.zeros(out.numel() * 8, dtype=torch.int64, device=out.device)
    bits[(indices - low).long()] = 1
    weights = 2 ** torch.arange(8, device=out.device)
    out.copy_((bits.view(-1, 8) * weights).sum(1))


def unpack_bits(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The indexes that `pack_bits` wrote.

    None if a bit that is set, or a whole byte, belongs to elements from `high` onward.
    """
    if bits.numel() > -(-(high - low) // 8):
        bits = bits[:0]
    places = torch.arange(8, device=bits.device)
    found = ((bits.long().unsqueeze(1) >> places) & 1).flatten().nonzero().flatten() + low
    return found[: found.numel() * bool((found[-1:] < high).all())].to(dtype)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each float32 value as a sign and 7 bits of magnitude, and one scale for each QUANTUM values.

    The codes of a block are spaced evenly between the bits of its smallest and of its largest
    magnitude. This is about evenly in the logarithm, so small values next to large ones keep their
    digits. The last 8 bits of a scale hold the logarithm of the spacing; the others are those of
    the smallest magnitude.
    """
    count = values.numel()
    if count == 0:
        return values.new_empty(0, dtype=torch.uint8), values.new_empty(0, dtype=torch.int32)
    bits = magnitude(values).long()
    blocks = torch.cat([bits, bits[-1:].expand(-count % QUANTUM)]).view(-1, QUANTUM)
    base = blocks.amin(1, keepdim=True) & ~0xFF
    # The exponent of an integer is its number of bits.
    width = torch.frexp((blocks.amax(1, keepdim=True) - base).double()).exponent.long()
    shift = (width - 7).clamp(min=0)
    codes = (blocks - base + ((1 << shift) >> 1)) >> shift
    codes = codes.clamp(max=127).flatten()[:count]
    signs = values.view(torch.int32) < 0
    return (codes + 128 * signs).to(torch.uint8), (base | shift).flatten().to(torch.int32)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values that `quantise` wrote. They are finite for any scales."""
    scale = scales.long().repeat_interleave(QUANTUM)[: codes.numel()]
    number, shift = codes.long(), (scale & 0xFF).clamp(max=MOST_SHIFT)
    bits = (scale & 0x7FFFFF00) + ((number & 127) << shift)
    magnitudes = bits.clamp(max=LARGEST).to(torch.int32).view(torch.float32)
    return torch.where(number > 127, -magnitudes, magnitudes)


def checksum(words: Tensor) -> int:
    """The sum of all 64-bit words, each mixed with its place, modulo 2**64.

    Mixing is not linear, and each bit of a mixed word depends on all bits of the word. So a change
    to one word is always seen, and changes to several do not cancel each other. The fourth word
    does not count: a message keeps its checksum there.
    """
    place, first, second = (number - (number >> 63 << 64) for number in MIX)  # as signed numbers
    mixed = words ^ (torch.arange(words.numel(), device=words.device) * place)
    mixed = (mixed ^ _upper_half(mixed)) * first
    mixed = (mixed ^ _upper_half(mixed)) * second
    mixed ^= _upper_half(mixed)
    mixed[3:4] = 0
    return int(mixed.sum())


def _upper_half(words: Tensor) -> Tensor:
    return (words >> 32) & 0xFFFFFFFF
