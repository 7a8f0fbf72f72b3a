"""Messages: what is written is read, in few bytes, and damage is noticed."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from oktopk import wire
from oktopk.kernels import reference
from oktopk.wire import FORMATS, DamagedMessageError, Entries, Wire

RELATIVE = {"plain": 0.0, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5}
"""Most that a value is off by, where values differ by a factor of some thousands."""


def entries(numel: int, density: float, dtype: torch.dtype = torch.float32) -> Entries:
    random = torch.Generator().manual_seed(numel)
    indices = (torch.rand(numel, generator=random) < density).nonzero()[:, 0].int()
    values = torch.randn(len(indices), generator=random, dtype=torch.float64)
    values = values.sign() * (0.01 + values.abs())
    values *= torch.randn(len(indices), generator=random).exp()
    return Entries(indices, values.to(dtype))


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
def test_round_trip(format: str, data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from([1, 2, 9, 300, 5000, 200_000]))
    density = data.draw(st.sampled_from([0.0, 0.00001, 0.001, 0.02, 0.3, 0.95, 1.0]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    added = data.draw(st.lists(st.integers(-(2**62), 2**62), max_size=3))
    shift = data.draw(st.sampled_from([0, 12345]))
    mine = entries(numel, density, dtype)
    mine = Entries((mine.indices + shift).to(index_dtype), mine.values)
    code = Wire(format, index_dtype, dtype)
    message, sent = code.encode(mine, added)
    read, numbers = code.decode(message, shift, shift + numel)
    assert numbers == added
    assert torch.equal(read.indices, mine.indices)
    assert read.indices.dtype == index_dtype
    assert read.values.dtype == dtype
    assert torch.equal(read.values, sent), "the sender believes something else"
    off = (sent - mine.values).abs()
    assert bool((off <= RELATIVE[format] * mine.values.abs() * 1.01).all())
    room = code.room(len(mine), numel, len(added))
    assert message.numel() <= room
    padded, _ = code.encode(mine, added, room)
    assert padded.numel() == room
    assert torch.equal(code.decode(padded, shift, shift + numel)[0].values, sent)
    with mock.patch.object(wire, "for_device", return_value=cast(Any, reference)):
        assert torch.equal(code.encode(mine, added)[0], message), "the reference differs"
        again, _ = code.decode(message, shift, shift + numel)
    assert torch.equal(again.indices, read.indices)
    assert torch.equal(again.values, read.values)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
def test_damage_is_noticed(format: str, data: st.DataObject) -> None:
    code = Wire(format, torch.int32, torch.float32)
    message, _ = code.encode(entries(3000, data.draw(st.sampled_from([0.0, 0.002, 0.1, 0.5]))), [7])
    if data.draw(st.booleans()):
        damaged = message.clone()
        place = data.draw(st.integers(0, message.numel() - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
    else:
        damaged = message[: 8 * data.draw(st.integers(0, message.numel() // 8 - 1))]
    with pytest.raises(DamagedMessageError):
        code.decode(damaged, 0, 3000)


def test_a_message_of_another_format_or_region_is_noticed() -> None:
    message, _ = Wire("int8", torch.int32, torch.float32).encode(entries(3000, 0.1))
    with pytest.raises(DamagedMessageError, match="format"):
        Wire("float16", torch.int32, torch.float32).decode(message, 0, 3000)
    for low, high in ((0, 100), (2000, 3000)):
        with pytest.raises(DamagedMessageError):
            Wire("int8", torch.int32, torch.float32).decode(message, low, high)


@pytest.mark.parametrize(
    ("density", "most"),
    [(0.0005, 4.1), (0.005, 3.6), (0.02, 3.05), (0.1, 3.05), (0.5, 2.3), (1.0, 2.2)],
)
def test_bytes_of_an_entry(density: float, most: float) -> None:
    mine = entries(1_000_000, density)
    message, _ = Wire("bfloat16", torch.int32, torch.float32).encode(mine)
    assert message.numel() / len(mine) <= most
    plain, _ = Wire("plain", torch.int32, torch.float32).encode(mine)
    assert 8 <= plain.numel() / len(mine) <= 8.1
    small, _ = Wire("int8", torch.int32, torch.float32).encode(mine)
    assert small.numel() / len(mine) <= most - 0.9


@pytest.mark.parametrize("format", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e9, 3e37])
def test_small_and_large_values_survive_16_bits(format: str, scale: float) -> None:
    mine = Entries(torch.arange(4, dtype=torch.int32), torch.tensor([1.0, -0.5, 2, 0.01]) * scale)
    _, sent = Wire(format, torch.int32, torch.float32).encode(mine)
    assert bool(((sent / mine.values - 1).abs() < 0.05).all())


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_does_no_harm(format: str) -> None:
    """Ranks find out before they apply anything; until then messages must go through."""
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0])
    code = Wire(format, torch.int32, torch.float32)
    message, sent = code.encode(Entries(torch.arange(5, dtype=torch.int32), values))
    read, _ = code.decode(message, 0, 5)
    assert torch.equal(read.values.view(torch.int32), sent.view(torch.int32))
