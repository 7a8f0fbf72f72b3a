"""The specification of every kernel, in plain torch, on any device.

Magnitudes are compared as integers: without its sign bit, an IEEE number orders like the
integer with the same bits. So infinities and NaNs are the largest of all (never lost, always
found), denormals are ordinary numbers, and no comparison depends on rounding.

Indexes are int32 where they fit and int64 otherwise; lists of entries are sorted by index
and name each index at most once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

QUANTUM = 128
"""Values that are quantised together."""
MOST_SHIFT = 24
"""The logarithm of the widest spacing of 7 bits in the 31 bits of a magnitude."""
MIX = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
"""Odd numbers with which a checksum mixes: of places, and those of MurmurHash3 for words."""
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""


def index_dtype(numel: int) -> torch.dtype:
    """The smallest integer that can name each of `numel` elements."""
    return torch.int32 if numel <= 2**31 - 1 else torch.int64


def magnitude(values: Tensor) -> Tensor:
    """|values| as integers of the same width, in the same order."""
    bits = values.view(_BITS[values.dtype])
    return bits & torch.iinfo(bits.dtype).max


def threshold_bits(threshold: float, dtype: torch.dtype) -> int:
    """|threshold| rounded to `dtype`, as an integer to compare magnitudes with."""
    return int(magnitude(torch.tensor(threshold, dtype=dtype, device="cpu")))


def prepare(dtype: torch.dtype, numel: int) -> None:
    """Do now what would make the first calls slow, for `numel` values of a type."""


def accumulate(
    residual: Tensor, gradient: Sequence[Tensor], out: Tensor, threshold: float
) -> tuple[Tensor, Tensor, list[bool]]:
    """out = residual + gradient, and the entries of `out` that reach the threshold.

    Returns their indexes and values, and for each part of the gradient whether its sum is finite.
    """
    sizes = [part.numel() for part in gradient]
    sums = out.split(sizes)
    for before, part, after in zip(residual.split(sizes), gradient, sums, strict=True):
        torch.add(before, part, out=after)
    finite = torch.stack([torch.isfinite(part).all() for part in sums])
    return *select(out, threshold), finite.tolist()


def select(dense: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Indexes and values of the elements with |element| >= threshold."""
    chosen = magnitude(dense) >= threshold_bits(threshold, dense.dtype)
    indices = chosen.nonzero().flatten()
    return indices.to(index_dtype(dense.numel())), dense[indices]


def histogram(values: Tensor, prefix: int, shift: int, bits: int) -> Tensor:
    """Counts of one digit of the magnitudes: the `bits` bits from bit `shift` upward.

    Only magnitudes whose bits above that digit equal `prefix` are counted.
    """
    digits = magnitude(values) >> shift
    digits = digits[(digits >> bits) == prefix] & (2**bits - 1)
    return torch.bincount(digits, minlength=2**bits)


def keep(indices: Tensor, values: Tensor, threshold: float, ties: int) -> tuple[Tensor, Tensor]:
    """The entries above the threshold, and the first `ties` of those that equal it."""
    bits = magnitude(values)
    limit = threshold_bits(threshold, values.dtype)
    equal = bits == limit
    chosen = (bits > limit) | (equal & (equal.cumsum(0) <= ties))
    return indices[chosen], values[chosen]


def merge(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of two sparse vectors; an index that both name gets value + other value."""
    union, position = torch.unique(torch.cat([indices, other_indices]), return_inverse=True)
    total = torch.zeros(union.numel(), dtype=values.dtype, device=values.device)
    total[position[: indices.numel()]] = values
    # Indexes are unique within a list, so no two additions meet: deterministic on any device.
    total[position[indices.numel() :]] += other_values
    return union, total


def add_at(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """dense[indices] += values."""
    dense[indices] += values


def scatter(parts: Sequence[Tensor], indices: Tensor, values: Tensor) -> None:
    """Zeros everywhere, but for the entries; `parts` are one after the other the vector."""
    stops = list(itertools.accumulate(part.numel() for part in parts))
    cuts = torch.tensor(stops, dtype=indices.dtype, device=indices.device)
    begin = 0
    for part, stop, end in zip(
        parts, stops, torch.searchsorted(indices, cuts).tolist(), strict=True
    ):
        part.zero_()
        part[indices[begin:end] - (stop - part.numel())] = values[begin:end]
        begin = end


def take_common(dense: Tensor, indices: Tensor, values: Tensor, applied: Tensor) -> None:
    """dense[i] -= value for every entry whose index occurs in `applied`, too."""
    if indices.numel() == 0 or applied.numel() == 0:
        return
    position = torch.searchsorted(applied, indices).clamp_(max=applied.numel() - 1)
    common = applied[position] == indices
    dense[indices[common]] -= values[common]


def sum_select(
    indices: Tensor, values: Tensor, ends: list[int], low: int, high: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """The sum of several lists of entries, as far as it reaches the threshold.

    Args:
        indices, values: the lists, one after the other, which end at `ends`. What they name is
            between `low` and `high`. Of equal indexes, the value of the first list comes first.
    """
    sums = torch.zeros(high - low, dtype=values.dtype, device=values.device)
    start = 0
    for end in ends:
        sums[(indices[start:end] - low).long()] += values[start:end]
        start = end
    found, chosen = select(sums, threshold)
    return found.to(indices.dtype) + low, chosen


def step_square(gradient: Tensor, moment: Tensor, *, grown: float, least: float) -> Tensor:
    """The mean square of what `adam` divides the gradient to, bitwise the same on all ranks.

    Args:
        grown, least: as in `adam`.
    """
    most, scale = fixed_point(least, gradient.numel())
    floor = (gradient * least).square()
    squares = gradient.double().square() / torch.maximum(moment * grown, floor).double()
    squares = torch.where(squares < most, squares, most) * (gradient != 0)
    return (squares * scale).to(torch.int64).sum().double() / (scale * gradient.numel())


def fixed_point(least: float, numel: int) -> tuple[float, float]:
    """The largest that a square can be, and what squares are multiplied by before they are rounded
    to integers and summed: a sum of integers is the same in any order."""
    most = 1 / (least * least)
    return most, 2.0**62 / (most * numel)


def adam(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    moment: Tensor,
    *,
    sign: float,
    grown: float,
    least: float,
    weight: float,
    decay: float,
    shrink: float,
    unbias: float,
    eps: float,
    lr: float,
) -> None:
    """One step of oktopk.AdamW with a sparse average, in place; adam.py says what it means.

    Args:
        sign: -1 to maximize.
        grown: multiplies the second moment.
        least: times the gradient, squared, is the least it may be.
        weight: of the gradient in the first moment.
        decay: of the parameter that is added to the gradient.
        shrink: multiplies the parameter.
        unbias: multiplies the root of the second moment, to make it free of bias.
    """
    moment.mul_(grown)
    torch.maximum(moment, (gradient * least).square(), out=moment)
    average.add_(sign * gradient + decay * parameter - average, alpha=weight)
    parameter.mul_(shrink).addcdiv_(average, moment.sqrt().mul_(unbias).add_(eps), value=-lr)


# ---------------------------------------------------------------------------------------------
# Codes of messages; `wire.py` says what they are.


def count_gaps(indices: Tensor, low: int) -> tuple[int, int]:
    """The number of words that `pack_gaps` needs, with 8 and with 16 bits."""
    if indices.numel() == 0:
        return 0, 0
    gaps = _gaps(indices, low)
    return tuple(indices.numel() + int((gaps // most).sum()) for most in (255, 65535))  # type: ignore[return-value]


def pack_gaps(indices: Tensor, low: int, out: Tensor) -> None:
    """Writes how many elements are passed over before each entry to words of 8 or 16 bits.

    The largest number of a word means that as many are passed over, and that the next word goes on.
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
    """Sets bit i % 8 of byte i // 8 for each index low + i, and no other."""
    bits = torch.zeros(out.numel() * 8, dtype=torch.int64, device=out.device)
    bits[(indices - low).long()] = 1
    weights = 2 ** torch.arange(8, device=out.device)
    out.copy_((bits.view(-1, 8) * weights).sum(1))


def unpack_bits(bits: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The indexes that `pack_bits` wrote; none if a bit, or all bits of a byte, are of elements
    from `high` onward."""
    if bits.numel() > -(-(high - low) // 8):
        bits = bits[:0]
    places = torch.arange(8, device=bits.device)
    found = ((bits.long().unsqueeze(1) >> places) & 1).flatten().nonzero().flatten() + low
    return found[: found.numel() * bool((found[-1:] < high).all())].to(dtype)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as a sign and 7 bits of magnitude each, and one scale for each QUANTUM.

    Between the smallest and the largest of a block, magnitudes are spaced evenly in their bits,
    that is, about evenly in their logarithm: so small values next to large ones keep their digits.
    A scale holds the bits of the smallest magnitude, but for the last 8, which hold the logarithm
    of the spacing.
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
    """The float32 values that `quantise` wrote. All scales give finite ones."""
    scale = scales.long().repeat_interleave(QUANTUM)[: codes.numel()]
    number, shift = codes.long(), (scale & 0xFF).clamp(max=MOST_SHIFT)
    bits = (scale & 0x7FFFFF00) + ((number & 127) << shift)
    magnitudes = bits.clamp(max=_LARGEST).to(torch.int32).view(torch.float32)
    return torch.where(number > 127, -magnitudes, magnitudes)


def checksum(words: Tensor) -> int:
    """Of 64-bit words: the sum of all, each mixed with its place, modulo 2**64.

    Mixing makes each bit of the result depend on all bits of a word, in no linear way. So a change
    to one word is always seen, and changes to several do not cancel each other. The fourth word,
    where a message keeps it, does not count.
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
