"""Peers: the operations that ranks do together between steps.

Each function here is collective. Ranks first compare what they are about to do, so a rank that does
something else is told in words, at once, on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .transport import Operation, PeerError, Transport

T = TypeVar("T")
_CHUNK = 1 << 20


class ReplicaError(RuntimeError):
    """Ranks no longer hold the same parameters."""


class Run(Protocol):
    """Runs a task on the communication thread, and waits for it; see `Worker.run`."""

    def __call__(
        self, task: Callable[[], T], what: str = "", patience: float | None = None
    ) -> T: ...


class Peers:
    """The other ranks of a reducer.

    Args:
        transport: their process group.
        name: of the reducer, the same on all ranks.
        run: see `Run`.
        guard: returns a check to run right before ranks meet; it raises if they must not.
        failed: is called with a PeerError. After that nobody knows what the others do.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        run: Run,
        guard: Callable[[Operation], Callable[[], None]],
        failed: Callable[[PeerError], None],
    ) -> None:
        self._transport, self._name = transport, name
        self._run, self._guard, self._failed = run, guard, failed

    def together(
        self,
        operation: Operation,
        task: Callable[[], T],
        what: object = None,
        patience: float | None = None,
    ) -> T:
        """Run a task that all ranks must run together; see `Transport.together`.

        Args:
            what: must be the same on all ranks.
            patience: see `Worker.run`.
        """
        check = self._guard(operation)

        def join() -> T:
            check()
            try:
                with self._transport.together(operation, (self._name, what)):
                    return task()
            except PeerError as error:
                self._failed(error)
                raise

        return self._run(join, operation.value, patience)

    def share(self, operation: Operation, text: str, patience: float | None = None) -> list[str]:
        """Every rank's text, in rank order.

        Args:
            operation: what all ranks do when they share it.
            patience: see `Worker.run`.
        """
        return self.together(operation, lambda: self._transport.share_text(text), None, patience)

    def agree(self, operation: Operation, problem: str | None, mine: str, fix: str) -> None:
        """Raise on all ranks if one has a problem or another text; see `Transport.agree`."""
        self.together(operation, lambda: self._transport.agree(problem, mine, fix))

    def broadcast(self, tensors: Iterable[Tensor], source: int) -> None:
        """Give all ranks rank `source`'s tensors, in place."""
        tensors = list(tensors)

        def send() -> None:
            for tensor in tensors:
                dense = tensor.contiguous()  # the tensor itself, if it is contiguous
                self._transport.broadcast(dense, source)
                if dense is not tensor:
                    tensor.copy_(dense)

        what = source, [tensor.shape for tensor in tensors]
        self.together(Operation.BROADCAST, send, what)

    def check_replicas(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ReplicaError, on all ranks, unless all have bitwise the same parameters."""
        named = list(named_parameters)
        names = [name for name, _ in named]
        self.together(Operation.CHECK, lambda: _compare(named, self._transport), names)


def _compare(named: list[tuple[str, Tensor]], transport: Transport) -> None:
    """Compare a hash of each parameter over ranks; all ranks raise, or none."""
    names, parameters = zip(*named, strict=True)
    mine = torch.tensor([_hash(p) for p in parameters], dtype=torch.int64, device=transport.device)
    table = torch.stack(transport.all_gather(mine)).tolist()
    lines = []
    for name, hashes in zip(names, zip(*table, strict=True), strict=True):
        [(usual, _)] = Counter(hashes).most_common(1)
        odd = [str(rank) for rank, value in enumerate(hashes) if value != usual]
        if odd:
            lines.append(f"  {name}: rank {', '.join(odd)}")
    if lines:
        raise ReplicaError(
            f"{len(lines)} of {len(names)} parameters are not the same on all ranks, so they no "
            "longer train one model. Look for code that changes parameters on some ranks only, or "
            "restart from a checkpoint. They differ on:\n" + "\n".join(lines[:20])
        )


def _hash(parameter: Tensor) -> int:
    """A sum of all elements' bits, weighted by odd numbers: any one change changes it."""
    values = parameter.detach().flatten()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    if not values.numel():
        return 0
    for chunk in values.view(sizes[values.element_size()]).split(_CHUNK):
        weights = torch.arange(1, 2 * chunk.numel(), 2, device=chunk.device)
        total = total * 31 + (chunk.to(torch.int64) * weights).sum()  # wraps around
    return int(total)
