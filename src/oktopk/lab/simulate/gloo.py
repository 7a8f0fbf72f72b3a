"""The messages of Gloo's collectives, and the order in which its allreduce adds.

Gloo's code was read for this, and tests compare sums bit for bit with those of real ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...cost.schedule import Numbers, Schedule
from .recorder import Recorder

_SEGMENT = 1 << 20
"""Most bytes of a message in an allreduce."""


def segments(size: int, nbytes: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a segment of Gloo's ring, and segments of a rank's chunk: two or more."""
    most = itemsize * (_SEGMENT // itemsize)
    count = -(-max(-(-nbytes // most), 2 * size) // size)
    return -(-nbytes // (count * size * itemsize)) * itemsize, count


def sum_in_ring(tensors: Sequence[Tensor]) -> None:
    """Sum flat tensors of all ranks, in place.

    Chunk c starts at rank c-1, and goes down the ring to rank c. Each rank adds its own part.
    """
    size, first = len(tensors), tensors[0]
    segment, count = segments(size, first.nbytes, first.itemsize)
    length = segment * count // first.itemsize
    for chunk in range(size):
        here = slice(chunk * length, (chunk + 1) * length)
        total = tensors[chunk - 1][here].clone()
        for step in range(2, size + 1):
            total += tensors[(chunk - step) % size][here]
        for tensor in tensors:
            tensor[here] = total


@functools.lru_cache(maxsize=4)
def allreduce(size: int, nbytes: int, itemsize: int) -> Schedule:
    """A ring: each rank sends to the one below it. P-1 chunks are summed, and then P-1 handed out.

    Two segments are on their way at once.
    """
    segment, count = segments(size, nbytes, itemsize)
    rounds = np.arange(count * (size - 1))
    ranks = np.arange(size)[:, None]
    parts = []
    for ahead in (1, 0):  # summing, handing out: the first chunk that a rank sends
        start = ((ranks + ahead) * count + rounds) * segment % (size * count * segment)
        parts.append(_ring(np.clip(nbytes - start, 0, segment), step=-1))
    return _one_after_the_other(parts)


@functools.lru_cache(maxsize=4)
def allgather(size: int, nbytes: int) -> Schedule:
    """A ring: each rank sends to the one above it, in halves."""
    halves = np.array([nbytes // 2, nbytes - nbytes // 2])
    return _ring(np.tile(halves, (size, size - 1)), step=1)


def _ring(lengths: Numbers, step: int) -> Schedule:
    """Each rank sends lengths[rank, i] bytes in round i to rank + step.

    In round i it waits for round i-2.
    """
    size, rounds = lengths.shape
    real = lengths > 0
    numbers = np.where(real, np.cumsum(real).reshape(lengths.shape) - 1, -1)
    sources = np.repeat(np.arange(size), rounds)[real.ravel()]
    programs = []
    for rank in range(size):
        both = np.stack([numbers[(rank - step) % size], numbers[rank]], axis=1)
        nothing = np.full((2, 2), -1)
        starts, waits = np.concatenate([both, nothing]), np.concatenate([nothing, both])
        ops = np.concatenate([~waits, starts], axis=1).ravel()
        there = np.concatenate([waits, starts], axis=1).ravel() >= 0
        programs.append(ops[there])
    return Schedule(sources, (sources + step) % size, lengths[real], tuple(programs))


def _one_after_the_other(parts: Sequence[Schedule]) -> Schedule:
    recorder = Recorder(len(parts[0].programs))
    for part in parts:
        recorder.collective(part)
    return recorder.schedule()


@functools.lru_cache(maxsize=4)
def all_to_all(size: int, nbytes: int) -> Schedule:
    """Each rank sends to all others, to the next rank first. All messages are on their way at
    once."""
    ranks, shifts = np.arange(size)[:, None], np.arange(1, size)
    numbers = np.arange(size * (size - 1)).reshape(size, size - 1)
    programs = []
    for rank in range(size):
        arriving = numbers[(rank - shifts) % size, shifts - 1]
        both = np.stack([numbers[rank], arriving], axis=1).ravel()
        programs.append(np.concatenate([both, ~both]))
    targets = ((ranks + shifts) % size).ravel()
    lengths = np.full(targets.size, nbytes)
    return Schedule(np.repeat(np.arange(size), size - 1), targets, lengths, tuple(programs))


def broadcast(size: int, nbytes: int, source: int) -> Schedule:
    """A binomial tree: in round i, the 2**i ranks that have it send it to as many others."""
    recorder = Recorder(size)
    unwaited: list[tuple[int, int]] = []
    for level in range((size - 1).bit_length()):
        for near in range(min(2**level, size - 2**level)):
            sender, receiver = (near + source) % size, (near + 2**level + source) % size
            number = recorder.message(sender, sender, receiver, nbytes)
            recorder.start(sender, number)
            recorder.start(receiver, number)
            recorder.wait(receiver, number)
            unwaited.append((sender, number))
    for sender, number in unwaited:
        recorder.wait(sender, number)
    return recorder.schedule()
