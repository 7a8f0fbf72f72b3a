"""Kernels that write and read messages; `wire` says where their results go."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import low_bytes
from ..numbers import LARGEST, MIX, OCTAVE_BITS, QUANTUM, magnitude


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


def pack_elias_fano(indices: Tensor, low: int, bits: int, out: Tensor) -> None:
    """Write the offset of each index from `low`: its last `bits` bits as they are, others in unary.

    First come whole 64-bit words. Bit h + j is set for entry j, if the high bits of its offset are
    h. Then come the low bits of all entries: the lowest byte of each, the next byte of each, and
    at last four bits of each.
    """
    count, offsets = indices.numel(), indices.long() - low
    at = out.numel() - low_bytes(count, bits)
    pack_bits((offsets >> bits) + torch.arange(count, device=out.device), 0, out[:at])
    for shift in range(0, bits - 7, 8):
        out[at : at + count] = (offsets >> shift) & 0xFF
        at += count
    if bits % 8:
        out[at:] = _paired((offsets >> (bits - 4)) & 0xF)


def unpack_elias_fano(
    coded: Tensor, count: int, bits: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """The `count` indexes that `pack_elias_fano` wrote.

    None if these bytes give another number of them, or if they are not in order and below `high`.
    """
    nothing = torch.empty(0, dtype=dtype, device=coded.device)
    at = coded.numel() - low_bytes(count, bits)
    if count < 1 or at <= 0 or at % 8:
        return nothing
    places = unpack_bits(coded[:at], 0, 8 * at, torch.int64)
    if places.numel() != count:
        return nothing
    offsets = (places - torch.arange(count, device=coded.device)) << bits
    for shift in range(0, bits - 7, 8):
        offsets += coded[at : at + count].long() << shift
        at += count
    if bits % 8:
        offsets += _unpaired(coded[at:], count) << (bits - 4)
    right = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets[-1]) < high - low
    return (offsets + low).to(dtype) if right else nothing


def _paired(nibbles: Tensor) -> Tensor:
    """Two numbers of 4 bits in each byte, the first in its lower half."""
    pairs = torch.nn.functional.pad(nibbles, (0, nibbles.numel() % 2)).view(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)


def _unpaired(paired: Tensor, count: int) -> Tensor:
    """The first `count` numbers that `_paired` wrote."""
    return torch.stack([paired.long() & 0xF, paired.long() >> 4], 1).flatten()[:count]


def quantise(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each float32 value as a code of `width` bits, and one scale for each QUANTUM values.

    A code of 8 bits is a byte; two codes of 4 bits share one. The first bit of a code is the sign,
    and the others are the magnitude. The magnitudes of a block are spaced evenly between the bits
    of its smallest and of its largest. This is about evenly in the logarithm, so small values next
    to large ones keep their digits. The last 8 bits of a scale hold the logarithm of the spacing;
    the others are those of the smallest magnitude.

    A value is rounded to the nearest code, but where codes are several octaves apart, upwards only
    by less than half an octave. A value that is sent at more than twice its size would leave a
    residual larger than itself, and error feedback would blow it up.
    """
    count, most = values.numel(), (1 << (width - 1)) - 1
    if count == 0:
        return values.new_empty(0, dtype=torch.uint8), values.new_empty(0, dtype=torch.int32)
    bits = magnitude(values).long()
    blocks = torch.cat([bits, bits[-1:].expand(-count % QUANTUM)]).view(-1, QUANTUM)
    base = blocks.amin(1, keepdim=True) & ~0xFF
    # The exponent of an integer is its number of bits.
    needed = torch.frexp((blocks.amax(1, keepdim=True) - base).double()).exponent.long()
    shift = (needed - width + 1).clamp(min=0)
    codes = (blocks - base + ((1 << shift.clamp(max=OCTAVE_BITS)) >> 1)) >> shift
    codes = codes.clamp(max=most).flatten()[:count]
    codes += (most + 1) * (values.view(torch.int32) < 0)
    packed = codes.to(torch.uint8) if width == 8 else _paired(codes)
    return packed, (base | shift).flatten().to(torch.int32)


def dequantise(codes: Tensor, scales: Tensor, count: int, width: int) -> Tensor:
    """The float32 values that `quantise` wrote. They are finite for any scales."""
    scale, most = scales.long().repeat_interleave(QUANTUM)[:count], (1 << (width - 1)) - 1
    number = codes.long() if width == 8 else _unpaired(codes, count)
    # A wider spacing than that of the widest block would not fit.
    shift = (scale & 0xFF).clamp(max=32 - width)
    bits = (scale & 0x7FFFFF00) + ((number & most) << shift)
    magnitudes = bits.clamp(max=LARGEST).to(torch.int32).view(torch.float32)
    return torch.where(number > most, -magnitudes, magnitudes)


def checksum(words: Tensor) -> int:
    """The sum of all 64-bit words, each mixed with its place, modulo 2**64.

    Mixing is not linear, and each bit of a mixed word depends on all bits of the word. So a change
    to one word is always seen, and changes to several do not cancel each other. The fourth word
    does not count: a message keeps its checksum there.
    """
    return int(mixed(words).sum())


def mixed(words: Tensor) -> Tensor:
    """The terms of the checksum."""
    place, first, second = (number - (number >> 63 << 64) for number in MIX)  # as signed numbers
    terms = words ^ (torch.arange(words.numel(), device=words.device) * place)
    terms = (terms ^ _upper_half(terms)) * first
    terms = (terms ^ _upper_half(terms)) * second
    terms ^= _upper_half(terms)
    terms[3:4] = 0
    return terms


def _upper_half(words: Tensor) -> Tensor:
    return (words >> 32) & 0xFFFFFFFF
