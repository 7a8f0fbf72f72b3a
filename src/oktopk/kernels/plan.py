"""The fixed-size step of Ok-Topk: sizes that are known before it begins, and where things lie.

A step is three phases, and an exchange after each of the first two. All tensors have fixed shapes,
so no phase asks the device for a number.

A message is a head of five 64-bit words, and then room for values and positions of `most` entries:

    what        the format, and the code of positions
    count       entries; the room has place for more
    flags       FINITE, WRONG, and in a reply which message was damaged
    checksum    of all other words
    point       the sender's program point
    values      of the entries in order of their index, as the codec writes them; behind the last
                entry its value is repeated
    positions   offsets from the start of the region: Elias-Fano, bitmap or plain; see
                wire/positions.py. All ranks use the code that is shortest for the longest region.
                Behind the last entry there are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout import BITMAP, ELIAS_FANO, LOW_BITS, PLAIN, padded, shortest

if TYPE_CHECKING:
    from ..wire.codecs import Codec

MAGIC = 0x4F6B5472
"""First 32 bits of a message; another layout of messages needs another number."""
WHAT, COUNT, FLAGS, CHECKSUM, POINT, HEAD_WORDS = range(6)
"""Words of the head. `layout.CHECKSUM` is the same word."""
FINITE, WRONG, DAMAGED_SHIFT = 1, 2, 8
"""Flags: the sender has finite values only; an owner's threshold was wrong; above DAMAGED_SHIFT:
0, or 1 + the rank whose message to the sender was damaged."""

# Words of a record: first what happened in the step, then the state for the next.
ALL_FINITE, DAMAGED, OFFERED, OVERFLOW, APPLIED, LOCAL_LIMIT, TOTAL_LIMIT = range(7)
"""Whether all ranks have finite values; 0, or 1 + sender + P * receiver of a damaged message;
numbers of entries; and magnitudes that offered and applied entries reach."""
LOCAL, LOCAL_TREND, TOTAL, TOTAL_TREND, REGIONS = range(7, 12)
"""Thresholds and their trends; from REGIONS on P + 1 boundaries, P program points, and the number
of applied entries in each part."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a step, the same on all ranks but for `rank`."""

    numel: int
    size: int
    """P, the number of ranks."""
    rank: int
    k: int
    """Entries to apply."""
    aim: int
    """Candidates that the local threshold aims at."""
    wanted: int
    """Sums that the global threshold aims at, over all owners."""
    most: int
    """Entries that a message has room for."""
    fewest: int
    """Sums of one owner below which the global threshold is wrong."""
    share: int
    """Sums that an owner sends where it is wrong: the largest."""
    span: int
    """No region is longer."""
    code: int
    """Of positions."""
    values_at: int
    positions_at: int
    room: int
    """Bytes of a message."""
    stride: int
    """Bytes from one message to the next. Between them there is place for a rider."""
    parts: tuple[int, ...]
    """Elements of each part of the vector."""
    codec: Codec

    @property
    def what(self) -> int:
        """The first word of every message."""
        return MAGIC << 24 | self.codec.number << 8 | self.code

    @property
    def low_bits(self) -> int:
        """Bits of an offset that Elias-Fano stores as they are."""
        return LOW_BITS[self.code - ELIAS_FANO]

    @property
    def bitmap(self) -> int:
        """Bytes of the bits at the start of the positions: whole words."""
        if self.code == BITMAP:
            return padded(-(-self.span // 8))
        return 8 * -(-(self.most + ((self.span - 1) >> self.low_bits)) // 64)

    @property
    def words(self) -> int:
        """Of a record."""
        return REGIONS + 1 + 2 * self.size + len(self.parts)

    @property
    def everything(self) -> bool:
        """Density 1: all elements are applied, and regions have equal lengths."""
        return self.k == self.numel


def rooms(codec: Codec, most: int, span: int, itemsize: int) -> tuple[int, int, int, int]:
    """The code of positions, where values and positions begin, and the bytes of a message.

    Args:
        most: entries, within `span` elements.
        itemsize: bytes of an index in memory.
    """
    code, nbytes = shortest(most, span) if codec.codes_positions else (PLAIN, most * itemsize)
    values_at = 8 * HEAD_WORDS
    positions_at = values_at + padded(codec.nbytes(most))
    if code == BITMAP:
        nbytes = padded(nbytes)
    return code, values_at, positions_at, positions_at + padded(nbytes)


@dataclass(frozen=True)
class Record:
    """What happened in a step, and the state for the next one, as the host reads it."""

    finite: bool
    """Whether the values of all ranks are finite."""
    damaged: int
    """0, or 1 + sender + P * receiver of a damaged message."""
    offered: int
    overflow: int
    local_limit: int
    """The bits of the magnitude that all offered entries reach; `total_limit`: all applied ones."""
    total_limit: int
    local: tuple[int, int]
    """The next threshold of this rank's values, and its trend; `total`: that of sums."""
    total: tuple[int, int]
    regions: tuple[int, ...]
    points: list[int]
    """The program point of each rank."""
    applied: tuple[int, ...]
    """Entries applied in each part."""

    @staticmethod
    def of(words: list[int], size: int) -> Record:
        """The words of `Step.after`, for P = size."""
        points = REGIONS + 1 + size
        return Record(
            bool(words[ALL_FINITE]),
            words[DAMAGED],
            words[OFFERED],
            words[OVERFLOW],
            words[LOCAL_LIMIT],
            words[TOTAL_LIMIT],
            (words[LOCAL], words[LOCAL_TREND]),
            (words[TOTAL], words[TOTAL_TREND]),
            tuple(words[REGIONS:points]),
            words[points : points + size],
            tuple(words[points + size :]),
        )


@dataclass(frozen=True, eq=False)
class Vectors:
    """What a step reads and writes, besides messages and records."""

    gradient: Sequence[Tensor]
    """Flat parts, all of one float type, which together have `numel` elements."""
    out: Sequence[Tensor]
    """Where averages go: parts of the same sizes and type. They may be the same memory."""
    residual: Tensor
    """Before the step. It is only read."""
    values: Tensor
    """residual + gradient, and then the residual after the step."""
    factor: float = 1.0
    """Multiplies the gradient when it enters."""
    scale: float = 1.0
    """Multiplies the averages, but not the residual."""
    momentum: float = 0.0
    """Of DGC's momentum correction; 0: none."""
    velocity: Tensor | None = None
    """Before the step, with momentum. It is only read."""
    velocity_after: Tensor | None = None


def parts_of(plan: Plan, vector: Tensor) -> tuple[Tensor, ...]:
    """A vector cut as the gradient is."""
    return torch.split(vector, list(plan.parts))
