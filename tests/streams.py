"""Streams without a GPU: which operation on which stream, and whether they are in order.

`Streams` is a mode for claimed tensors (claimed.py) in which `torch.cuda` has streams and events.
Each operation on claimed tensors takes place on the current stream of its thread. Two operations
that use the same memory, one of them to write, must be in order: on one stream, or by an event, or
because the host has waited in between. Otherwise it is a race, and is noted in `races`.

This knows when operations begin and end, but not the allocator: memory is never used again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from claimed import CUDA, Claimed, Claims

Clock = dict[int, int]
"""The last operation of each stream that has ended, by the number of the stream."""


class Stream:
    """Instead of torch.cuda.Stream."""

    numbers = itertools.count()

    def __init__(self, device: Any = None) -> None:
        self.number, self.device = next(self.numbers), CUDA
        self.past: Clock = {}
        """What comes before the next operation on this stream."""

    def begin(self) -> int:
        """A new operation."""
        self.past[self.number] = self.past.get(self.number, 0) + 1
        return self.past[self.number]

    def record_event(self) -> Event:
        return Event(dict(self.past))

    def wait_event(self, event: Event) -> None:
        for number, operation in event.past.items():
            self.past[number] = max(operation, self.past.get(number, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        here().host_waits(self)


@dataclass
class Event:
    """Instead of torch.cuda.Event."""

    past: Clock

    def wait(self) -> None:
        here().current().wait_event(self)


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that does what torch's does with `devices`."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self._devices, self._event = devices, Event({})

    def set_result(self, result: Any) -> None:
        if self._devices:
            self._event = here().current().record_event()
        super().set_result(result)

    def wait(self) -> Any:
        result = super().wait()
        here().current().wait_event(self._event)
        return result


@dataclass
class Memory:
    """What was last done with it."""

    storage: Any
    """Held, so that nothing else gets this memory."""
    writer: tuple[int, int, str] | None = None
    """Stream, operation, and its name."""
    readers: list[tuple[int, int, str]] = field(default_factory=list)


class Streams(Claims):
    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.default = Stream()
        self._of_thread = threading.local()
        self._ended: Clock = {}
        """What the host has waited for."""
        self._memory: dict[int, Memory] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Streams:
        _modes.append(self)
        for name, instead in (
            ("torch.cuda.Stream", Stream),
            ("torch.cuda.current_stream", lambda device=None: self.current()),
            ("torch.cuda.stream", self.on),
            ("torch.futures.Future", Future),
            ("torch.Tensor.record_stream", lambda tensor, stream: None),
        ):
            self._patches.enter_context(mock.patch(name, instead))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _modes.pop()

    def current(self) -> Stream:
        stream: Stream = getattr(self._of_thread, "stream", self.default)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current()
        self._of_thread.stream = before if stream is None else stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def host_waits(self, stream: Stream) -> None:
        with self._lock:
            for number, operation in stream.past.items():
                self._ended[number] = max(operation, self._ended.get(number, 0))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        waits = self.waits.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read, written = _used(func, args, kwargs or {}, result)
        if read or written:
            with self._lock:
                self._take_place(str(func), read, written)
        if self.waits.total() > waits:
            self.host_waits(self.current())
        return result

    def _take_place(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        stream = self.current()
        access = (stream.number, stream.begin(), name)
        for tensor, writes in [*((t, False) for t in read), *((t, True) for t in written)]:
            storage = tensor.untyped_storage()
            memory = self._memory.setdefault(storage.data_ptr(), Memory(storage))
            before = [memory.writer] if memory.writer else []
            for other, operation, what in [*before, *(memory.readers if writes else [])]:
                if operation > max(stream.past.get(other, 0), self._ended.get(other, 0)):
                    self.races.append(f"{name} on stream {stream.number}, {what} on {other}")
            if writes:
                memory.writer, memory.readers = access, []
            else:
                memory.readers.append(access)


def _used(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The content that an operation reads, and that it writes. A view does neither."""
    everything = func.namespace == "c10d"
    read, written = [], []
    parameters = func._schema.arguments
    values = [
        *zip(parameters, args, strict=False),
        *((p, kwargs[p.name]) for p in parameters[len(args) :] if p.name in kwargs),
    ]
    for parameter, value in values:
        alias = parameter.alias_info
        tensors = [t.content for t in pytree.tree_leaves(value) if isinstance(t, Claimed)]
        if everything or (alias is not None and alias.is_write):
            written += tensors
        elif alias is None:
            read += tensors
    new = all(output.alias_info is None for output in func._schema.returns)
    if new and not everything:
        written += [t.content for t in pytree.tree_leaves(result) if isinstance(t, Claimed)]
    return read, [t for t in written if t.numel()]


_modes: list[Streams] = []


def here() -> Streams:
    return _modes[-1]
