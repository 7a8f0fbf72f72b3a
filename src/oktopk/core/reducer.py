"""AllReducer: gradients of named parameters in, their averages out, while backward goes on.

Parameters are reduced in buckets of our own: fixed when training starts, in the order in which
backward produces gradients, whatever DDP's buckets are. So the state of a bucket belongs to the
same parameters for ever, and results depend neither on DDP's bucket size nor on its rebuild.

A step is a transaction. Buckets are reduced as their gradients arrive; what is kept for the next
step (residuals, thresholds, velocities) is taken over when all of them have succeeded, or not at
all. So an overflow in the last bucket leaves the first one's residual as it was.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..algorithms import Algorithm, Dense, Step
from . import state
from .allreduce import SparseAllreduce, prepare
from .buckets import Bucket, Options, Slot, cut, slots_of, summarize
from .moments import Moments, Squares
from .stats import StepStats, Summary, Totals, together
from .transport import (
    NonFiniteGradientError,
    Operation,
    PeerError,
    Transport,
    device_of,
    in_words,
    place_of,
)
from .worker import worker

T = TypeVar("T")
log = logging.getLogger("oktopk")

_LATE_STEP = 60.0
"""Seconds after which a rank says that it waits for others in a step. They may take long for their
own part of it, to load data or to compile, say."""
_LEFT_OUT = 1 << 16
"""Counts a rank on which a parameter was left out, in a sum that counts those that have it."""
_reducers = WeakIdKeyDictionary()
"""By parameter, its name and who averages its gradients (weakly)."""


def reducer_of(parameter: Tensor) -> tuple[AllReducer, str] | None:
    """Who averages a parameter's gradients, and under which name."""
    reference, name = _reducers.get(parameter, (lambda: None, ""))
    reducer = reference()
    return None if reducer is None or reducer.closed else (reducer, name)


def _keep_for_this_stream(tensor: Tensor) -> None:
    """The communication thread's stream must not reuse the memory before this one is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class AllReducer:
    """Averages gradients on the communication thread; see the module's first lines.

    Constructing it is collective, and so are `algorithm = ...`, `load_state_dict` and
    `check_replicas`.

    Args:
        named_parameters: names and parameters, the same on every rank.
        algorithm: what to reduce with.
        group: a process group that nothing else uses; None makes one of all ranks.
        options: see `Options`.
        may_be_unused: whether some parameters may have no gradient in a step on any rank. Then
            what waits in their residuals goes on waiting, since nobody would apply it.
        may_be_left_out: whether such parameters may not come at all, on any rank.
        trainer: see `set_trainer`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        algorithm: Algorithm,
        group: dist.ProcessGroup | None = None,
        options: Options | None = None,
        *,
        may_be_unused: bool = False,
        may_be_left_out: bool = False,
        trainer: Any = None,
    ) -> None:
        self.options = options or Options()
        scaler = self.options.grad_scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        named_parameters = list(named_parameters)
        self._slots = slots_of(named_parameters)
        self._may_be_unused = may_be_unused or may_be_left_out
        self._may_be_left_out = may_be_left_out
        self._algorithm = algorithm
        self._worker = worker(group)
        self._device = device_of(self._worker.group)
        self._lock = threading.Lock()
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._leave_trainer: Callable[[], None] = lambda: None
        self._totals = Totals()
        self._busy = self._waited = 0.0
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._used: dict[str, int] = {}
        self._announced: dict[str, weakref.ref[Tensor]] = {}
        self._has_data: bool | None = None
        self._weight = 1.0
        """What turns an average over all ranks into one over those that have data."""
        self._error: BaseException | None = None
        self._broken = self.closed = False
        self.skipped = False
        """Whether the last step was skipped because of a NaN or Inf."""
        self.unused: frozenset[str] = frozenset()
        """Parameters without a gradient on any rank in the last step (with `may_be_unused`)."""
        self.sparse: frozenset[str] = frozenset()
        """Parameters whose average was sparse in the last step."""
        self.stepping = False
        """Whether an optimizer of these parameters is in its `step`; see watch.py."""
        self.stepped = True
        """Whether an optimizer has stepped since the last averages came, or none have come."""
        self.leave_out = False
        """Whether the last step was skipped, and an optimizer has yet to leave it out."""
        self._probe: tuple[str, Tensor] | None = None
        self.notes: dict[str, Any] = {}
        """What an optimizer has to remember of sparse steps: plain values, saved in the state."""
        self.resumed = False
        """Whether it goes on from a state."""
        self._asked: weakref.WeakKeyDictionary[object, int | None] = weakref.WeakKeyDictionary()
        """What each optimizer asked `track_squares` for."""
        self._moments: Moments | None = None
        self._squares: dict[tuple[str, int], Squares] = {}
        self._before: tuple[Moments | None, dict[tuple[str, int], Squares]] = None, {}
        """As they were before the last step, for `discard`."""
        if not self._problem():  # now, while no rank waits for another: it may take long
            for dtype in {slot.dtype for slot in self._slots}:
                numel = sum(slot.numel for slot in self._slots)
                prepare(algorithm, numel, dtype, self._slots[0].device)
        self._worker.run(self._build, Operation.BEGIN.value)
        self.set_trainer(trainer)

    def announce(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Let optimizers find this reducer by its parameters, from now on.

        For the front end to call when gradients of these parameters really come here.
        """
        for name, parameter in named_parameters:
            _reducers[parameter] = weakref.ref(self), name
            self._announced[name] = weakref.ref(parameter)

    def parameters(self) -> dict[str, Tensor]:
        """Those that were announced, by name."""
        found = ((name, reference()) for name, reference in self._announced.items())
        return {name: parameter for name, parameter in found if parameter is not None}

    def _build(self) -> None:
        """Cut the parameters into buckets. Backward makes the last gradients first."""
        problem = self._problem()
        device = self._slots[0].device if self._slots else None
        self._transport = Transport(self._worker.group, self._device if problem else device)
        with self._transport.together(Operation.BEGIN):
            self._agree_to_begin(problem)
            self._buckets = [self._bucket(*group) for group in cut(self._slots, self.options)]
            self._name = self._transport.share_text(secrets.token_hex(8))[0]
        self._bucket_of = {slot.name: bucket for bucket in self._buckets for slot in bucket.slots}
        self._stream = torch.cuda.Stream(device) if self._transport.device.type == "cuda" else None
        if all(bucket.dense for bucket in self._buckets):
            log.warning(
                "nothing is compressed: every parameter has fewer than dense_below=%d elements or "
                "is named in `dense`; a smaller dense_below changes that",
                self.options.dense_below,
            )

    def _agree_to_begin(self, problem: str | None) -> None:
        summary = [(s.name, tuple(s.size), s.stride, str(s.dtype)) for s in self._slots]
        options = dataclasses.replace(
            self.options, grad_scaler=None, dense=tuple(self.options.dense)
        )
        self._transport.agree(
            problem,
            f"{len(summary)} parameters, crc32={zlib.crc32(repr(summary).encode())}, "
            f"algorithm={self._algorithm}, scaled={self._scaler is not None}, {options}",
            "use the same model, algorithm and options",
        )

    def _problem(self) -> str | None:
        if not isinstance(self._algorithm, Algorithm):
            return (
                f"algorithm is {self._algorithm!r}, but must be an algorithm such as "
                'oktopk.OkTopk(density=0.02) or oktopk.algorithm("oktopk", density=0.02)'
            )
        if not self._slots:
            return "there is no parameter to train: all of them have requires_grad=False"
        for slot in self._slots:
            if slot.dtype.is_complex:
                return (
                    f"{slot.name} is complex, but parameters must be real: make it one of "
                    "torch.view_as_real(...), and use torch.view_as_complex in forward"
                )
        devices = {str(slot.device) for slot in self._slots}
        if len(devices) > 1:
            return (
                f"parameters are on {', '.join(sorted(devices))}, but must be on one device in "
                "each process: move the model with .to(device) first"
            )
        return self.options.problem()

    def _bucket(self, slots: list[Slot], dense: bool) -> Bucket:
        reduce = SparseAllreduce(
            Dense() if dense else self._algorithm,
            sum(slot.numel for slot in slots),
            self._worker.group,
            dtype=slots[0].dtype,
            device=slots[0].device,
            momentum=self.options.momentum,
        )
        return Bucket(slots, dense, reduce, applied=[0] * len(slots))

    # What the training thread calls.

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
        return self._step

    @property
    def discards(self) -> bool:
        """Whether steps whose averages are cleared before anyone uses them are taken back.

        Not before an optimizer has been seen that steps with them: who updates parameters by hand
        has used averages that are cleared.
        """
        return self.optimized and self.options.cleared == "discard"

    @property
    def optimized(self) -> bool:
        """Whether an optimizer has ever stepped with averages; saved in the state."""
        return bool(self.notes.get("optimized"))

    @property
    def scaled(self) -> bool:
        """Whether the GradScaler that scales the loss is known."""
        return self._scaler is not None

    @property
    def totals(self) -> Totals:
        """Sums over all steps so far, as the communication thread goes on writing them."""
        return self._totals

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters of each bucket, in the order in which backward should deliver them."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

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
            result: what the future will hold, for example the memory that they are parts of.
            last: whether this completes the step. Every parameter comes once in a step.
            absent: parameters that have no gradient on this rank, and come as zeros. None: those
                that are all zeros. Only looked at with `may_be_unused`.
            has_data: whether this rank's gradients come from data, for an average over the ranks
                whose gradients do. None, on all ranks: an average over all of them.

        Returns:
            A future that is done when the step is, also when it failed: `wait` then raises why.
        """
        self._check_open()
        if self._error is not None:
            self.wait()
        on_gpu = self._stream is not None
        future: torch.futures.Future[Tensor] = (
            torch.futures.Future(devices=[result.device]) if on_gpu else torch.futures.Future()
        )
        ready = torch.cuda.current_stream(result.device).record_event() if on_gpu else None
        now = time.perf_counter()
        for name in gradients:
            if name in self._bucket_of:
                self._bucket_of[name].ready = now
        arrival = gradients, result, last, absent, has_data, future, ready
        self._worker.submit(lambda: self._arrive(*arrival))
        return future

    def close(self) -> None:
        """Take no more gradients, and let go of buffers. Waits for nobody."""

        def let_go() -> None:
            self._clear()
            self._buckets.clear()
            self._bucket_of.clear()
            self._squares.clear()
            self._moments = self._probe = None
            self._before = None, {}

        self.closed = True
        self._worker.submit(let_go)

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("this compression was closed; attach or wrap anew")

    def forget(self) -> None:
        """Drop what has been submitted of a step that will not be completed."""
        self._run(self._clear)

    def discard(self) -> bool:
        """Take back the last step, exactly; see `Handle.discard`. False if there is none."""

        def take_back() -> bool:
            if not self._undecided():
                return False
            self._rewind()
            self._totals.discarded_steps += 1
            self.stepped = True
            return True

        return self._run(take_back)

    def wait(self) -> None:
        """Until everything submitted is done; raises what went wrong with it."""
        since = time.perf_counter()
        step = self._buckets[0].reduce.steps if self._buckets else 0
        doing = in_words(place_of(Operation.STEP, step))
        error = self._worker.run(self._take_error, doing, _LATE_STEP)
        self._waited += time.perf_counter() - since
        if error is not None:
            raise error

    @property
    def waited(self) -> float:
        """Seconds that `wait` took so far."""
        return self._waited

    @property
    def ready(self) -> tuple[float, ...]:
        """When each bucket of the latest step had all its gradients, by time.perf_counter."""
        return tuple(bucket.ready for bucket in self._buckets)

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        """Call back with the statistics of each step, in order, before its futures are done.

        The call comes from the communication thread, when the step has been committed. An
        exception in it is raised by backward, and ends communication on this rank for good.
        Returns a function that ends it.
        """
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    def set_trainer(self, trainer: Any) -> None:
        """Append to the trainer's `sparsities`, `compression_ratios`, `communication_sizes`.

        One number for each step from now on; lists that are missing are made. None ends it.
        """
        self._leave_trainer()
        self._leave_trainer = lambda: None
        if trainer is None:
            return
        for name in ("sparsities", "compression_ratios", "communication_sizes"):
            if not hasattr(trainer, name):
                setattr(trainer, name, [])

        def append(stats: StepStats) -> None:
            trainer.sparsities.append(stats.sparsity)
            trainer.compression_ratios.append(stats.compression_ratio)
            trainer.communication_sizes.append(stats.bytes_sent)

        self._leave_trainer = self.subscribe(append)

    @property
    def algorithm(self) -> Algorithm:
        """May be set between steps, on all ranks at once; residuals carry over."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm) -> None:
        def change() -> None:
            previous, self._algorithm = self._algorithm, algorithm
            try:
                self._transport.agree(self._problem(), str(algorithm), "set the same algorithm")
            except ValueError:
                self._algorithm = previous
                raise
            for bucket in self._buckets:
                if not bucket.dense:
                    bucket.reduce.change(algorithm)
            self.stepped = True  # the last step can no longer be taken back

        self._together(Operation.ALGORITHM, change)

    @property
    def square_interval(self) -> int | None:
        """In how many steps `take_squares` yields every element once; None: never."""
        return None if self._moments is None else self._moments.interval

    def track_squares(self, interval: int | None, owner: object) -> None:
        """Set `square_interval`. All ranks must do it between the same steps.

        An optimizer calls it in each step, with None if it needs no squares. Only what this one
        asked for before is looked at, since when others are deleted differs from rank to rank.
        """
        before = self._asked.get(owner, 0)
        self._asked[owner] = interval
        now = self.square_interval
        if interval == now or interval is before is None:  # others may need what this one does not
            return
        if interval == before and now is not None:
            raise ValueError(
                f"two optimizers of one model have a refresh_interval of {interval} and of {now}: "
                "give them the same"
            )

        def change() -> None:
            self._moments = self._new_moments(interval)

        self._run(change)

    def _new_moments(self, interval: int | None) -> Moments | None:
        if interval is None:
            return None
        return Moments(self._buckets, interval, self._transport)

    @property
    def square_totals(self) -> Mapping[str, float]:
        """See `Moments.totals`; empty before the first round is over."""
        return {} if self._moments is None else self._moments.totals

    @property
    def probe(self) -> tuple[str, Tensor] | None:
        """A parameter and a copy of its average in the last step, to see what becomes of it; only
        with `square_interval`."""
        if self._probe is not None:
            _keep_for_this_stream(self._probe[1])
        return self._probe

    def take_squares(self, names: Collection[str]) -> list[Squares]:
        """What has become known of the size of these parameters' gradients since the last call."""
        keys = [key for key in self._squares if key[0] in names]
        found = [self._squares.pop(key) for key in keys]
        for part in found:
            _keep_for_this_stream(part.values)
        return found

    def stats(self) -> Summary:
        """Totals and means so far."""
        return self._run(lambda: summarize(self._buckets, self._totals, self._busy, self._waited))

    def state_dict(self, to_resume: bool = False) -> dict[str, Any]:
        """All that the next step depends on, of this rank: tensors and plain values.

        Args:
            to_resume: for a run that goes on from here without gradients. If no optimizer has
                stepped with the last averages yet, they are lost then, so the state is that from
                before their step (with the option `cleared="discard"`).
        """

        def take() -> dict[str, Any]:
            kept = {"notes": copy.deepcopy(self.notes), "moments": {}, "squares": {}}
            if self._moments is not None:
                kept |= {"moments": self._moments.state_dict(), "squares": self._moments.squares()}
            return state.pack(self._buckets, self._algorithm, self._transport) | kept

        def rewound() -> dict[str, Any]:
            if not (self._undecided() and self.discards):
                return take()
            self._rewind()
            try:
                return take()
            finally:
                self._rewind()

        return self._run(rewound if to_resume else take)

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True) -> None:
        """Continue where the state was taken: all ranks together, each with its own.

        Args:
            saved: from `state_dict` of this rank, in a run with as many ranks. For another
                number of ranks see `oktopk.checkpoint`.
            strict: if False, parameters that have no residual in the state begin without, and
                another algorithm or other buckets begin with new thresholds. It is logged.
        """

        def put() -> None:
            now = state.unpack(saved, self._buckets, self._algorithm, self._transport, strict)
            self.notes, self._probe = copy.deepcopy(now["notes"]), None
            self.resumed = True
            self._squares.clear()
            self.stepped = True  # the last step can no longer be taken back
            interval = self.square_interval or now["moments"].get("interval")
            self._moments = self._new_moments(interval)
            if self._moments is not None and interval == now["moments"].get("interval"):
                self._moments.load(now["moments"], now["squares"])

        self._together(Operation.LOAD, put)

    def broadcast(self, tensors: Iterable[Tensor], source: int) -> None:
        """Rank `source`'s tensors for all ranks, in place."""
        tensors = list(tensors)

        def send() -> None:
            for tensor in tensors:
                dense = tensor.contiguous()  # the tensor itself, where it is
                self._transport.broadcast(dense, source)
                if dense is not tensor:
                    tensor.copy_(dense)

        self._together(Operation.BROADCAST, send, (source, [tensor.shape for tensor in tensors]))

    def share(self, operation: Operation, text: str, patience: float | None = None) -> list[str]:
        """Every rank's text, in rank order.

        Args:
            operation: what all ranks do that share it.
            patience: see `Worker.run`.
        """
        return self._together(
            operation, lambda: self._transport.share_text(text), patience=patience
        )

    def agree(self, operation: Operation, problem: str | None, mine: str, fix: str) -> None:
        """Raise on all ranks if one has a problem or another text; see `Transport.agree`."""
        self._together(operation, lambda: self._transport.agree(problem, mine, fix))

    def check_replicas(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ReplicaError, on all ranks, unless all have bitwise the same parameters."""
        named = list(named_parameters)
        self._together(
            Operation.CHECK,
            lambda: state.check_replicas(named, self._transport),
            [name for name, _ in named],
        )

    def _together(
        self,
        operation: Operation,
        task: Callable[[], T],
        what: object = None,
        patience: float | None = None,
    ) -> T:
        """Run what all ranks must do together; see `Transport.together` and `Worker.run`.

        After a PeerError nobody knows what the others do, so this ends then. And in a step they
        may exchange gradients, which must not be mixed up with anything else.
        """
        after_step = self._worker.is_current  # a subscriber, which is told when ranks are done

        def join() -> T:
            if isinstance(self._error, PeerError):
                raise self._error
            if self._futures and not after_step:
                raise RuntimeError(
                    f"{operation.value} in the middle of a step: a backward is under way, or has "
                    "failed half-way on this rank, and others may still be in it. If it failed on "
                    "all ranks, DistributedOptimizer.zero_grad() forgets it; a model in DDP "
                    "cannot go on. If not, restart all from the last checkpoint"
                )
            try:
                with self._transport.together(operation, (self._name, what)):
                    return task()
            except PeerError as error:
                self._error, self._broken = error, True
                raise

        return self._run(join, operation.value, patience)

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

    # What the communication thread does.

    def _undecided(self) -> bool:
        """Whether nobody has used the last averages yet, and their step can be taken back."""
        return not self.stepped and all(bucket.reduce.can_rewind for bucket in self._buckets)

    def _rewind(self) -> None:
        """Change places with what was there before the last step; see `SparseAllreduce.rewind`."""
        for bucket in self._buckets:
            bucket.reduce.rewind()
        now = self._moments, self._squares
        (self._moments, self._squares), self._before = self._before, now
        if self._moments is not None and self.sparse:
            self._moments.rewind()

    def _arrive(
        self,
        gradients: Mapping[str, Tensor],
        result: Tensor,
        last: bool,
        absent: Collection[str] | None,
        has_data: bool | None,
        future: torch.futures.Future[Tensor],
        ready: torch.cuda.Event | None,
    ) -> None:
        since = time.perf_counter()
        self._futures.append((future, result))
        self._has_data = has_data
        try:
            with torch.cuda.stream(self._stream):  # does nothing where there is none
                if ready is not None:
                    ready.wait()
                self._take_or_fail(gradients, last, absent)
                if last or self._broken:
                    self._clear()
        except BaseException as error:  # of the device, say: nobody may wait for ever
            self._error, self._broken = error, True
            self._end_futures()
        self._busy += time.perf_counter() - since

    def _take_or_fail(
        self, gradients: Mapping[str, Tensor], last: bool, absent: Collection[str] | None
    ) -> None:
        if not self._broken:
            try:
                self._take(gradients, last, absent)
            except NonFiniteGradientError as error:
                self._error = error
            except BaseException as error:
                self._error, self._broken = error, True
        if self._error is not None:
            self._zero(gradients)
            self.stepping = False  # after an exception torch does not say that a step has ended

    @property
    def _step(self) -> int:
        return self._buckets[0].reduce.steps

    def _zero(self, gradients: Mapping[str, Tensor]) -> None:
        """After an error: gradients are neither averages nor equal on all ranks, so nobody may
        step with them by mistake. These, and those that came before them in the step."""
        for parts in (gradients, *(bucket.gradients for bucket in self._buckets)):
            for gradient in parts.values():
                gradient.zero_()

    def _clear(self) -> None:
        if self._moments is not None:
            self._moments.settle()
        for bucket in self._buckets:
            bucket.gradients, bucket.step = {}, None
        self._end_futures()

    def _end_futures(self) -> None:
        futures, self._futures = self._futures, []
        for future, result in futures:
            future.set_result(result)

    def _take(
        self, gradients: Mapping[str, Tensor], last: bool, absent: Collection[str] | None
    ) -> None:
        overlap = self.options.norm_clip is None
        for name, gradient in gradients.items():
            if gradient.numel() == 0:
                continue
            if name not in self._bucket_of:
                raise ValueError(
                    f"a gradient came for {name}, which could not be trained when compression was "
                    "attached: attach it after setting requires_grad"
                )
            bucket = self._bucket_of[name]
            bucket.gradients[name] = gradient
            if self._may_be_unused:
                self._used[name] = bool(gradient.any()) if absent is None else name not in absent
            if overlap and bucket.complete and not bucket.dense:
                self._begin(bucket, self._factor())
        if last:
            self._finish()

    def _factor(self) -> float:
        """What a gradient is multiplied by when it enters."""
        return 1.0 / self._scale()

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def _clipping_factor(self) -> float:
        """At most 1: brings the norm of this rank's gradient down to `norm_clip`."""
        limit = self.options.norm_clip
        if limit is None:
            return 1.0
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            for bucket in self._buckets
            for gradient in bucket.gradients.values()
        ]
        norm = float(torch.stack(norms).norm()) / self._scale()
        # A NaN or Inf is for the reduction to find, on all ranks at once.
        return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def _begin(self, bucket: Bucket, factor: float) -> None:
        self.stepped = True  # the step before can no longer be taken back
        moments = self._moments
        rest = (self._name, self._buckets.index(bucket), moments and moments.interval)
        place = place_of(Operation.STEP, self._step, rest)
        first = all(other.step is None for other in self._buckets)
        if first:
            self._transport.reset()
            self._weight = self._find_weight(place)
        bucket.reduce.at(place, first)
        if moments is not None and not bucket.reduce.dense:
            moments.observe(bucket, factor)
        parts = [bucket.gradients[slot.name] for slot in bucket.slots]
        bucket.step = bucket.reduce.begin(parts, parts, factor, self._scale() * self._weight)

    def _find_weight(self, place: int) -> float:
        if self._has_data is None:
            return 1.0
        self._transport.place = place
        self._transport.meet()
        rows = self._transport.trade_numbers([[self._has_data]] * self.size)
        self._transport.place = None
        return self.size / sum(row[0] for row in rows)

    def _finish(self) -> None:
        """The end of a step: what is left to reduce, then all or nothing."""
        self.unused, self._probe = frozenset(), None
        self._put_zeros([s for s in self._slots if s.name not in self._bucket_of[s.name].gradients])
        factor = self._factor() * self._clipping_factor()
        for bucket in self._buckets:
            if bucket.step is None:
                self._begin(bucket, factor)
        sparse = [b for b in self._buckets if not b.reduce.dense]
        self.sparse = frozenset(slot.name for bucket in sparse for slot in bucket.slots)
        steps = [(b, b.step) for b in self._buckets if b.step is not None]
        self.skipped, self.leave_out = not all(step.finite for _, step in steps), False
        if not self.skipped:
            self._find_unused()
            for bucket, step in steps:
                bucket.reduce.commit(step)
                bucket.applied = [a + b for a, b in zip(bucket.applied, step.applied, strict=True)]
            self._give_back_unused(steps)
            self._before = self._moments, dict(self._squares)
            self._look_at_sizes()
            self.stepped = self.stepping
        elif self._scaler is not None or self.options.nonfinite == "skip":
            self._skip(steps)
        else:
            self._blame(steps)
        self._report()

    def _skip(self, steps: Sequence[tuple[Bucket, Step]]) -> None:
        """A NaN or Inf somewhere: all ranks leave the step out."""
        for bucket, step in steps:
            bucket.reduce.skip(step, 0.0 if self._scaler is None else math.nan)
        self.leave_out = self._scaler is None
        skipped = self._totals.skipped_steps + 1
        if self._scaler is None and skipped & (skipped - 1) == 0 and self.rank == 0:
            log.warning(
                "step %d is skipped, a gradient has a NaN or Inf; so far %d of %d steps were",
                self._step - 1,
                skipped,
                self._totals.steps + 1,
            )

    def _look_at_sizes(self) -> None:
        """For an optimizer that wants to know how large gradients are."""
        if self._moments is None or self._buckets[0].dense:
            return
        if self.sparse:
            known = self._moments.advance(self.unused)
            self._squares |= {(part.name, part.start): part for part in known}
        elif self._moments.begun:  # dense again
            self._moments = self._new_moments(self._moments.interval)
        compressed = [slot for bucket in self._buckets if not bucket.dense for slot in bucket.slots]
        smallest = min(compressed, key=lambda slot: slot.numel).name
        average = self._bucket_of[smallest].gradients[smallest]
        self._probe = smallest, average / self._scale()

    def _put_zeros(self, missing: Sequence[Slot]) -> None:
        """For parameters that have not come."""
        if missing and not self._may_be_left_out:
            raise ValueError(
                f"no gradient came for {', '.join(slot.name for slot in missing[:5])}: was "
                "requires_grad changed between DistributedDataParallel() and attach()? Attach "
                "right after"
            )
        for slot in missing:
            zeros = torch.zeros(slot.numel, dtype=slot.dtype, device=slot.device)
            self._bucket_of[slot.name].gradients[slot.name] = zeros
            self._used[slot.name] = _LEFT_OUT

    def _find_unused(self) -> None:
        """Agree on the parameters that no rank had a gradient for."""
        if not self._may_be_unused:
            return
        names = [slot.name for slot in self._slots]
        used = torch.tensor(
            [self._used[name] for name in names],
            dtype=torch.int32,
            device=self._transport.device,
        )
        self._transport.all_reduce(used)
        flags = dict(zip(names, used.tolist(), strict=True))
        torn = [name for name, flag in flags.items() if flag > _LEFT_OUT and flag % _LEFT_OUT]
        if torn:
            raise ValueError(
                f"DDP has left out {', '.join(torn[:5])} on some ranks, but others have a gradient "
                "for it, so replicas would drift apart: skip_all_reduce_unused_params=True needs "
                "the same unused parameters on all ranks; build DDP without it"
            )
        self.unused = frozenset(name for name, flag in flags.items() if not flag % _LEFT_OUT)

    def _give_back_unused(self, steps: Sequence[tuple[Bucket, Step]]) -> None:
        """Where no rank had a gradient, nobody applies an average: it goes on waiting."""
        for bucket, step in steps:
            for index, slot in enumerate(bucket.slots):
                if slot.name in self.unused:
                    bucket.reduce.give_back(step, index, self._scale() * self._weight)

    def _blame(self, steps: Sequence[tuple[Bucket, Step]]) -> None:
        """Raise, on all ranks, with where the NaN or Inf came from."""
        names = [
            bucket.slots[index].name
            for bucket, step in steps
            if not step.finite
            for index in step.nonfinite_parts() or ()
        ]
        known = all(step.nonfinite_parts() is not None for _, step in steps if not step.finite)
        guilty = bool(names) if names or known else None
        self._transport.blame(self._step, guilty, ", ".join(names[:5]))

    def _report(self) -> None:
        lasts = []
        for bucket in self._buckets:
            assert bucket.reduce.last is not None
            bucket.totals.add(bucket.reduce.last)
            lasts.append(bucket.reduce.last)
        stats = together(lasts)
        stats = dataclasses.replace(
            stats,
            bytes_sent=stats.bytes_sent + self._transport.bytes_sent,
            bytes_received=stats.bytes_received + self._transport.bytes_received,
            messages=stats.messages + self._transport.messages,
        )
        self._totals.add(stats)
        with self._lock:
            subscribers = list(self._subscribers)
        for tell in subscribers:
            tell(stats)

    def _take_error(self) -> BaseException | None:
        error = self._error
        if not self._broken:
            self._error = None
        return error
