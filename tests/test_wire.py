"""Messages: what is written is read, in few bytes, and damage is noticed."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import oktopk
from gradients import drifting_on
from oktopk.core.comm import Comm
from oktopk.core.transport import Transport
from oktopk.kernels import Kernels as reference
from oktopk.kernels import Step
from oktopk.kernels.cpu import CpuKernels as cpu
from oktopk.kernels.layout import PLAIN
from oktopk.kernels.plan import CHECKSUM, COUNT, POINT, WHAT, Plan
from oktopk.wire.codecs import CODECS, Codec, register
from oktopk.wire.message import FORMATS, DamagedMessageError, Entries, Wire
from ranks import Rank, Ranks
from test_contract import Case, check_agreement, drive


class UpperHalf(Codec):
    """A format of this test's own: the upper 16 bits of a float32."""

    name, number = "upper-half", 100

    def nbytes(self, count: int) -> int:
        return 2 * count

    def write(self, values: Tensor, room: Tensor) -> Tensor:
        room.view(torch.int16).copy_(values.float().view(torch.int32) >> 16)
        return self.read(room, values.numel())

    def read(self, room: Tensor, count: int) -> Tensor:
        bits = room.view(torch.int16).int() << 16
        return bits.view(torch.float32).to(self.dtype)


ALL_FORMATS = [*FORMATS, UpperHalf.name]
RELATIVE = {"plain": 0.0, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5}
"""Most that a value is off by, where values differ by a factor of some thousands."""
RELATIVE["int4"] = 3.0
RELATIVE[UpperHalf.name] = 2**-7


@pytest.fixture(scope="module", autouse=True)
def _own_format() -> Iterator[None]:
    with own_format():
        yield


@contextlib.contextmanager
def own_format() -> Iterator[None]:
    """UpperHalf is registered, and at the end it is not."""
    with mock.patch.dict(CODECS):
        register(UpperHalf)
        yield
    assert UpperHalf.name not in FORMATS


def using(kernels: type[reference]) -> Any:
    """These kernels, whatever the device."""
    return mock.patch("oktopk.kernels.for_type", return_value=kernels)


def entries(numel: int, density: float, dtype: torch.dtype = torch.float32) -> Entries:
    random = torch.Generator().manual_seed(numel)
    indices = (torch.rand(numel, generator=random) < density).nonzero()[:, 0].int()
    values = torch.randn(len(indices), generator=random, dtype=torch.float64)
    values = values.sign() * (0.01 + values.abs())
    values *= torch.randn(len(indices), generator=random).exp()
    return Entries(indices, values.to(dtype))


@pytest.mark.parametrize("format", ALL_FORMATS)
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
    read, numbers = code.decode(message, shift, shift + numel, len(added))
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
    again, _ = code.decode(padded, shift, shift + numel, len(added))
    assert torch.equal(again.values, sent)
    with using(reference):
        assert torch.equal(code.encode(mine, added)[0], message), "the reference differs"
        again, _ = code.decode(message, shift, shift + numel, len(added))
    assert torch.equal(again.indices, read.indices)
    assert torch.equal(again.values, read.values)


@pytest.mark.parametrize("format", ALL_FORMATS)
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
        code.decode(damaged, 0, 3000, 1)


EXTREMES = [
    *(0, 1, -1, 7, 255, 2**15, 2**16, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32),
    *(-(2**31), 2**39, 2**55, 2**62, 2**63 - 1, -(2**63)),
]
"""Numbers to put into a head."""


def seal(code: Wire, message: Tensor) -> None:
    """Write the checksum that is right, if the head says where the message ends."""
    if message.numel() < 40:
        return
    _, counts, room, *_ = message[:40].view(torch.int64).tolist()
    _, _, end = code._places(counts >> 24, counts & 0xFFFFFF, room)
    if 40 <= end <= message.numel():
        words = message[:end].view(torch.int64)
        words[3] = cpu.checksum(words)


@st.composite
def forged(draw: st.DrawFn, code: Wire, low: int, high: int, added: int) -> Tensor:
    """A message with lies in its head, bytes changed anywhere, another size, a right checksum."""
    span = high - low
    mine = entries(span, draw(st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0])), code.value_dtype)
    mine = Entries((mine.indices.long() + low).to(code.index_dtype), mine.values)
    message, _ = code.encode(mine, [1] * added)
    words = message.view(torch.int64)
    for lie in draw(st.sets(st.sampled_from(["code", "count", "added", "room", "first"]))):
        count, numbers = int(words[1]) >> 24, int(words[1]) & 0xFFFFFF
        near = {"count": count, "room": int(words[2]), "first": int(words[4])}.get(lie, 0)
        number = draw(st.one_of(st.sampled_from(EXTREMES), st.integers(near - 9, near + 9)))
        match lie:
            case "code":
                words[0] = int(words[0]) & ~0xFF | draw(st.integers(0, 8))
            case "count":
                words[1] = (number % 2**39) << 24 | numbers
            case "added":
                words[1] = count << 24 | number % 2**24
            case "room":
                words[2] = number
            case "first":
                words[4] = number
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(40, message.numel()))
        length = draw(st.integers(0, message.numel() - start))
        if draw(st.booleans()):
            message[start : start + length] = draw(st.sampled_from([0, 127, 254, 255]))
        else:
            random = torch.Generator().manual_seed(draw(st.integers(0, 9)))
            message[start : start + length] = torch.randint(256, (length,), generator=random).byte()
    nbytes = draw(st.one_of(st.just(message.numel()), st.integers(0, message.numel() + 99)))
    sized = torch.zeros(nbytes, dtype=torch.uint8)
    sized[: message.numel()] = message[:nbytes]
    seal(code, sized)
    return sized


@pytest.mark.parametrize("format", ALL_FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_no_message_breaks_the_contract(format: str, data: st.DataObject) -> None:
    """Whatever it says, in a message with a right checksum: entries in order, inside the bounds,
    or an error; with all kernels the same."""
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    code = Wire(format, index_dtype, data.draw(st.sampled_from([torch.float32, torch.float64])))
    span = data.draw(st.sampled_from([1, 9, 300, 1000]))
    low = data.draw(st.sampled_from([0, 12345, 2**31 - 1 - span]))
    added = data.draw(st.integers(0, 2))
    message = data.draw(forged(code, low, low + span, added))
    if data.draw(st.booleans()):  # a receiver that expects another part of the elements
        low, span = low + span // 3, span // 3
    outcomes: list[tuple[Entries, list[int]] | None] = []
    for kernels in (cpu, reference):
        with using(kernels):
            try:
                outcomes.append(code.decode(message, low, low + span, added))
            except DamagedMessageError:
                outcomes.append(None)
    fast, slow = outcomes
    assert (fast is None) == (slow is None)
    if fast is not None and slow is not None:
        (read, numbers), (again, _) = fast, slow
        indices = read.indices.tolist()
        assert indices == sorted(set(indices))
        assert all(low <= index < low + span for index in indices)
        assert len(read.values) == len(indices)
        assert bool(read.values.isfinite().all()) or not code.always_finite
        assert len(numbers) == added
        assert torch.equal(read.indices, again.indices)
        width = {4: torch.int32, 8: torch.int64}[read.values.itemsize]
        assert torch.equal(read.values.view(width), again.values.view(width))


def same(a: Entries, b: Entries) -> bool:
    """Bitwise."""
    pairs = [(a.indices, b.indices), (a.values, b.values)]
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in pairs)


CODES = {"plain": 0, "consecutive": 1, "bitmap": 2}
CODES |= {f"Elias-Fano, {bits} bits": 2 + bits // 4 for bits in (4, 8, 12, 16, 20)}


def crafted(code: Wire, kind: str, count: int, first: int, positions: list[int]) -> Tensor:
    """A message with these bytes of positions."""
    split, start, end = code._places(count, 0, len(positions))
    message = torch.zeros(end, dtype=torch.uint8)
    message[start : start + len(positions)] = torch.tensor(positions, dtype=torch.uint8)
    head = [code._what | CODES[kind], count << 24, len(positions), 0, first]
    message[:split].view(torch.int64).copy_(torch.tensor(head))
    seal(code, message)
    return message


def highs(*places: int) -> list[int]:
    """A word with these bits."""
    return list(sum(1 << place for place in places).to_bytes(8, "little"))


def bytes_of(*indices: int) -> list[int]:
    return torch.tensor(indices, dtype=torch.int32).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("kind", "count", "first", "positions"),
    [
        ("plain", 2, 150, bytes_of(50, 160)),  # the head says what the list does not
        ("plain", 2, 150, bytes_of(-7, 160)),
        ("plain", 2, 150, bytes_of(250, 260)),
        ("plain", 2, 150, bytes_of(150, 200)),
        ("plain", 2, 150, bytes_of(150, 2**31 - 1)),
        ("plain", 3, 150, bytes_of(150, -7, 180)),
        ("plain", 3, 150, bytes_of(150, 150, 180)),
        ("plain", 2, -1, bytes_of(-1, 160)),
        ("plain", 1, 150, [*bytes_of(150), 0, 0, 0]),
        ("bitmap", 1, 150, [1]),  # in a message whose format does not know it
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0, 4), 0x20]),  # 150 and 200
        ("Elias-Fano, 4 bits", 2, 50, [*highs(0, 5), 0x20]),
        ("Elias-Fano, 4 bits", 2, 2**63 - 1, [*highs(0, 1), 0x20]),
        ("Elias-Fano, 4 bits", 2, -(2**63), [*highs(0, 1), 0x20]),
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0, 1), 0x00]),  # the same twice
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0, 1), 0x12]),  # not in order
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0), 0x20]),  # too few bits
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0, 1, 2), 0x20]),  # too many
        ("Elias-Fano, 4 bits", 2, 150, [*highs(*range(64)), 0x20]),
        ("Elias-Fano, 4 bits", 2, 150, [*highs(), 0x20]),
        ("Elias-Fano, 4 bits", 2, 150, [0x20]),  # no bitmap
        ("Elias-Fano, 4 bits", 2, 150, []),
        ("Elias-Fano, 4 bits", 2, 150, [*highs(0, 1), 0x20, 0]),  # another size
        ("Elias-Fano, 4 bits", 2, 150, [3, 0, 0, 0, 0x20]),
        ("Elias-Fano, 4 bits", 0, 150, [*highs()]),
        ("Elias-Fano, 8 bits", 2, 150, [*highs(0, 1), 0, 50]),
        ("Elias-Fano, 12 bits", 2, 150, [*highs(0, 2), 0, 10, 0x00]),
        ("Elias-Fano, 16 bits", 2, 150, [*highs(0, 1), 0, 10, 0, 1]),
        # more than 2**32 further on
        ("Elias-Fano, 16 bits", 2, 150, [1] + 8192 * [0] + [2] + 6 * [0] + [0, 1, 0, 0]),
        ("Elias-Fano, 20 bits", 1, 150, [*highs(0), 0, 0, 0]),  # there is no such code
        ("bitmap", 2, 190, [1, 4]),
        ("bitmap", 2, 99, [3]),
        ("bitmap", 1, 150, [3]),
        ("bitmap", 1, 2**63 - 1, [1, 0]),
        ("consecutive", 51, 150, []),
        ("consecutive", 3, 99, []),
        ("consecutive", 3, 150, [0]),
    ],
)
def test_positions_that_lie(kind: str, count: int, first: int, positions: list[int]) -> None:
    """With a right checksum, to a receiver who expects elements 100 to 200."""
    format = "plain" if kind == "plain" or positions == [1] else "int8"
    code = Wire(format, torch.int32, torch.float32)
    message = crafted(code, kind, count, first, positions)
    for kernels in (cpu, reference):
        with using(kernels), pytest.raises(DamagedMessageError):
            code.decode(message, 100, 200)


def test_a_message_of_another_format_or_region_is_noticed() -> None:
    message, _ = Wire("int8", torch.int32, torch.float32).encode(entries(3000, 0.1))
    with pytest.raises(DamagedMessageError, match="format"):
        Wire("float16", torch.int32, torch.float32).decode(message, 0, 3000)
    for low, high in ((0, 100), (2000, 3000)):
        with pytest.raises(DamagedMessageError):
            Wire("int8", torch.int32, torch.float32).decode(message, low, high)


@pytest.mark.parametrize(
    ("density", "most"),
    [(0.0005, 3.8), (0.005, 3.4), (0.02, 3.05), (0.1, 2.9), (0.5, 2.3), (1.0, 2.2)],
)
def test_bytes_of_an_entry(density: float, most: float) -> None:
    mine = entries(1_000_000, density)
    message, _ = Wire("bfloat16", torch.int32, torch.float32).encode(mine)
    assert message.numel() / len(mine) <= most
    plain, _ = Wire("plain", torch.int32, torch.float32).encode(mine)
    whole = 4 if density == 1.0 else 8
    assert whole <= plain.numel() / len(mine) <= whole + 0.1
    small, _ = Wire("int8", torch.int32, torch.float32).encode(mine)
    assert small.numel() / len(mine) <= most - 0.9
    smallest, _ = Wire("int4", torch.int32, torch.float32).encode(mine)
    assert smallest.numel() / len(mine) <= most - 1.4


@pytest.mark.parametrize("format", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e9, 3e37])
def test_small_and_large_values_survive_16_bits(format: str, scale: float) -> None:
    mine = Entries(torch.arange(4, dtype=torch.int32), torch.tensor([1.0, -0.5, 2, 0.01]) * scale)
    _, sent = Wire(format, torch.int32, torch.float32).encode(mine)
    assert bool(((sent / mine.values - 1).abs() < 0.05).all())


@pytest.mark.parametrize("outlier", [1e30, torch.finfo(torch.float32).max])
def test_an_outlier_spoils_only_its_block(outlier: float) -> None:
    values = torch.rand(1000) + 1
    values[500] = outlier
    indices = torch.arange(1000, dtype=torch.int32)
    message, sent = Wire("float16", torch.int32, torch.float32).encode(Entries(indices, values))
    near = (sent / values - 1).abs() < 0.001
    assert bool(near[500])
    assert bool(near[:384].all())
    assert bool(near[512:].all())
    assert message.numel() < 2.1 * 1000


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_what_is_not_finite_does_no_harm(format: str) -> None:
    """Ranks find out before they apply anything; until then messages must go through."""
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0])
    code = Wire(format, torch.int32, torch.float32)
    message, sent = code.encode(Entries(torch.arange(5, dtype=torch.int32), values))
    read, _ = code.decode(message, 0, 5)
    assert torch.equal(read.values.view(torch.int32), sent.view(torch.int32))


def drive_own_format(rank: Rank, case: Case) -> list[dict[str, Any]]:
    with own_format():
        return drive(rank, "oktopk", case)


def test_a_new_format_keeps_the_contract(ranks: Ranks) -> None:
    """On real ranks: nothing is lost by rounding, and all ranks agree."""
    case = Case("drifting", 3001, 0.02, "float32", 8, UpperHalf.name)
    steps = list(zip(*ranks.run(3, drive_own_format, case), strict=True))
    check_agreement(steps)
    assert steps[-1][0]["selected_global"] > 0


@pytest.mark.parametrize("number", [-1, 1 << 16, "7"])
def test_the_number_of_a_format_fits_a_message(number: Any) -> None:
    codec = type("Other", (UpperHalf,), {"name": "other", "number": number})
    with pytest.raises(ValueError, match="must be 0 to 65535"):
        register(codec)
    assert "other" not in CODECS


def test_names_and_numbers_of_formats_are_unique() -> None:
    class Again(UpperHalf):
        number = 101

    class Other(UpperHalf):
        name = "other"

    for codec in (Again, Other):
        with pytest.raises(ValueError, match="UpperHalf has 'upper-half' and 100"):
            register(codec)
    assert {name: codec.number for name, codec in CODECS.items()} == {
        "plain": 0,
        "float32": 1,
        "bfloat16": 2,
        "float16": 3,
        "int8": 4,
        "int4": 5,
        "upper-half": 100,
    }, "messages of earlier versions would be read as others"


class Done(Exception):
    """A liar has said what it had to say, and leaves."""


Encoded = tuple[Tensor, Tensor]
Lie = Callable[[Callable[..., Encoded], Wire, Entries, Sequence[int], int | None], Encoded]
"""What a liar encodes, by way of the real function."""


def far_away(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    """Elements that nobody has."""
    return reseal(code, encode(code, mine, added, nbytes), first=10**9)


def elsewhere(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    """Elements of the first rank."""
    return reseal(code, encode(code, mine, added, nbytes), first=0)


def below_all(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    """A negative index, of which the head does not know."""
    indices = mine.indices.clone()
    indices[0] = -(10**9)
    encoded = encode(code, Entries(indices, mine.values), added, nbytes)
    return reseal(code, encoded, first=int(mine.indices[0]))


def not_finite(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    values = mine.values.clone()
    values[0] = math.nan
    message, _ = encode(code, Entries(mine.indices, values), added, nbytes)
    return message, encode(code, mine, added, nbytes)[1]


def wordless(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    """Without the numbers that should have been added."""
    return encode(code, mine, (), nbytes)  # type: ignore[no-any-return]


def flipped(encode: Any, code: Wire, mine: Entries, added: Any, nbytes: Any) -> Encoded:
    """One bit of a value, without a new checksum."""
    message, sent = encode(code, mine, added, nbytes)
    message[100] ^= 4
    return message, sent


def reseal(code: Wire, encoded: Encoded, first: int) -> Encoded:
    message, sent = encoded
    message[:40].view(torch.int64)[4] = first
    seal(code, message)
    return message, sent


@dataclass(frozen=True)
class Liar:
    """One of two ranks, which tells one lie."""

    algorithm: oktopk.Algorithm
    when: int
    """How many messages of the step go before it; for a lie about a size, how many trades."""
    lie: Lie | int
    """A number is the size that it says its message has."""
    rank: int = 1
    crowded: bool = False
    """Whether most of what is applied is in the region of rank 1."""

    def __str__(self) -> str:
        what = self.lie if isinstance(self.lie, int) else self.lie.__name__
        name = type(self.algorithm).__name__
        return f"{name}-{self.algorithm.wire}-{self.when}-{what}-from-{self.rank}"


class Lying:
    """The step of a liar, who leaves when its lie has arrived."""

    def __init__(self, liar: Liar) -> None:
        self.liar = liar
        self.calls = itertools.count()
        self.lied = self.sent = False

    def patches(self) -> list[tuple[Any, str, Any]]:
        if not isinstance(self.liar.lie, int):
            return [
                (Wire, "encode", self.encode(Wire.encode)),
                (Transport, "exchange", self.exchange(Transport.exchange)),
                (Transport, "receive", self.leave(Transport.receive, "lied")),
                (Comm, "decode", self.leave(Comm.decode, "lied")),
                (Comm, "trade", self.leave(Comm.trade, "sent")),
            ]
        if isinstance(self.liar.algorithm, oktopk.GTopk):
            return [(Transport, "send", self.send())]
        return [(Comm, "trade", self.trade(Comm.trade))]

    def encode(self, real: Any) -> Any:
        def encode(code: Wire, mine: Entries, added: Any = (), nbytes: Any = None) -> Encoded:
            if next(self.calls) != self.liar.when:
                return real(code, mine, added, nbytes)  # type: ignore[no-any-return]
            self.lied = True
            return cast(Lie, self.liar.lie)(real, code, mine, added, nbytes)

        return encode

    def exchange(self, real: Any) -> Any:
        def exchange(*args: Any) -> Any:
            self.sent = self.lied
            return real(*args)

        return exchange

    def leave(self, real: Any, when: str) -> Any:
        def leave(*args: Any, **options: Any) -> Any:
            if getattr(self, when):
                raise Done
            return real(*args, **options)

        return leave

    def trade(self, real: Any) -> Any:
        def trade(step: Comm, rows: list[list[int]]) -> Any:
            if next(self.calls) != self.liar.when:
                return real(step, rows)
            real(step, [[*row[:-1], cast(int, self.liar.lie)] for row in rows])
            raise Done

        return trade

    def send(self) -> Any:
        def send(transport: Transport, message: Tensor, target: int) -> None:
            size = torch.tensor([self.liar.lie]).view(torch.uint8)
            transport._start(size, target, size[:0], target).wait()
            raise Done

        return send


def deceived(rank: Rank, liar: Liar) -> str:
    """What a rank makes of the lie."""
    reduce = oktopk.SparseAllreduce(liar.algorithm, 4000, rank.group)
    for step in range(3):
        reduce(drifting_on(rank, step, 4000))
    gradient, before = drifting_on(rank, 3, 4000), reduce.residual.clone()
    if liar.crowded:
        gradient[3000:] *= 100
    with contextlib.ExitStack() as stack:
        if rank.rank == liar.rank:
            for place, name, function in Lying(liar).patches():
                stack.enter_context(mock.patch.object(place, name, function))
        try:
            reduce(gradient)
        except oktopk.PeerError as error:
            assert torch.equal(reduce.residual, before)
            return str(error)
        except Done:
            pass
    return "nothing"


SIZES_FIRST = oktopk.OkTopkVariable(0.05)
BALANCED = oktopk.OkTopkVariable(0.05, balance_trigger=1.0)
LIARS = [
    # Sizes are traded before messages.
    Liar(SIZES_FIRST, 0, elsewhere, rank=0),
    Liar(SIZES_FIRST, 1, elsewhere),
    Liar(SIZES_FIRST, 0, 2**60),
    Liar(SIZES_FIRST, 1, 2**60),
    Liar(SIZES_FIRST, 1, -1),
    # Entries are moved between ranks; those that would have been sent otherwise come first.
    Liar(BALANCED, 2, far_away, crowded=True),
    Liar(BALANCED, 3, elsewhere, crowded=True),
    Liar(oktopk.TopkA(0.05), 0, far_away),
    Liar(oktopk.TopkA(0.05), 0, 2**60),
    Liar(oktopk.TopkA(0.05, wire="float16"), 0, not_finite),
    Liar(oktopk.TopkDSA(0.05), 1, elsewhere),
    # Regions are sent whole; here, too, the entries come first.
    Liar(oktopk.TopkDSA(0.9, wire="plain"), 2, elsewhere),
    Liar(oktopk.TopkDSA(0.9, wire="plain"), 2, not_finite),
    Liar(oktopk.TopkDSA(0.9, wire="plain"), 2, flipped),
    Liar(oktopk.TopkDSA(0.9, wire="plain"), 1, -(2**60)),
    # Up the tree, and down.
    Liar(oktopk.GTopk(0.05), 0, far_away),
    Liar(oktopk.GTopk(0.05), 0, wordless),
    Liar(oktopk.GTopk(0.05), 0, 2**60),
    Liar(oktopk.GTopk(0.05), 0, far_away, rank=0),
    Liar(oktopk.GTopk(0.05, wire="float32"), 0, not_finite, rank=0),
]


@pytest.mark.parametrize("liar", LIARS, ids=str)
def test_a_lying_peer_is_an_error(ranks: Ranks, liar: Liar) -> None:
    """On the rank that is lied to, before anything is done with what it says."""
    answers = ranks.run(2, deceived, liar)
    assert answers[liar.rank] == "nothing"
    assert f"rank {liar.rank}" in answers[1 - liar.rank]
    assert "Nothing was applied on this rank" in answers[1 - liar.rank]


Forgery = Callable[[Plan, Tensor], None]
"""Changes a message of a fixed-size step."""


def of_another_format(plan: Plan, message: Tensor) -> None:
    message.view(torch.int64)[WHAT] += 1 << 8


def of_more_entries(plan: Plan, message: Tensor) -> None:
    message.view(torch.int64)[COUNT] += 1


def of_too_many(plan: Plan, message: Tensor) -> None:
    message.view(torch.int64)[COUNT] = plan.most + 1


def of_less_than_none(plan: Plan, message: Tensor) -> None:
    message.view(torch.int64)[COUNT] = -1


def beyond_the_region(plan: Plan, message: Tensor) -> None:
    """The last entry is at the last place there is."""
    room = message[plan.positions_at :]
    if plan.code == PLAIN:
        room.view(torch.int32)[: plan.most] = plan.span
        return
    bits = room[: plan.bitmap]
    last = int(bits.nonzero()[-1])
    bits[last] &= ~(1 << (int(bits[last]).bit_length() - 1)) & 0xFF
    bits[-1] |= 0x80


def below_the_region(plan: Plan, message: Tensor) -> None:
    message[plan.positions_at :].view(torch.int32)[0] = -5


def with_a_nan(plan: Plan, message: Tensor) -> None:
    message[plan.values_at : plan.values_at + 4] = 0xFF


def damaged_on_the_way(plan: Plan, message: Tensor) -> None:
    message[plan.values_at + 3] ^= 4


def with_a_damaged_point(plan: Plan, message: Tensor) -> None:
    """It is no program point of the sender."""
    message.view(torch.int64)[POINT] ^= 1 << 40


FORGERIES = [
    (wire, phase, forge)
    for phase in ("prepare", "combine")
    for wire, forgeries in {
        "int8": (of_another_format, of_more_entries, of_too_many, of_less_than_none,
                 beyond_the_region, damaged_on_the_way, with_a_damaged_point),
        "plain": (beyond_the_region, below_the_region, with_a_nan),
        "bfloat16": (beyond_the_region, with_a_nan),
        UpperHalf.name: (of_more_entries, with_a_nan),
    }.items()
    for forge in forgeries
]  # fmt: skip


def forged_step(rank: Rank, wire: str, phase: str, forge: Forgery) -> str:
    """What a rank makes of a step in which rank 1 forges a message to rank 0."""
    with own_format():
        reduce = oktopk.SparseAllreduce(oktopk.OkTopk(0.05, wire=wire), 4000, rank.group)
        for step in range(3):
            reduce(drifting_on(rank, step, 4000))
        gradient, before = drifting_on(rank, 3, 4000), reduce.residual.clone()
        real = getattr(cpu.Step, phase)

        def lie(step: Step, *args: Any) -> None:
            real(step, *args)
            message = (step.send[0] if phase == "prepare" else step.reply)[: step.plan.room]
            forge(step.plan, message)
            if forge not in (damaged_on_the_way, with_a_damaged_point):
                words = message.view(torch.int64)
                words[CHECKSUM] = cpu.checksum(words)

        with contextlib.ExitStack() as stack:
            if rank.rank == 1:
                stack.enter_context(mock.patch.object(cpu.Step, phase, lie))
            try:
                reduce(gradient)
            except oktopk.PeerError as error:
                assert torch.equal(reduce.residual, before)
                return str(error)
        return "nothing"


@pytest.mark.parametrize(("wire", "phase", "forge"), FORGERIES)
def test_a_forged_message_is_an_error(ranks: Ranks, wire: str, phase: str, forge: Forgery) -> None:
    """Of a message to an owner, all ranks are told. A reply damages one rank only."""
    answers = ranks.run(3, forged_step, wire, phase, forge)
    assert "a message from rank 1 is damaged" in answers[0]
    for answer in answers[1:] if phase == "prepare" else ():
        assert "a message from rank 1 to rank 0 is damaged" in answer
    assert "Nothing was applied on this rank" in answers[0]
