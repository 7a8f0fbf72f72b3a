"""The micro-benchmark of `oktopk plan --measure`, as each rank runs it: a few seconds.

1. Time the kernels with one thread, in processor time. So it does not matter how many ranks share
   a core, or what else runs.
2. Time messages between the ranks: small ones for latency, large ones for the rate, and many at the
   same time.
3. Where ranks share cores, small messages between all of them take longer than between two: they
   wait for a core.

`python -m oktopk.lab.plan.probe` is the program of a rank that `measure.py` starts.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithms import OkTopk
from ...common.host import cores
from ...common.together import gather
from ...common.values import plain
from ...core.allreduce import SparseAllreduce
from ...core.select import aim, keep_largest, kth_largest, select, smallest
from ...cost import Link, Machine
from ...kernels import for_device
from ...wire.message import Entries, Wire
from ..bench.raw import heavy_tailed

_NUMEL = 1 << 24
"""So many that no vector fits into a cache."""
_FEW, _MANY = 0.002, 0.02
"""Densities. A kernel's time is a line: so much an element, and so much an entry."""
_REPEATS = 5
_SECONDS = 0.15
"""A transfer that takes less is measured with a larger message."""
_LARGEST = 1 << 27
_EXCHANGES = 40
_COLD = torch.ones(1 << 24)
"""Read before a kernel that passes over a vector: a step finds its vectors in memory, not in caches
of the processor."""

Clock = Callable[[], float]


def probe(place_ranks: int) -> tuple[Machine, Link]:
    """Measure, all ranks together. All get the same.

    Args:
        place_ranks: ranks on this machine.
    """
    torch.set_num_threads(1)
    a_core = max(1.0, place_ranks / len(cores()))
    machine = kernels()
    latency, together = _latency()
    rate, copy = _rate(machine.dense)
    step, message = _calls()
    found = {**plain(machine), "copy": copy, "step": step, "message": message}
    found |= {"latency": latency, "rate": rate, "crowd": _crowd(rate)}
    if a_core > 1:
        found["turn"] = max(0.0, together - latency) / (a_core - 1)
    everyone = gather(found)
    middle = {name: statistics.median(each[name] for each in everyone) for name in found}
    latency, rate = middle.pop("latency"), middle.pop("rate")
    middle |= {"duplex": dist.get_backend() != "gloo", "ranks_a_core": a_core}
    return Machine(**middle), Link(rate, latency)


def kernels() -> Machine:
    """Elements and entries: the fields of `Machine` that need no other rank."""
    gradient = heavy_tailed(_NUMEL, seed=1)
    few, many = (_Entries(gradient, round(density * _NUMEL)) for density in (_FEW, _MANY))
    element, pick = _line(few, many, _Entries.offer)
    scan, reduce = _line(few, many, _Entries.sum)
    clear, write = _line(few, many, _Entries.scatter)
    vector, other = torch.ones(_NUMEL), torch.ones(_NUMEL)
    return Machine(
        element=element,
        pick=pick,
        scan=scan,
        reduce=reduce,
        clear=clear,
        apply=write + _seconds(many.take) / many.k,
        encode=_seconds(many.encode) / many.k,
        decode=_seconds(many.decode) / many.k,
        merge=_seconds(many.merge) / (2 * many.k),
        again=_seconds(many.again) / _NUMEL,
        dense=_seconds(lambda: vector.add_(other)) / vector.nbytes,
    )


class _Entries:
    """The k largest entries of a vector, and the kernels that work on them."""

    def __init__(self, gradient: Tensor, k: int) -> None:
        self.k, self.gradient = k, gradient
        self.kernels = for_device(torch.device("cpu"))
        self.residual, self.values = torch.zeros(_NUMEL), torch.empty(_NUMEL)
        self.kernels.prepare(torch.float32, _NUMEL, True, torch.device("cpu"))
        self.threshold, _ = kth_largest(gradient, aim(k, _NUMEL))
        self.mine = self._selected(0)
        self.theirs = self._selected(k // 3)  # some elements are in both
        self.wire = Wire("int8", torch.int32, torch.float32)
        self.message, _ = self.wire.encode(self.mine)

    def _selected(self, shift: int) -> Entries:
        rolled = torch.roll(self.gradient, shift)
        kept = self.kernels.select(rolled, self.threshold)
        return keep_largest(Entries(*kept), self.k)[0]

    def offer(self) -> None:
        wanted = aim(self.k, _NUMEL)
        self.kernels.offer(
            self.residual, [self.gradient], self.values, self.threshold, self.k, wanted
        )

    def again(self) -> None:
        threshold, _ = kth_largest(self.gradient, aim(self.k, _NUMEL))
        select(self.gradient, threshold)

    def encode(self) -> None:
        self.wire.encode(self.mine)

    def decode(self) -> None:
        self.wire.decode(self.message, 0, _NUMEL)

    def sum(self) -> None:
        mine, least = self.mine, smallest(torch.float32)
        self.kernels.sum_select(mine.indices, mine.values, [self.k], 0, _NUMEL, least)

    def scatter(self) -> None:
        self.kernels.scatter([self.values], self.mine.indices, self.mine.values)

    def take(self) -> None:
        mine = self.mine
        self.kernels.take_common(self.values, mine.indices, mine.values, mine.indices)

    def merge(self) -> None:
        """As a merge of gTopk does it: the k largest stay, the others go into the residual."""
        merge, mine, theirs = self.kernels.merge, self.mine, self.theirs
        total = Entries(*merge(mine.indices, mine.values, theirs.indices, theirs.values))
        kept, _ = keep_largest(total, self.k)
        dropped, values = merge(total.indices, total.values, kept.indices, -kept.values)
        self.kernels.add_at(self.values, dropped, values)
        self.values[dropped].sum()  # whether they are finite


def _line(few: _Entries, many: _Entries, job: Callable[[_Entries], None]) -> tuple[float, float]:
    """Seconds an element, and seconds an entry, of a kernel that takes
    elements * first + entries * second."""
    small, large = _seconds(lambda: job(few)), _seconds(lambda: job(many))
    entry = max(0.0, large - small) / (many.k - few.k)
    return max(0.0, small - few.k * entry) / _NUMEL, entry


def _seconds(job: Callable[[], object], clock: Clock = time.process_time) -> float:
    """The median time of a call, after one that warms up."""
    job()
    times = []
    for _ in range(_REPEATS):
        _COLD.sum()
        start = clock()
        job()
        times.append(clock() - start)
    return statistics.median(times)


def _latency() -> tuple[float, float]:
    """Seconds of an exchange of 8 bytes: between two ranks, and between all."""
    size = dist.get_world_size()
    ends = sorted({0, size - 1})  # of several machines, the first and the last
    pair = dist.new_group(ends)
    alone = _exchange(pair, len(ends)) if dist.get_rank() in ends else 0.0
    dist.barrier()
    return _slowest(alone), _exchange(None, size)


def _exchange(group: dist.ProcessGroup | None, size: int) -> float:
    mine = torch.zeros(size, dtype=torch.int64)
    theirs = torch.empty_like(mine)
    times = []
    for _ in range(_EXCHANGES):
        dist.barrier(group)
        since = time.perf_counter()
        dist.all_to_all_single(theirs, mine, group=group)
        times.append(time.perf_counter() - since)
    return statistics.median(times[_EXCHANGES // 5 :])


def _rate(dense: float) -> tuple[float, float]:
    """Bytes a second that a rank sends in an allreduce, and processor seconds for each."""
    size, nbytes = dist.get_world_size(), 1 << 20
    if size == 1:
        return 1e12, 0.0
    while True:
        vector = torch.zeros(nbytes // 4)
        dist.barrier()
        cpu, since = time.process_time(), time.perf_counter()
        for _ in range(3):
            dist.all_reduce(vector)
        seconds = _slowest(time.perf_counter() - since) / 3
        cpu = (time.process_time() - cpu) / 3
        if seconds >= _SECONDS or nbytes >= _LARGEST:
            sent = 2 * nbytes * (size - 1) / size
            summing = nbytes * (size - 1) / size * dense
            return sent / seconds, max(0.0, cpu - summing) / sent
        nbytes = min(_LARGEST, max(2 * nbytes, round(nbytes * _SECONDS / seconds)))


def _slowest(seconds: float) -> float:
    """The same on all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _calls() -> tuple[float, float]:
    """Processor seconds of a step that reduces next to nothing, and of a message to one rank."""
    size = dist.get_world_size()
    mine = torch.zeros(size, dtype=torch.int64)
    theirs = torch.empty_like(mine)
    call = _seconds(lambda: dist.all_to_all_single(theirs, mine)) if size > 1 else 0.0
    reduce = SparseAllreduce(OkTopk(density=0.1), 1000)
    gradient: Tensor = torch.randn(1000)
    step = _seconds(lambda: reduce(gradient.clone()))
    message = call / size
    return max(0.0, step - 2 * call), message


def _crowd(rate: float) -> float:
    """How many times as long as its bytes an all-to-all takes."""
    others = dist.get_world_size() - 1
    if others < 2:
        return Machine.crowd
    nbytes = round(rate * _SECONDS / others / 2)
    mine = torch.zeros((others + 1) * nbytes, dtype=torch.uint8)
    theirs, times = torch.empty_like(mine), []
    for _ in range(_REPEATS):
        dist.barrier()
        since = time.perf_counter()
        dist.all_to_all_single(theirs, mine)
        times.append(_slowest(time.perf_counter() - since))
    return max(1.0, statistics.median(times[1:]) * rate / (others * nbytes))


def main() -> None:
    from ...train.launch.meeting import SECONDS_TO_MEET, meet
    from ...train.launch.place import place

    here = place()
    assert here is not None
    store = meet(here, SECONDS_TO_MEET)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    # Emulated hosts are one machine.
    machine, link = probe(int(os.environ.get("OKTOPK_RANKS_HERE", here.local_size)))
    if here.rank == 0:
        print(json.dumps({"machine": plain(machine), "link": plain(link)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
