"""How values travel: each wire format is one class, registered by name.

A format may round values. `Codec.write` returns them as the receiver will read them, so that the
sender can keep the difference.

To add a format, derive a class from `Codec` and decorate it with `register`. All ranks must do so
before they name it in an algorithm, as in `OkTopk(wire="int8")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..kernels import for_device
from ..kernels.layout import padded
from ..kernels.numbers import QUANTUM, magnitude


class Codec(ABC):
    """Writes the values of a message and reads them again.

    Args:
        dtype: of values in memory, float32 or float64.
    """

    name: ClassVar[str]
    """Its name for users."""
    number: ClassVar[int]
    """Its number in messages, 0 to 65535. Numbers below 100 belong to this package."""
    always_finite: ClassVar[bool] = False
    """Whether `read` gives finite values for any bytes at all."""
    codes_positions: ClassVar[bool] = True
    """Whether positions are coded. If not, an index takes as many bytes as in memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take."""

    @abstractmethod
    def write(self, values: Tensor, room: Tensor) -> Tensor:
        """Fill `room`, which has `nbytes` bytes and is aligned for any type.

        Values may be NaN or infinite; the ranks find out and drop the step.

        Returns:
            The values that `read` will give, or `values` itself if they are the same.
        """

    @abstractmethod
    def read(self, room: Tensor, count: int) -> Tensor:
        """The values of a room, in `dtype`. It may hold any bytes at all."""


CODECS: dict[str, type[Codec]] = {}
FORMATS = CODECS.keys()
"""Names of all formats, also of those that are registered later."""
_Class = TypeVar("_Class", bound=type[Codec])


def register(codec: _Class) -> _Class:
    """Make a codec available under its name."""
    if type(codec.number) is not int or not 0 <= codec.number < 1 << 16:
        raise ValueError(
            f"{codec.__name__} has the number {codec.number!r}, but it must be 0 to 65535: "
            "messages have two bytes for it"
        )
    for other in CODECS.values():
        if codec.name == other.name or codec.number == other.number:
            raise ValueError(
                f"{codec.__name__} has the name {codec.name!r} and the number {codec.number}, but "
                f"{other.__name__} has {other.name!r} and {other.number}: both must be unique"
            )
    CODECS[codec.name] = codec
    return codec


class _Cast(Codec):
    """Values as another type of float; those beyond its range become its largest."""

    stored: torch.dtype

    def nbytes(self, count: int) -> int:
        return count * self.stored.itemsize

    def write(self, values: Tensor, room: Tensor) -> Tensor:
        written = room.view(self.stored)
        if self.stored == values.dtype:
            written.copy_(values)
            return values
        limit = torch.finfo(self.stored).max
        written.copy_(values.clamp(-limit, limit))
        return written.to(values.dtype)

    def read(self, room: Tensor, count: int) -> Tensor:
        return room.view(self.stored).to(self.dtype)


@register
class Plain(_Cast):
    """Values and indexes as they are in memory."""

    name, number = "plain", 0
    codes_positions = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.stored = dtype


@register
class Float32(_Cast):
    """Values rounded to float32."""

    name, number = "float32", 1
    stored = torch.float32


@register
class BFloat16(_Cast):
    """Values rounded to bfloat16."""

    name, number = "bfloat16", 2
    stored = torch.bfloat16


class _Scaled(Codec):
    """A code for each value, and behind them a scale for each block of QUANTUM values."""

    code: torch.dtype
    width: ClassVar[int]
    """Bits of a code."""
    scale: torch.dtype

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales of float32 values."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, count: int) -> Tensor:
        """The float32 values of codes and scales."""

    def nbytes(self, count: int) -> int:
        return padded(self._used(count)) + -(-count // QUANTUM) * self.scale.itemsize

    def write(self, values: Tensor, room: Tensor) -> Tensor:
        codes, scales = self.encode(values.to(torch.float32))
        start = padded(codes.nbytes)
        room[: codes.nbytes] = codes.view(torch.uint8)
        room[codes.nbytes : start] = 0
        room[start:] = scales.view(torch.uint8)
        return self.decode(codes, scales, values.numel()).to(values.dtype)

    def read(self, room: Tensor, count: int) -> Tensor:
        used = self._used(count)
        codes, scales = room[:used].view(self.code), room[padded(used) :].view(self.scale)
        return self.decode(codes, scales, count).to(self.dtype)

    def _used(self, count: int) -> int:
        """Bytes of the codes."""
        return -(-count * self.width // 8)


@register
class Float16(_Scaled):
    """Values of a block, multiplied by a power of two so that the largest just fits a float16.

    A scale is the biased exponent of a float32: that of the power that `decode` multiplies by.
    """

    name, number = "float16", 3
    code, width, scale = torch.float16, 16, torch.uint8
    largest = 32752.0
    """The largest float16 below 2**15. A value of at most this, scaled back, is never infinite."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        whole, rest = _in_blocks(values)
        rest = torch.nn.functional.pad(rest, (0, -rest.numel() % QUANTUM)).view(-1, QUANTUM)
        largest = torch.cat([magnitude(part).amax(1) for part in (whole, rest)])
        # With the power taken out, the largest value is between 2**14 and 2**15.
        exponents = ((largest >> 23) - 14).clamp(1, 240)
        scaled = _multiplied(values, 254 - exponents).clamp_(-self.largest, self.largest)
        return scaled.to(torch.float16), exponents.to(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor, count: int) -> Tensor:
        return _multiplied(codes.float(), scales.int())


class _Quantised(_Scaled):
    """A sign and a magnitude, spaced about evenly in the logarithm; see `quantise`."""

    code, scale = torch.uint8, torch.int32
    always_finite = True

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return for_device(values.device).quantise(values, self.width)

    def decode(self, codes: Tensor, scales: Tensor, count: int) -> Tensor:
        return for_device(codes.device).dequantise(codes, scales, count, self.width)


@register
class Int8(_Quantised):
    """A sign and 7 bits of magnitude."""

    name, number, width = "int8", 4, 8


@register
class Int4(_Quantised):
    """A sign and 3 bits of magnitude."""

    name, number, width = "int4", 5, 4


def _multiplied(values: Tensor, exponents: Tensor) -> Tensor:
    """Each block times its power of two; a power is a float32 with only an exponent."""
    powers = (exponents << 23).view(torch.float32)
    product = torch.empty_like(values)
    blocks = values.numel() // QUANTUM
    for part, out in zip(_in_blocks(values), _in_blocks(product), strict=True):
        torch.mul(part, powers[:blocks, None] if part.ndim == 2 else powers[blocks:], out=out)
    return product


def _in_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks, one in each row, and the rest."""
    end = values.numel() // QUANTUM * QUANTUM
    return values[:end].view(-1, QUANTUM), values[end:]
