"""The fast kernels equal the reference, bit for bit, on everything a float can be."""

from __future__ import annotations

import inspect
import math
import os
import secrets
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from launch import Warm
from oktopk.core.select import kth_largest, smallest
from oktopk.kernels import Kernels as reference
from oktopk.kernels import for_device, for_type, layout, numbers
from oktopk.kernels.cpu import CpuKernels as cpu
from oktopk.kernels.cpu import arrays
from oktopk.kernels.cpu.loops import codes, optimizer, selection
from oktopk.wire.message import Entries, Wire

DTYPES = (torch.float32, torch.float64)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-40, 5e-324, 1e-300, 3e38, float("inf"))


@st.composite
def values(draw: st.DrawFn, dtype: torch.dtype, size: int | None = None) -> Tensor:
    """Any size, not divisible by anything in particular; many ties, zeros and denormals."""
    count = draw(st.integers(0, 200)) if size is None else size
    width = 8 * dtype.itemsize
    element = st.one_of(
        st.sampled_from(SPECIAL),
        st.floats(width=32 if width == 32 else 64, allow_nan=True),
        st.floats(-4, 4, width=16),
    )
    return torch.tensor(draw(st.lists(element, min_size=count, max_size=count)), dtype=dtype)


@st.composite
def thresholds(draw: st.DrawFn, of: Tensor) -> float:
    """Often one of the values themselves, where >= and > differ; never zero."""
    finite = [abs(x) for x in of.tolist() if x == x and x != 0]
    choices = [st.sampled_from([smallest(of.dtype), 1.0, float("inf")])]
    if finite:
        choices.append(st.sampled_from(finite))
    return float(draw(st.one_of(*choices)))


@st.composite
def entries(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    indices = sorted(draw(st.sets(st.integers(0, 300), max_size=80)))
    return torch.tensor(indices, dtype=torch.int32), draw(values(dtype, len(indices)))


def assert_same(fast: Any, slow: Any) -> None:
    """The same types and bits."""
    for a, b in zip(fast, slow, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        else:
            assert a == b


def test_kernels_by_device() -> None:
    """Any type of device has all kernels; fast ones replace those of the reference by name."""
    assert for_device(torch.device("cpu")) is cpu
    assert for_type("meta") is reference
    fast, known = ({name for name in vars(k) if name[0] != "_"} for k in (cpu, reference))
    assert fast <= known, "a kernel that the reference does not specify"


def test_a_fast_version_may_begin_with_one_kernel() -> None:
    """The others are those of the reference."""
    sizes = []

    class One(reference):
        @staticmethod
        def checksum(words: Tensor) -> int:
            sizes.append(words.numel())
            return cpu.checksum(words)

    x = torch.linspace(-1, 1, 1001)
    entries, wire = Entries(*cpu.select(x, 0.5)), Wire("int8", torch.int32, torch.float32)
    expected, _ = wire.encode(entries)
    with mock.patch("oktopk.kernels.for_type", return_value=One):
        message, _ = wire.encode(entries)
        assert for_device(x.device).select is reference.select
    assert torch.equal(message, expected)
    assert sizes == [message.numel() // 8]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_accumulate(dtype: torch.dtype, data: st.DataObject) -> None:
    gradient = data.draw(values(dtype))
    residual = data.draw(values(dtype, gradient.numel()))
    threshold = data.draw(thresholds(residual + gradient))
    cuts = data.draw(st.lists(st.integers(0, gradient.numel()), max_size=3).map(sorted))
    parts = gradient.tensor_split(cuts)
    fast_out, slow_out = torch.empty_like(residual), torch.empty_like(residual)
    fast = cpu.accumulate(residual, parts, fast_out, threshold)
    slow = reference.accumulate(residual, parts, slow_out, threshold)
    assert torch.equal(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fast_out, slow_out, rtol=0, atol=0, equal_nan=True)
    sums = slow_out.tensor_split(cuts)
    assert fast[2] == slow[2] == [bool(torch.isfinite(part).all()) for part in sums]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, 7, 16])
def test_accumulate_past_the_cache(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, start: int
) -> None:
    """As large vectors are written; from any address, on any number of threads."""
    monkeypatch.setattr(arrays, "_LARGE", 0)
    residual, gradient = torch.randn(2, 300_000, dtype=dtype)[:, start:]
    fast_out, slow_out = torch.full((2, 300_000), 7.0, dtype=dtype)
    parts = gradient.split([1000, 65, 298_935 - start])
    fast = cpu.accumulate(residual, parts, fast_out[start:], 2.0)
    slow = reference.accumulate(residual, parts, slow_out[start:], 2.0)
    assert_same(fast, slow)
    assert_same([fast_out], [slow_out])
    for kernels, out in ((cpu, fast_out), (reference, slow_out)):
        kernels.scatter(out[start:].split([70_000, 3, 229_997 - start]), *fast[:2])
    assert_same([fast_out], [slow_out])


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_select(dtype: torch.dtype, data: st.DataObject) -> None:
    dense = data.draw(values(dtype))
    threshold = data.draw(thresholds(dense))
    assert_same(cpu.select(dense, threshold), reference.select(dense, threshold))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_histogram(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(values(dtype))
    width = 8 * dtype.itemsize - 1
    bits = data.draw(st.integers(1, 16))
    shift = data.draw(st.integers(0, width - bits))
    prefix = 0
    if x.numel() and data.draw(st.booleans()):
        prefix = int(numbers.magnitude(x)[0] >> (shift + bits))
    fast, slow = (kernel.histogram(x, prefix, shift, bits) for kernel in (cpu, reference))
    assert_same([fast], [slow])


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_keep(dtype: torch.dtype, data: st.DataObject) -> None:
    indices, x = data.draw(entries(dtype))
    threshold = data.draw(thresholds(x))
    ties = data.draw(st.integers(0, 5))
    assert_same(cpu.keep(indices, x, threshold, ties), reference.keep(indices, x, threshold, ties))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_merge(dtype: torch.dtype, data: st.DataObject) -> None:
    ours, theirs = data.draw(entries(dtype)), data.draw(entries(dtype))
    assume(not bool(ours[1].isnan().any() | theirs[1].isnan().any()))
    fast, slow = cpu.merge(*ours, *theirs), reference.merge(*ours, *theirs)
    assert torch.equal(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_add_at_scatter_and_take_common(dtype: torch.dtype, data: st.DataObject) -> None:
    ours, theirs = data.draw(entries(dtype)), data.draw(entries(dtype))
    fast, slow = torch.zeros(301, dtype=dtype), torch.zeros(301, dtype=dtype)
    for kernels, dense in ((cpu, fast), (reference, slow)):
        kernels.scatter([dense], *theirs)
        kernels.scatter([dense[:100], dense[100:]], *ours)  # overwrites all that was there
        kernels.take_common(dense, *ours, ours[0])
        kernels.add_at(dense, *ours)
        kernels.take_common(dense, *ours, theirs[0])
    torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)
    common = set(ours[0].tolist()) & set(theirs[0].tolist())
    assert all(fast[i] == 0 for i in common if slow[i].isfinite())


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_sum_select(dtype: torch.dtype, data: st.DataObject) -> None:
    lists = [data.draw(entries(dtype)) for _ in range(data.draw(st.integers(1, 4)))]
    indices, values = (torch.cat([entry[j] for entry in lists]) for j in (0, 1))
    assume(not bool(values.isnan().any() | values.isinf().any()))
    ends = torch.tensor([len(entry[0]) for entry in lists]).cumsum(0).tolist()
    threshold = data.draw(thresholds(values))
    arguments = (indices + 40, values, ends, 40, 341, threshold)
    assert_same(cpu.sum_select(*arguments), reference.sum_select(*arguments))


def test_sum_select_of_many_chunks() -> None:
    """More elements than are summed together, on two threads."""
    random = torch.Generator().manual_seed(0)
    lists = [(torch.rand(200_001, generator=random) < d).nonzero()[:, 0] for d in (0.1, 0.02, 0.9)]
    indices = torch.cat(lists).int() + 1_000_000
    values = torch.randn(indices.numel(), generator=random)
    ends = torch.tensor([len(each) for each in lists]).cumsum(0).tolist()
    for threshold in (1e-45, 1.0, 3.0):
        arguments = (indices, values, ends, 1_000_000, 1_200_001, threshold)
        assert_same(cpu.sum_select(*arguments), reference.sum_select(*arguments))


@pytest.mark.parametrize("most", [math.inf, 0.1])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adam(dtype: torch.dtype, layout: torch.memory_format | None, most: float) -> None:
    """Also where tensors do not lie densely in memory (None)."""
    random = torch.Generator().manual_seed(0)
    shape = (8, 3, 5, 7)
    tensors = [torch.randn(shape, generator=random, dtype=dtype) for _ in range(3)]
    tensors.append(torch.rand(shape, generator=random, dtype=dtype))
    tensors[1] *= torch.rand(shape, generator=random) < 0.1
    factors = {"sign": -1.0, "grown": 1.01, "least": 0.5, "weight": 0.4, "decay": 0.1}
    factors |= {"shrink": 0.99, "unbias": 1.1, "eps": 1e-8, "lr": 0.01, "most": most}
    results = []
    for kernels in (cpu, reference):
        if layout is None:
            copies = [torch.stack([t, t], -1)[..., 0] for t in tensors]
        else:
            copies = [t.clone(memory_format=layout) for t in tensors]
        parameter, gradient, average, moment = copies
        kernels.adam(parameter, gradient, average, moment, **factors)
        results.append(copies)
    torch.testing.assert_close(*results, rtol=3e-6, atol=1e-7)
    assert torch.equal(results[0][1], tensors[1]), "the gradient has changed"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_step_square(dtype: torch.dtype, layout: torch.memory_format | None) -> None:
    """Of steps that are bounded, of what is divided by zero, of the smallest numbers there are."""
    random = torch.Generator().manual_seed(0)
    shape = (8, 3, 5, 1100)
    gradient = torch.randn(shape, generator=random, dtype=dtype).pow(3)
    gradient *= torch.rand(shape, generator=random) < 0.1
    gradient.view(-1)[:4] = torch.tensor([0.0, -torch.finfo(dtype).tiny, 1e15, -0.0], dtype=dtype)
    moment = torch.rand(shape, generator=random, dtype=dtype)
    moment.view(-1)[:9:2] = 0
    expected = (gradient**2 / torch.maximum(1.01 * moment, gradient**2 / 25)).nan_to_num(25)
    expected = expected.where(gradient != 0, 0).mean()
    found, before = [], torch.get_num_threads()
    for kernels in (cpu, reference):
        tensors = [
            torch.stack([t, t], -1)[..., 0] if layout is None else t.clone(memory_format=layout)
            for t in (gradient, moment)
        ]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(float(kernels.step_square(*tensors, grown=1.01, least=0.2)))
    torch.set_num_threads(before)
    assert found[0] == pytest.approx(float(expected), rel=1e-5)
    assert found == [found[0]] * 4


@given(data=st.data())
def test_codes_of_positions(data: st.DataObject) -> None:
    gaps = st.one_of(st.integers(1, 20), st.integers(250, 520), st.integers(65_530, 131_080))
    steps = data.draw(st.lists(gaps, max_size=40))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    low = data.draw(st.sampled_from([0, 7, 2**31 - 1 - 41 * 131_080]))
    indices = (torch.tensor(steps, dtype=torch.int64).cumsum(0) + low - 1).to(dtype)
    span = int(indices[-1]) - low + 1 if steps else 0
    for bits in layout.LOW_BITS if steps else ():
        words = -(-(len(steps) + ((span - 1) >> bits)) // 64)
        length = 8 * words + layout.low_bytes(len(steps), bits)
        fast, slow = (torch.empty(length, dtype=torch.uint8) for _ in range(2))
        cpu.pack_elias_fano(indices, low, bits, fast)
        reference.pack_elias_fano(indices, low, bits, slow)
        assert_same([fast], [slow])
        for kernels in (cpu, reference):
            read = kernels.unpack_elias_fano(fast, len(steps), bits, low, 2**31 - 1, dtype)
            assert torch.equal(read, indices)
    if steps and sum(steps) < 2000:
        fast, slow = (torch.empty(250, dtype=torch.uint8) for _ in range(2))
        cpu.pack_bits(indices, low, fast)
        reference.pack_bits(indices, low, slow)
        assert_same([fast], [slow])
        for kernels in (cpu, reference):
            assert torch.equal(kernels.unpack_bits(fast, low, low + 2000, dtype), indices)


@given(data=st.data())
def test_unpacking_any_bytes_stops_at_the_bound(data: st.DataObject) -> None:
    room = data.draw(st.binary(max_size=40).map(lambda text: bytes(text) * 2))
    stream = torch.tensor(list(room), dtype=torch.uint8)
    low = data.draw(st.sampled_from([0, 7, 2**31 - 1000]))
    high = low + data.draw(st.one_of(st.integers(1, 400), st.just(999)))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    count = data.draw(st.integers(-1, 50))
    for bits in (0, *layout.LOW_BITS):
        if bits:
            read = [
                k.unpack_elias_fano(stream, count, bits, low, high, dtype) for k in (cpu, reference)
            ]
            assert read[0].numel() in (0, count)
        else:
            read = [k.unpack_bits(stream, low, high, dtype) for k in (cpu, reference)]
        fast, slow = read
        assert_same([fast], [slow])
        assert bool((fast[1:] > fast[:-1]).all())
        assert bool(((fast >= low) & (fast < high)).all())


@pytest.mark.parametrize("width", [8, 4])
@given(data=st.data())
def test_quantise(width: int, data: st.DataObject) -> None:
    x = torch.cat([data.draw(values(torch.float32)) for _ in range(data.draw(st.integers(1, 3)))])
    fast, slow = cpu.quantise(x, width), reference.quantise(x, width)
    assert_same(fast, slow)
    read = cpu.dequantise(*fast, x.numel(), width)
    assert_same([read], [reference.dequantise(*fast, x.numel(), width)])
    assert bool(read.isfinite().all())
    if bool(x.isfinite().all()):
        assert torch.equal(read.sign()[read != 0], x.sign()[read != 0])


@pytest.mark.parametrize("width", [8, 4])
@given(data=st.data())
def test_dequantise_any_bits(width: int, data: st.DataObject) -> None:
    """All give finite values, by all kernels the same."""
    blocks = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
    count = numbers.QUANTUM * len(blocks) - 3
    numbered = torch.arange(-(-count * width // 8)).to(torch.uint8)
    for scales in (blocks, [block & ~0xFF | 31 for block in blocks]):
        packed = (numbered, torch.tensor(scales, dtype=torch.int32), count, width)
        fast = cpu.dequantise(*packed)
        assert_same([fast], [reference.dequantise(*packed)])
        assert bool(fast.isfinite().all())


def test_quantised_values_are_near() -> None:
    """Within 2 % or 40 %, where the largest is some ten times the smallest."""
    x = torch.rand(1000) * 9 + 1
    for width, most in ((8, 0.02), (4, 0.4)):
        read = cpu.dequantise(*cpu.quantise(x, width), 1000, width)
        assert bool(((read / x - 1).abs() < most).all())


@pytest.mark.parametrize("width", [8, 4])
def test_no_value_is_sent_at_twice_its_size(width: int) -> None:
    """Even where one scale holds numbers of all sizes, so that codes are many octaves apart."""
    x = torch.exp2(torch.rand(100_000, generator=torch.Generator().manual_seed(2)) * 250 - 125)
    read = cpu.dequantise(*cpu.quantise(x, width), x.numel(), width)
    assert bool((read < 2 * x).all())


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_checksum(words: list[int]) -> None:
    x = torch.tensor(words, dtype=torch.int64)
    assert cpu.checksum(x) == reference.checksum(x)


@pytest.mark.parametrize("content", ["random", "zeros", "counting"])
def test_checksum_sees_flips_and_swaps(content: str) -> None:
    """Of each bit, of the same bit in two words, of the order of two words."""
    random = torch.Generator().manual_seed(0)
    words = torch.zeros(200, dtype=torch.int64)
    if content == "random":
        words.random_(generator=random)
    elif content == "counting":
        words.copy_(torch.arange(200))
    right = cpu.checksum(words)
    bits = [1 << bit if bit < 63 else -(1 << 63) for bit in range(64)]

    def seen(changed: dict[int, int]) -> bool:
        before = {place: int(words[place]) for place in changed}
        for place, word in changed.items():
            words[place] = word
        wrong = cpu.checksum(words) != right
        for place, word in before.items():
            words[place] = word
        return wrong

    places = [place for place in range(200) if place != 3]
    assert all(seen({j: int(words[j]) ^ bit}) for j in places for bit in bits)
    for number in range(20_000):
        a, b = (places[j] for j in torch.randperm(199, generator=random)[:2].tolist())
        bit = bits[63 - number % 8 if number % 2 else number % 64]  # often one of the highest
        assert seen({a: int(words[a]) ^ bit, b: int(words[b]) ^ bit})
        if words[a] != words[b]:
            assert seen({a: int(words[b]), b: int(words[a])})


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_kth_largest(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(values(dtype))
    x = x[~x.isnan()]
    assume(x.numel() > 0)
    k = data.draw(st.integers(1, x.numel() + 3))
    threshold, ties = kth_largest(x, k, data.draw(st.sampled_from([0, 1, 4, 7, 16])))
    ordered = sorted((abs(v) for v in x.tolist()), reverse=True)
    if k > len(ordered) or ordered[k - 1] == 0:
        assert (threshold, ties) == (0.0, 0)
    else:
        assert threshold == ordered[k - 1]
        assert ties == k - sum(v > threshold for v in ordered)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_keep_largest(dtype: torch.dtype, data: st.DataObject) -> None:
    indices, x = data.draw(entries(dtype))
    k, wanted = data.draw(st.integers(1, x.numel() + 3)), data.draw(st.integers(0, x.numel() + 3))
    *fast, threshold, about = cpu.keep_largest(indices, x, k, wanted)
    *slow, slow_threshold, slow_about = reference.keep_largest(indices, x, k, wanted)
    assert_same(fast, slow)
    assert_same([torch.tensor([threshold, about])], [torch.tensor([slow_threshold, slow_about])])
    bits = numbers.magnitude(x)
    assert len(fast[0]) == min(k, int((bits > 0).sum()))
    if 0 < len(fast[0]) < len(bits):
        left = bits[~torch.isin(indices, fast[0])]
        assert int(left.max()) <= int(numbers.magnitude(fast[1]).min())


@pytest.mark.parametrize("numel", [1 << 17, (1 << 17) + 77, 1_000_003])
@pytest.mark.parametrize("density", [0.0, 1e-5, 0.02, 0.6, 1.0])
def test_several_threads_give_the_same_as_one(numel: int, density: float) -> None:
    random = torch.Generator().manual_seed(numel)
    residual, gradient = (torch.randn(numel, generator=random) for _ in range(2))
    magnitudes = (residual + gradient).abs().sort(descending=True).values
    threshold = float(magnitudes[int(density * (numel - 1))]) if density else float("inf")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.empty(numel)
            fast = cpu.accumulate(residual, [gradient], out, threshold)
            slow = reference.accumulate(residual, [gradient], out.clone(), threshold)
            assert_same(fast, slow)
            assert_same(cpu.select(out, threshold), slow[:2])
            for digit in ((0, 18, 13), (int(out[0].view(torch.int32)) >> 18 & 8191, 9, 9)):
                assert torch.equal(cpu.histogram(out, *digit), reference.histogram(out, *digit))
    finally:
        torch.set_num_threads(before)


def test_safe_from_several_threads_at_once() -> None:
    """The communication thread and others may call kernels together."""
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(300_000, generator=random) for _ in range(6)]
    expected = [reference.select(x, 2.0) for x in inputs]
    failures: list[BaseException] = []

    def work(j: int) -> None:
        try:
            for _ in range(20):
                assert_same(cpu.select(inputs[j], 2.0), expected[j])
        except BaseException as error:
            failures.append(error)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = [threading.Thread(target=work, args=(j,)) for j in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert not failures


PROGRAM = """
import errno, fcntl, sys, torch
if "no locks" in sys.argv:
    def flock(*_):
        raise OSError(errno.ENOSYS, "a file system without locks")
    fcntl.flock = flock
import oktopk
from oktopk.kernels import Kernels as reference
from oktopk.kernels.cpu import CpuKernels as cpu, compiling
words = torch.arange(9)
def loops(of):
    return sum(sum(getattr(loop.stats, of).values()) for loop in compiling._LOOPS.values())
def ready():
    return loops("cache_hits") + loops("cache_misses")
reduce = oktopk.SparseAllreduce(oktopk.Dense(), numel=1001)
reduce(torch.ones(1001))
assert ready() == 0, "a dense reduction needs no kernels"
if "few" in sys.argv:
    assert cpu.checksum(words) == reference.checksum(words)
    print(compiling.__file__, loops("cache_misses"))
    sys.exit()
reduce.change(oktopk.OkTopkVariable(density=0.1))
for dtype in (torch.float32, torch.float64):
    if dtype == torch.float64:
        reduce = oktopk.SparseAllreduce(oktopk.TopkA(density=0.1), numel=1001, dtype=dtype)
    before = ready()
    assert before > 0
    x = torch.linspace(-1, 1, 1001, dtype=dtype)
    reduce(x)
    assert torch.equal(cpu.select(x, 0.5)[1], reference.select(x, 0.5)[1])
    assert torch.equal(cpu.histogram(x, 0, 20, 11), reference.histogram(x, 0, 20, 11))
    assert cpu.checksum(words) == reference.checksum(words)
    assert ready() == before, "compiled or loaded in the middle of a run"
print(compiling.__file__, loops("cache_misses"))
"""


class Installed:
    """The package as an install that cannot be written to: its cache's place is taken."""

    def __init__(self, forks: Warm, folder: Path) -> None:
        self.forks, self.folder = forks, folder
        source = Path(arrays.__file__).parents[2]
        for file in source.rglob("*.py"):
            copy = folder / "oktopk" / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        (folder / "oktopk" / "kernels" / "cpu" / "loops" / "__pycache__").write_text("not a folder")
        (folder / "program.py").write_text(PROGRAM)

    def start(self, *arguments: str, **variables: str) -> tuple[int, Path, Path]:
        """A process, and the files with its output."""
        name = secrets.token_hex(4)
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        environ = {**os.environ, **variables}
        if "NUMBA_CACHE_DIR" not in variables:
            environ.pop("NUMBA_CACHE_DIR", None)
        script = self.folder / "program.py"
        return self.forks.start(script, *arguments, environ=environ, out=out, err=err), out, err

    def finish(self, process: int, out: Path, err: Path, said: str = "this machine, once") -> int:
        """How many loops the process compiled itself; if any, it has said so, and only then."""
        assert self.forks.wait(process, timeout=120) == [0], err.read_text()
        assert out.read_text().startswith(str(self.folder))
        compiled = int(out.read_text().split()[-1])
        assert err.read_text().count("compiling kernels") == (compiled > 0)
        assert (said in err.read_text()) == (compiled > 0)
        return compiled


def functions(module: ModuleType) -> list[str]:
    found = inspect.getmembers(module, inspect.isfunction)
    own = (name for name, loop in found if loop.__module__ == module.__name__)
    return [name for name in own if not name.startswith("_")]


def test_read_only_install(tmp_path: Path) -> None:
    """Compiled code is cached in the home directory, and ranks that start together compile it once,
    when the first sparse reduction is made, not in its first step; who compiles says so.

    It also works where there is no home directory, without a cache, or a file system without locks.
    """
    home, file, cache = tmp_path / "home", tmp_path / "file", tmp_path / "cache"
    home.mkdir()
    file.write_text("not a folder")
    with Warm("torch") as forks:  # numba looks at variables when it is imported
        installed = Installed(forks, tmp_path)
        homeless = installed.start("few", HOME=str(file), XDG_CACHE_HOME=str(file / "cache"))
        lockless = installed.start("few", "no locks", NUMBA_CACHE_DIR=str(cache))
        together = [
            installed.start(HOME=str(home), XDG_CACHE_HOME=str(home / "cache")) for _ in range(4)
        ]
        compiled = [installed.finish(*process) for process in together]
        over_values, of_messages = functions(selection) + functions(optimizer), functions(codes)
        # Values are of two types.
        assert sum(compiled) == 2 * len(over_values) + len(of_messages), compiled
        assert list(home.rglob("*.nbc")), "nothing was cached"
        assert installed.finish(*homeless, said="set NUMBA_CACHE_DIR") > 0
        assert installed.finish(*lockless) > 0
