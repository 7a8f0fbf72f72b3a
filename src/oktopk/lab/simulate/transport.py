"""A transport between threads of one process, in place of torch.distributed.

`core.transport.Transport` counts bytes and checks as ever; only its calls of torch.distributed are
others. So what an algorithm computes, and what it counts, is that of real ranks on Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.transport import Transport, Work
from . import gloo
from .world import Message, World


class InProcess(Transport):
    """One rank's view of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.group, self._handle = None, None
        self.rank, self.size = rank, world.size
        self.device = torch.device("cpu")
        self.point = self.counter = None
        self._world = world
        self.reset()

    def _sum(self, tensor: Tensor) -> None:
        recorder, nbytes, itemsize = self._world.recorder, tensor.nbytes, tensor.itemsize

        def act(tensors: list[Tensor]) -> None:
            gloo.sum_in_ring([each.view(-1) for each in tensors])
            recorder.collective(gloo.allreduce(self.size, nbytes, itemsize))

        self._world.meet(self.rank, ("an allreduce", nbytes, tensor.dtype), tensor, act)

    def _collect(self, tensor: Tensor, gathered: list[Tensor]) -> None:
        recorder, nbytes = self._world.recorder, tensor.nbytes

        def act(items: list[tuple[Tensor, list[Tensor]]]) -> None:
            for _, room in items:
                for place, (content, _) in zip(room, items, strict=True):
                    place.copy_(content)
            recorder.collective(gloo.allgather(self.size, nbytes))

        self._world.meet(self.rank, ("an allgather", nbytes, tensor.dtype), (tensor, gathered), act)

    def _spread(self, tensor: Tensor, source: int) -> None:
        recorder, nbytes = self._world.recorder, tensor.nbytes

        def act(tensors: list[Tensor]) -> None:
            for each in tensors:
                each.copy_(tensors[source])
            recorder.collective(gloo.broadcast(self.size, nbytes, source))

        self._world.meet(self.rank, ("a broadcast", nbytes, source), tensor, act)

    def _swap(self, send: Tensor, received: Tensor) -> None:
        recorder, nbytes = self._world.recorder, send.nbytes // self.size

        def act(items: list[tuple[Tensor, Tensor]]) -> None:
            rows = [content.unbind() for content, _ in items]
            for rank, (_, room) in enumerate(items):
                torch.stack([row[rank] for row in rows], out=room)
            recorder.collective(gloo.all_to_all(self.size, nbytes))

        self._world.meet(self.rank, ("an all-to-all", nbytes, send.dtype), (send, received), act)

    def _transfer(
        self, outgoing: Tensor, target: int, incoming: Tensor, source: int
    ) -> Sequence[Work]:
        world, works = self._world, []
        if outgoing.numel():
            works.append(_Wait(self, world.send(self.rank, target, outgoing)))
        if incoming.numel():
            works.append(_Wait(self, world.receive(self.rank, source, incoming)))
        return works


@dataclass
class _Wait:
    """One side of a message."""

    transport: InProcess
    message: Message

    def wait(self) -> None:
        self.transport._world.wait(self.transport.rank, self.message)
