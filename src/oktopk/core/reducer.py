"""AllReducer: named tensors of this rank in, their averages over ranks out, while backward goes on.

This module is the contract with front ends, and schedules their work on the communication thread.
Its parts do the rest: `Inbox` takes gradients on that thread and keeps errors, `Transaction`
reduces all buckets of a step and commits them together, `events` reports steps, `peers` has the
operations that ranks do together between steps, `moments` serves optimizers, `usage` records
whether they have used the averages.

Tensors are reduced in buckets of our own, fixed when training starts, in the order in which
backward produces gradients. So the state of a bucket always belongs to the same tensors, and
results depend neither on the size of DDP's buckets nor on their rebuild.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms import Algorithm, Dense
from . import state
from .buckets import Bucket, Options, Slot, cut, problem_of, slots_of, summarize
from .chooser import Chooser, chooser_for
from .detail import Detail
from .events import Events
from .inbox import Inbox
from .inspector import SAMPLE, Inspector
from .moments import SecondMoments, keep_for_this_stream
from .peers import Peers
from .reduction import Reduction, prepare
from .stats import Summary
from .transaction import Arrival, Transaction
from .transport import Operation, PeerError, Transport, device_of, in_words, point_of
from .usage import Usage
from .worker import worker

T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger("oktopk")

CLOSED = "this compression was closed; attach or wrap anew"
_LATE_STEP = 60.0
"""Seconds after which a rank logs that it waits for others in a step. They may load data or compile
for a while."""


class AllReducer:
    """Averages named tensors over ranks, on the communication thread, while backward goes on.

    This is the contract with front ends. A front end gives the names of tensors that all ranks of a
    group hold, submits their gradients, or other values to average, in the same order on every
    rank, and waits. The reducer knows nothing of modules, optimizers or parameters. So a tensor may
    as well be the local shard of a parameter, named by parameter and shard, with a group of the
    ranks that hold the same shard; or the change of a parameter over several local steps.

    Constructing it is collective. So are `set_algorithm`, `load_state_dict` and the methods of
    `peers`.

    Args:
        named_tensors: names and tensors, the same on every rank; only sizes, strides, types and
            devices matter.
        algorithm: what to reduce with.
        group: a process group that nothing else uses; None makes one of all ranks.
        options: see `Options`.
        shard: names the part of the model that this group of ranks holds, where several groups hold
            one each. Checkpoints of different shards go to different folders.
        second_moments: whether optimizers of these tensors step with the averages, and may ask for
            the size of gradients; see `SecondMoments`.
        may_be_unused: whether some tensors may have no gradient in a step on any rank. Their
            residuals then wait for a later step, since nobody would apply the average.
        may_be_left_out: whether such tensors may not be submitted at all, on any rank.
        trainer: see `Events.set_trainer`.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        algorithm: Algorithm,
        group: dist.ProcessGroup | None = None,
        options: Options | None = None,
        *,
        shard: str = "",
        second_moments: bool = False,
        may_be_unused: bool = False,
        may_be_left_out: bool = False,
        trainer: Any = None,
    ) -> None:
        self.options = options or Options()
        self.shard = shard
        self._slots = slots_of(named_tensors)
        self._unused = {"may_be_unused": may_be_unused, "may_be_left_out": may_be_left_out}
        self._algorithm = algorithm
        self._worker = worker(group)
        self._device = device_of(self._worker.group)
        self.events = Events()
        self.usage = Usage()
        self._submitted: set[str] = set()
        """Tensors that have come in the step that is under way."""
        self.closed = False
        self.resumed = False
        """Whether a state was loaded."""
        if not self._problem():  # now, while no rank waits for another: it may take long
            for dtype in {slot.dtype for slot in self._slots}:
                numel = sum(slot.numel for slot in self._slots)
                prepare(algorithm, numel, dtype, self._slots[0].device)
        self._worker.run(self._build, Operation.BEGIN.value)
        # Weakly: buffers of a reducer that nobody holds are freed at once, not by the next garbage
        # collection.
        run, guard = _weakly(self._run), _weakly(self._guard)
        self.peers = Peers(self._transport, self._name, run, guard, self._inbox.fail)
        if second_moments:
            self._transaction.moments = SecondMoments(self._buckets, self._transport, run)
        self.events.set_trainer(trainer)

    def _build(self) -> None:
        """Cut the parameters into buckets. Backward makes the last gradients first."""
        problem = self._problem()
        device = self._slots[0].device if self._slots else None
        self._transport = Transport(self._worker.group, self._device if problem else device)
        on_gpu = self._transport.device.type == "cuda"
        self._stream = torch.cuda.Stream(self._transport.device) if on_gpu else None
        with torch.cuda.stream(self._stream):  # buffers belong to the stream that will use them
            self._build_transaction(problem)
        self._inbox = Inbox(self._transaction, self.usage, self._stream)
        if all(bucket.small for bucket in self._buckets):
            log.warning(
                "nothing is compressed: every parameter has fewer than dense_below=%d elements or "
                "is named in `dense`; a smaller dense_below changes that",
                self.options.dense_below,
            )

    def _build_transaction(self, problem: str | None) -> None:
        with self._transport.together(Operation.BEGIN):
            self._agree_to_begin(problem)
            self._buckets = [self._bucket(*group) for group in cut(self._slots, self.options)]
            self._name = self._transport.share_text(secrets.token_hex(8))[0]
        self._transaction = Transaction(
            self._buckets,
            self._transport,
            self._name,
            self.options,
            self.events,
            self.usage,
            **self._unused,
        )
        self._transaction.chooser = self._chooser()

    def _chooser(self) -> Chooser | None:
        """A new one, which measures; None if the algorithm leaves nothing to choose."""
        large = [bucket.reduction.numel for bucket in self._buckets if not bucket.small]
        return chooser_for(self._algorithm, sum(large)) if large else None

    def _agree_to_begin(self, problem: str | None) -> None:
        summary = [(s.name, tuple(s.size), s.stride, str(s.dtype)) for s in self._slots]
        options = dataclasses.replace(
            self.options, grad_scaler=None, dense=tuple(self.options.dense)
        )
        self._transport.agree(
            problem,
            f"{len(summary)} parameters, crc32={zlib.crc32(repr(summary).encode())}, "
            f"algorithm={self._algorithm}, scaled={self.scaled}, {options}"
            + (f", shard={self.shard}" if self.shard else ""),
            "use the same model, algorithm and options",
        )

    def _problem(self) -> str | None:
        if not isinstance(self._algorithm, Algorithm):
            return (
                f"algorithm is {self._algorithm!r}, but must be an algorithm such as "
                'oktopk.OkTopk(density=0.02) or oktopk.algorithm("oktopk", density=0.02)'
            )
        name = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?")
        if not (isinstance(self.shard, str) and name.fullmatch(self.shard)):
            return f"shard is {self.shard!r}, but must be a name such as 0-of-4: it names a folder"
        return problem_of(self._slots) or self.options.problem()

    def _bucket(self, slots: list[Slot], small: bool) -> Bucket:
        reduction = Reduction(
            Dense() if small else self._algorithm,
            sum(slot.numel for slot in slots),
            Transport(self._worker.group, slots[0].device),
            slots[0].dtype,
            self.options.momentum,
        )
        return Bucket(slots, small, reduction, applied=[0] * len(slots))

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._transaction.step

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because of a NaN or Inf."""
        return self._transaction.skipped

    @property
    def unused(self) -> frozenset[str]:
        """Tensors without a gradient on any rank in the last step (with `may_be_unused`)."""
        return self._transaction.unused

    @property
    def sparse(self) -> frozenset[str]:
        """Tensors whose average was sparse in the last step."""
        return self._transaction.sparse

    @property
    def moments(self) -> SecondMoments | None:
        """Second moments for optimizers; None if the front end did not ask for them."""
        return self._transaction.moments

    @property
    def discards(self) -> bool:
        """Whether steps whose averages are cleared before anyone uses them are taken back.

        False until an optimizer has stepped with averages. Code that updates parameters by hand
        clears averages that it has used.
        """
        return self.usage.optimized and self.options.cleared == "discard"

    @property
    def scaled(self) -> bool:
        """Whether the GradScaler that scales the loss is known."""
        return self.options.scaler is not None

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters of each bucket, in the order in which backward should deliver them."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor, by name."""
        return {slot.name: slot.size for slot in self._slots}

    def submit(
        self,
        gradients: Mapping[str, Tensor],
        result: Tensor,
        last: bool,
        absent: Collection[str] | None = None,
        has_data: bool | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Hand over gradients, in the same order on every rank.

        Args:
            gradients: flat tensors by parameter name, replaced by their averages.
            result: the value of the future, for example the memory that they are parts of; on the
                same device.
            last: whether this completes the step. Every parameter comes once in a step; a second
                time is a ValueError, and changes nothing.
            absent: parameters that have no gradient on this rank, and come as zeros. None: those
                that are all zeros. Only looked at with `may_be_unused`.
            has_data: whether this rank's gradients come from data, for an average over the ranks
                whose gradients do. None, on all ranks: an average over all of them.

        Returns:
            A future that is done when the step is, also when it failed: `wait` then raises why.
        """
        self._check_open()
        if self._inbox.error is not None:
            self.wait()
        self._refuse_second(gradients)
        on_gpu = self._stream is not None
        future: torch.futures.Future[Tensor] = (
            torch.futures.Future(devices=[result.device]) if on_gpu else torch.futures.Future()
        )
        ready = torch.cuda.current_stream(result.device).record_event() if on_gpu else None
        now = time.perf_counter()
        for name in gradients:
            if name in self._transaction.bucket_of:
                self._transaction.bucket_of[name].ready = now
        arrival = Arrival(gradients, last, absent, has_data)
        self._worker.submit(lambda: self._arrive(arrival, result, future, ready))
        self._submitted.update(gradients)
        if last:
            self._submitted.clear()
        return future

    def _arrive(
        self,
        arrival: Arrival,
        result: Tensor,
        future: torch.futures.Future[Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Called by the communication thread."""
        since = time.perf_counter()
        self._inbox.take(arrival, result, future, ready)
        self.events.busy += time.perf_counter() - since

    def _refuse_second(self, gradients: Mapping[str, Tensor]) -> None:
        twice = self._submitted & gradients.keys()
        if twice:
            raise ValueError(
                f"{min(twice)} was submitted before in this step, but each tensor comes once: "
                "submit the others, or drop the step with forget(). Nothing of this call was taken"
            )

    def close(self) -> None:
        """Take no more gradients, and let go of buffers. Waits for nobody."""

        def let_go() -> None:
            self._inbox.clear()
            self._buckets.clear()
            self._transaction.bucket_of.clear()
            self._transaction.inspector = None
            if self.moments is not None:
                self.moments.close()

        self.closed = True
        self._worker.submit(let_go)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(CLOSED)

    def forget(self) -> None:
        """Drop the submitted gradients of a step that will not be completed."""
        self._run(self._inbox.clear)
        self._submitted.clear()

    def discard(self) -> bool:
        """Take back the last step, exactly; see `Handle.discard`. False if there is none."""

        def take_back() -> bool:
            if not self._transaction.undecided():
                return False
            self._transaction.rewind()
            self.events.totals.discarded_steps += 1
            self.usage.stepped = True
            return True

        return self._run(take_back)

    def wait(self) -> None:
        """Wait until everything submitted is done. Raises the error of a step that failed."""
        since = time.perf_counter()
        step = self.step if self._buckets else 0
        doing = in_words(point_of(Operation.STEP, step))
        error = self._worker.run(self._inbox.take_error, doing, _LATE_STEP)
        if self._stream is not None:  # that thread has launched all its work, and may not be done
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self.events.waited += time.perf_counter() - since
        if error is not None:
            raise error

    @property
    def ready(self) -> tuple[float, ...]:
        """When each bucket of the latest step had all its gradients, by time.perf_counter."""
        return tuple(bucket.ready for bucket in self._buckets)

    @property
    def algorithm(self) -> Algorithm:
        return self._algorithm

    def set_algorithm(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm or density. Collective, between steps; residuals stay."""

        def change() -> None:
            previous, self._algorithm = self._algorithm, algorithm
            try:
                self._transport.agree(self._problem(), str(algorithm), "set the same algorithm")
            except ValueError:
                self._algorithm = previous
                raise
            for bucket in self._buckets:
                if not bucket.small:
                    bucket.reduction.change(algorithm)
            self._transaction.chooser = self._chooser()
            self.usage.stepped = True  # the last step can no longer be taken back

        self.peers.together(Operation.ALGORITHM, change)

    def stats(self) -> Summary:
        """Totals and means so far."""

        def take() -> Summary:
            inspector = self._transaction.inspector
            waits = None if inspector is None else inspector.staleness()
            chooser = self._transaction.chooser
            choice = "" if chooser is None else chooser.reason
            return summarize(self._buckets, self.events, waits, choice)

        return self._run(take)

    def inspect(
        self,
        callback: Callable[[Detail], object],
        due: Callable[[int], bool],
        sample: int = SAMPLE,
    ) -> Callable[[], None]:
        """Look into steps of this rank; see `Handle.inspect`."""

        def put(inspector: Inspector | None) -> None:
            if self._transaction.inspector is not None:
                self._transaction.inspector.close()
            self._transaction.inspector = inspector

        def begin() -> Inspector:
            inspector = Inspector(self._buckets, self._transport, callback, due, sample)
            put(inspector)
            return inspector

        inspector = self._run(begin)

        def end() -> None:
            if self._transaction.inspector is inspector:
                put(None)

        return lambda: None if self.closed else self._run(end)

    def state_dict(self, to_resume: bool = False) -> dict[str, Any]:
        """All that the next step depends on, of this rank: tensors and plain values.

        Args:
            to_resume: for a run that goes on from here without gradients. If no optimizer has
                stepped with the last averages, that run does not have them. So the state is then
                that from before their step (with the option `cleared="discard"`).
        """

        def take() -> dict[str, Any]:
            packed = state.pack(
                self._buckets,
                self._algorithm,
                self._transaction.chooser,
                self._transport,
                self.moments,
            )
            return packed | {"optimized": self.usage.optimized}

        def rewound() -> dict[str, Any]:
            if not (self._transaction.undecided() and self.discards):
                return take()
            self._transaction.rewind()
            try:
                return take()
            finally:
                self._transaction.rewind()

        answer = self._run(rewound if to_resume else take)
        for tensor in pytree.tree_leaves(answer):
            if isinstance(tensor, Tensor):
                keep_for_this_stream(tensor)
        return answer

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Continue where the state was taken: all ranks together, each with its own.

        Args:
            saved: from `state_dict` of this rank, in a run with as many ranks. For another
                number of ranks see `oktopk.checkpoint`.
            strict: if False, parameters that have no residual in the state begin without, and
                another algorithm or other buckets begin with new thresholds. It is logged.
        """

        def put() -> None:
            now, chooser = state.unpack(
                saved,
                self._buckets,
                self._algorithm,
                self._transaction.chooser,
                self._transport,
                strict,
            )
            self._transaction.chooser = chooser
            self.resumed, self.usage.optimized = True, now["optimized"]
            self.usage.stepped = True  # the last step can no longer be taken back
            if self.moments is not None:
                self.moments.load(now["moments"], now["squares"])
            if self._transaction.inspector is not None:
                self._transaction.inspector.begin_again()

        self.peers.together(Operation.LOAD, put)

    def _guard(self, operation: Operation) -> Callable[[], None]:
        """Returns a check that refuses an operation after a PeerError and in the middle of a step.

        Other ranks may exchange gradients in a step, and messages must not be mixed up.
        """
        after_step = self._worker.is_current  # a subscriber, which is told when ranks are done

        def check() -> None:
            if isinstance(self._inbox.error, PeerError):
                raise self._inbox.error
            if self._inbox.open and not after_step:
                raise RuntimeError(
                    f"{operation.value} in the middle of a step: a backward is under way, or has "
                    "failed half-way on this rank, and others may still be in it. If it failed on "
                    "all ranks, DistributedOptimizer.zero_grad() forgets it; a model in DDP "
                    "cannot go on. If not, restart all from the last checkpoint"
                )

        return check

    def _run(self, task: Callable[[], T], what: str = "", patience: float | None = None) -> T:
        """Run a task on the communication thread, after all that came before, and wait for it."""
        self._check_open()
        stream = self._stream
        if stream is None:
            return self._worker.run(task, what, patience)
        torch.cuda.current_stream(stream.device).synchronize()  # for tensors that come along

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                answer = task()
                stream.synchronize()
                return answer

        return self._worker.run(on_stream, what, patience)


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """A method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = reference()
        if bound is None:
            raise RuntimeError("this compression is gone: keep its handle, or attach or wrap anew")
        return bound(*args, **kwargs)

    return call
