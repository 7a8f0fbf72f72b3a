"""The one door to torch.distributed: every byte that leaves or arrives is counted here.

A rank counts the bytes that it hands over. A message to one peer counts its size. A collective
counts the bytes that the best known algorithm must send: an allreduce of m bytes 2m(P-1)/P, an
allgather m(P-1), an all-to-all all bytes for other ranks. `messages` counts one for each
message to a peer and one for each collective.
"""

from __future__ import annotations

import atexit
import enum
import math
import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.layout import padded

_TEXT_BYTES = 1024
_SMALL = 1 << 18
"""Bytes up to which an allreduce is done in two rounds of messages."""
_STEPS = (1 << 24) - 1
"""How far a program point counts steps."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The second is its name before torch 2.13."""
_recent: deque[tuple[Tensor, ...]] = deque(maxlen=8)
"""Tensors of the last collectives; see `settle`. Large ones are those that steps keep anyway."""


@atexit.register
def settle() -> None:
    """Wait, before the interpreter ends, until Gloo's threads have let go of tensors.

    They do so a moment after a collective has ended. A thread that is the last to let go of a
    tensor needs the interpreter for it, and would abort a process where that has ended.
    """
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        held = [tensor for tensors in list(_recent) for tensor in tensors]
        if all(tensor._use_count() == 1 for tensor in held):  # type: ignore[attr-defined]
            return
        time.sleep(0.001)


class Operation(enum.Enum):
    """An operation that ranks do together, in words. They compare it before they begin."""

    STEP = "training step {step} (backward)"
    BEGIN = "the start of compression (attach, DistributedOptimizer or AllReducer)"
    ALGORITHM = "a change of algorithm (set_algorithm or detach)"
    SAVE = "checkpoint.save"
    LOAD = "checkpoint.load or load_state_dict"
    CHECK = "check_replicas"
    BROADCAST = "broadcast_parameters"
    CONSTRUCT = "SparseAllreduce(...)"


_OPERATIONS = tuple(Operation)


def point_of(operation: Operation, step: int = 0, what: object = None) -> int:
    """A program point: where a rank is in its program, as one number of operation, step and a
    checksum of the rest."""
    code = 1 + _OPERATIONS.index(operation)
    return code << 56 | (step & _STEPS) << 32 | zlib.crc32(repr(what).encode())


def in_words(point: int) -> str:
    """What a rank at a program point does; the number may come from another rank."""
    code = (point >> 56) - 1
    if not 0 <= code < len(_OPERATIONS):
        return f"something that this version of oktopk does not know ({point:#x})"
    return _OPERATIONS[code].value.format(step=point >> 32 & _STEPS)


class NonFiniteGradientError(FloatingPointError):
    """A gradient held a NaN or Inf on some rank. All ranks raise this, and no residual changes."""


class PeerError(RuntimeError):
    """Another rank died, hung, left or did something else while this one was talking to it."""


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The default device for messages of a group: the current GPU of an NCCL group.

    Each thread has a current GPU of its own, so this must be asked in the training thread.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Transport:
    """A process group seen from one rank. Without torch.distributed: a group of one."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None = None
    ) -> None:
        self.group = group
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise ValueError(
                    f"global rank {dist.get_rank()} is not a member of `group`: construct "
                    "SparseAllreduce only on the ranks of the group"
                )
            if device is None:
                device = device_of(group)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not "
                "initialised: call torch.distributed.init_process_group() first"
            )
        self._handle: Any = group or dist.group.WORLD if self.size > 1 else None
        # With its index, as tensors on it report it.
        self.device = torch.empty(0, device=device or "cpu").device
        self.point: int | None = None
        """This rank's program point, see `point_of`. Unless None, it travels with traded numbers,
        and ranks at different points fail before they mix data."""
        self.counter: Counter[tuple[str, int]] | None = None
        """Counts messages by collective and bytes, for whoever inspects steps."""
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes_sent = self.bytes_received = self.messages = 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.size == 1:
            return
        if tensor.nbytes <= _SMALL and self.size > 2 and tensor.device.type == "cpu":
            self._all_reduce_small(tensor)
            return
        share = math.ceil(2 * tensor.nbytes * (self.size - 1) / self.size)
        self._count("allreduce", share, share)
        self._sum(tensor)

    def _all_reduce_small(self, tensor: Tensor) -> None:
        """Gloo's is a ring of 2(P-1) steps. Where each takes longer than its bytes do, two direct
        rounds are faster, with the same bytes: each rank sums its part of all, and hands it out."""
        flat = tensor.flatten()
        ends = [flat.numel() * j // self.size for j in range(self.size + 1)]
        parts = [flat[low:high] for low, high in pairwise(ends)]
        mine = parts[self.rank]
        found = [mine] * self.size
        sizes, messages = [mine.nbytes] * self.size, [part.view(torch.uint8) for part in parts]
        for source, message in self.exchange(messages, sizes, self.size):
            found[source] = message.view(flat.dtype)
        if mine.numel():
            mine.copy_(sum(found[1:], found[0]))
        sizes = [part.nbytes for part in parts]
        for source, message in self.exchange([messages[self.rank]] * self.size, sizes, self.size):
            parts[source].copy_(message.view(flat.dtype))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all of one size and type."""
        if self.size == 1:
            return [tensor]
        nbytes = tensor.nbytes * (self.size - 1)
        self._count("allgather", nbytes, nbytes)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._collect(tensor, gathered)
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Rank `source`'s tensor for all ranks, in place."""
        if self.size == 1:
            return
        # All ranks together send it P-1 times.
        share = math.ceil(tensor.nbytes * (self.size - 1) / self.size)
        self._count("broadcast", share, tensor.nbytes)
        self._spread(tensor, source)

    def trade_numbers(self, rows: list[list[int]]) -> list[list[int]]:
        """rows[j], a few integers, goes to rank j; returns what each rank had for this one."""
        if self.size == 1:
            return rows
        if self.point is not None:
            rows = [[*row, self.point] for row in rows]
        mine = torch.tensor(rows, dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(mine)
        share = mine[1:].nbytes
        self._count("alltoall", share, share)
        self._swap(mine, theirs)
        with self.peers("an all-to-all"):
            traded: list[list[int]] = theirs.tolist()  # where NCCL's errors surface
        if self.point is None:
            return traded
        self.check_points([row[-1] for row in traded])
        return [row[:-1] for row in traded]

    def check_points(self, points: Sequence[int]) -> None:
        """Fail if a rank is at another program point than this one."""
        elsewhere = [rank for rank, point in enumerate(points) if point != self.point]
        if not elsewhere:
            return
        doing: dict[str, list[int]] = {}
        for rank, point in enumerate(points):
            doing.setdefault(in_words(point), []).append(rank)
        if len(doing) > 1:
            told = "; ".join(f"{_list(ranks)} in {words}" for words, ranks in doing.items())
            told += ". All ranks must call each of these together, not one rank alone"
        else:
            told = (
                f"all are in {next(iter(doing))}, but {_list(elsewhere)} at another point of the "
                "program: with another model, other arguments, other settings of the optimizer, or "
                "after a backward that failed on some ranks only. All ranks must use the same "
                "models in the same order, equally often"
            )
        raise PeerError(
            f"rank {self.rank} of {self.size}: ranks do not do the same: {told}. Nothing was "
            "applied on this rank. Correct the program, and restart all from the last checkpoint"
        )

    def meet(self) -> None:
        """Make sure that all ranks are at the same program point, where nothing is traded anyway.

        The exchange is the same for every operation. So ranks that do different things meet here,
        too, and learn of it.
        """
        if self.point is not None:
            self.trade_numbers([[]] * self.size)

    @contextmanager
    def together(self, operation: Operation, what: object = None) -> Iterator[None]:
        """Around what all ranks do together: fails at once, on all, if one does something else.

        Args:
            what: must be the same on all ranks.
        """
        before, self.point = self.point, point_of(operation, what=what)
        try:
            self.meet()
            yield
        finally:
            self.point = before

    def share_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Of a long text, its beginning and its crc32."""
        encoded = text.encode()
        if len(encoded) > _TEXT_BYTES:
            encoded = encoded[: _TEXT_BYTES - 20] + f"... crc32={zlib.crc32(encoded):08x}".encode()
        encoded = encoded.ljust(_TEXT_BYTES)
        message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self.device)
        gathered = self.all_gather(message)
        return [bytes(other.tolist()).decode(errors="replace").strip() for other in gathered]

    def agree(self, problem: str | None, mine: str, fix: str) -> None:
        """One small allgather, so that ranks that are wrong or differ fail at once, all of them,
        instead of hanging or going apart later.

        Args:
            problem: what is wrong on this rank, if anything.
            mine: what must be the same on all ranks, as text.
            fix: what to do on every rank, for the message.
        """
        texts = self.share_text(f"ERROR {problem}" if problem else mine)
        if problem:
            raise ValueError(problem)
        if len(set(texts)) > 1:
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            raise ValueError(f"ranks disagree: {fix} on every rank\n" + "\n".join(lines))

    def blame(self, step: int, guilty: bool | None, where: str = "") -> NoReturn:
        """Say which ranks had a NaN or Inf. All ranks ask together, since all know that one had.

        Args:
            step: number of the step.
            guilty: whether this rank had one; None if it cannot tell any more.
            where: and in which parameters.
        """
        table = self.trade_numbers([[-1 if guilty is None else int(guilty)]] * self.size)
        bad = [str(rank) for rank, (had,) in enumerate(table) if had == 1]
        unknown = any(had < 0 for (had,) in table)
        what = "a gradient or a sum over ranks" if unknown else "a sum over ranks"
        if bad:
            what = f"the gradient of rank {', '.join(bad)}"
        here = f" (on this rank in {where})" if where else ""
        raise NonFiniteGradientError(
            f"step {step}: NaN or Inf in {what}{here}. No rank's residual has changed. If a "
            "GradScaler scales the loss, pass it as grad_scaler=. If not, find where it comes from "
            "(a learning rate too high, an empty batch, values near the largest of their type), or "
            'pass nonfinite="skip" to skip such steps'
        )

    def all_to_all(self, send: Tensor, received: Tensor, rider: Rider | None = None) -> None:
        """Row j of `send` goes to rank j; row i of `received` comes from rank i.

        Args:
            send, received: bytes, in as many rows as there are ranks. A row for this rank itself
                takes part, but no bytes are counted for it.
            rider: its bytes are at the end of the rows.
        """
        if rider is not None:
            rider.board(send)
        self._count_rows("alltoall", send)
        self._swap(send, received)
        if rider is not None:
            rider.sum(received)

    def all_gather_rows(
        self, mine: Tensor, gathered: Tensor, spare: Tensor, rider: Rider | None = None
    ) -> None:
        """Row i of `gathered` is what rank i has in `mine`.

        Gloo's allgather is a ring of P-1 steps, which takes twice as long as its all-to-all of
        copies.

        Args:
            mine: bytes.
            spare: memory like `gathered`, for copies.
            rider: as in the `all_to_all` before it.
        """
        if rider is not None:
            rider.board_sums(mine)
        self._count_rows("allgather", gathered)
        if self.device.type == "cpu":
            self._swap(spare.copy_(mine), gathered)
        else:
            with self.peers("an allgather"):
                _all_gather(gathered.view(-1), mine, group=self.group)
        if rider is not None:
            rider.leave(gathered)

    def _count_rows(self, collective: str, rows: Tensor) -> None:
        nbytes = rows.nbytes // self.size * (self.size - 1)
        self._count(collective, nbytes, nbytes)

    def exchange(
        self, outgoing: list[Tensor], sizes: list[int], in_flight: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Send outgoing[j] to each rank j, and iterate over (source, message) of every other rank.

        The first messages are on their way when this returns. Destinations are rotated: in round
        s rank i sends to i+s and receives from i-s, so no rank is everyone's target at once.
        `in_flight` rounds travel while the caller works on what has arrived. The order of arrival
        is fixed: what the caller computes from it does not depend on timing. Empty messages are
        not sent, nor yielded. The caller must take all.

        Args:
            outgoing: one uint8 message for each rank; its own is ignored.
            sizes: the bytes that each rank sends to this one.
            in_flight: the number of rounds on their way at once, at least 1.
        """

        def start(s: int) -> tuple[int, Tensor, Pending]:
            target, source = (self.rank + s) % self.size, (self.rank - s) % self.size
            incoming = torch.empty(sizes[source], dtype=torch.uint8, device=self.device)
            return source, incoming, self._start(outgoing[target], target, incoming, source)

        rounds = [start(s) for s in range(1, min(in_flight + 1, self.size))]

        def arrivals() -> Iterator[tuple[int, Tensor]]:
            for s in range(1, self.size):
                source, incoming, pending = rounds.pop(0)
                pending.wait()
                if s + in_flight < self.size:
                    rounds.append(start(s + in_flight))
                if incoming.numel():
                    yield source, incoming

        return arrivals()

    def send(self, message: Tensor, target: int) -> None:
        """One message to one rank, which must receive it. Its size goes ahead."""
        size = torch.tensor([message.numel()]).view(torch.uint8).to(self.device)
        for part in (size, message):
            self._start(part, target, part[:0], target).wait()

    def receive(self, source: int, most: int) -> Tensor:
        """One message from one rank, of up to `most` bytes."""
        size = torch.empty(8, dtype=torch.uint8, device=self.device)
        self._start(size[:0], source, size, source).wait()
        nbytes = int(size.view(torch.int64))
        if not 0 < nbytes <= most:
            raise PeerError(
                f"rank {self.rank} of {self.size}: rank {source} says that its message has "
                f"{nbytes} bytes, but it can have 1 to {most}. Nothing was applied on this rank. "
                "Make sure that all ranks run the same version, and restart all from the last "
                "checkpoint"
            )
        message = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._start(message[:0], source, message, source).wait()
        return message

    def _start(self, outgoing: Tensor, target: int, incoming: Tensor, source: int) -> Pending:
        if outgoing.numel():
            self._count("message", outgoing.nbytes, 0)
        self.bytes_received += incoming.nbytes
        return Pending(self, self._transfer(outgoing, target, incoming, source))

    # The calls of torch.distributed: all of them, and no more than that. They count nothing, so
    # that the simulated ranks of lab/simulate count as real ones do.

    def _sum(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        if tensor.nbytes <= _SMALL:
            _recent.append((tensor,))
        with self.peers("an allreduce"):
            dist.all_reduce(tensor, group=self.group)

    def _collect(self, tensor: Tensor, gathered: list[Tensor]) -> None:
        """Every rank's tensor, in rank order."""
        _recent.append((tensor, *gathered))
        with self.peers("an allgather"):
            dist.all_gather(gathered, tensor, group=self.group)

    def _spread(self, tensor: Tensor, source: int) -> None:
        """Rank `source`'s tensor for all ranks, in place."""
        with self.peers("a broadcast"):
            dist.broadcast(tensor, self._global(source), group=self.group)

    def _swap(self, send: Tensor, received: Tensor) -> None:
        """Row j goes to rank j: `dist.all_to_all_single`, which makes two dozen calls around this
        one."""
        _recent.append((send, received))
        try:
            self._handle.alltoall_base(received, send, [], []).wait()
        except RuntimeError as error:
            raise self._lost("an all-to-all", error) from error

    def _transfer(
        self, outgoing: Tensor, target: int, incoming: Tensor, source: int
    ) -> Sequence[Work]:
        """A message to one rank, and one from another. Empty ones are none."""
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, self._global(target), self.group))
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, self._global(source), self.group))
        if not operations:
            return []
        with self.peers(f"a message to rank {target} or from rank {source}"):
            works: Sequence[Work] = dist.batch_isend_irecv(operations)
            return works

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _count(self, collective: str, sent: int, received: int) -> None:
        self.bytes_sent += sent
        self.bytes_received += received
        self.messages += 1
        if self.counter is not None:
            self.counter[collective, sent] += 1

    @contextmanager
    def peers(self, action: str) -> Iterator[None]:
        """Turn the backend's errors into one that says what happened and what it means."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(action, error) from error

    def _lost(self, action: str, error: RuntimeError) -> PeerError:
        where = "" if self.point is None else f", in {in_words(self.point)}"
        return PeerError(
            f"rank {self.rank} of {self.size}{where}: {action} failed, because another rank "
            "died or did not answer within the group's timeout. On this rank nothing was "
            "applied and the residual is as it was before; others may have completed the step. "
            "Find the rank that failed first in the logs of the job, and restart all from the "
            f"last checkpoint. The backend said: {error}"
        )


def _list(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {some} is" if len(ranks) == 1 else f"ranks {some} are"


class Rider:
    """A small vector that ranks sum on the way, at the end of another reduction's messages.

    In the first exchange, rank j gets part j of every rank's vector, and sums it. In the second one
    it hands the sums out. This takes the bytes of an allreduce, but no message.

    Args:
        vector: is summed in place.
    """

    def __init__(self, vector: Tensor, size: int) -> None:
        self.summed = False
        """Whether the vector is the sum over ranks by now."""
        self._vector, self._share = vector, -(-vector.numel() // size)
        self._rows = vector.new_zeros(size, self._share)
        self._rows.view(-1)[: vector.numel()] = vector
        self.nbytes = padded(self._share * vector.itemsize)
        """Bytes at the end of each message."""

    def board(self, send: Tensor) -> None:
        self._of(send).copy_(self._rows)

    def sum(self, received: Tensor) -> None:
        self._sums = self._of(received).sum(0)

    def board_sums(self, reply: Tensor) -> None:
        self._of(reply).copy_(self._sums)

    def leave(self, gathered: Tensor) -> None:
        self._rows.copy_(self._of(gathered))
        self._vector.copy_(self._rows.view(-1)[: self._vector.numel()])
        self.summed = True

    def _of(self, rows: Tensor) -> Tensor:
        """This vector's place in messages."""
        start = rows.shape[-1] - self.nbytes
        place = rows[..., start : start + self._share * self._vector.itemsize]
        return place.view(self._vector.dtype)


class Work(Protocol):
    """An operation that is under way."""

    def wait(self) -> object: ...


class Pending:
    """Messages on their way."""

    def __init__(self, transport: Transport, works: Sequence[Work]) -> None:
        self._transport = transport
        self._works = works

    def wait(self) -> None:
        with self._transport.peers("waiting for a message"):
            for work in self._works:
                work.wait()
