"""attach(): compression for a model in DistributedDataParallel.

DDP hands each of its buckets to a hook, which gives the gradients to the communication thread and
returns a future at once. The futures are done when the step is; DDP waits for them at the end of
backward.
"""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with classes.
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .adam import advise
from .algorithms import Algorithm
from .core.buckets import Options
from .core.reducer import CLOSED, AllReducer, log
from .core.transport import NonFiniteGradientError
from .core.watch import clear_skipped, watch
from .core.worker import raised_by_all
from .handle import Handle

Hook = Callable[["Compression", GradBucket], Future[Tensor]]


class Compression(Handle):
    """Compression of one DDP model: the handle from `attach`, and the state of the hook."""

    def __init__(
        self,
        module: nn.Module,
        algorithm: Algorithm,
        options: Options,
        group: dist.ProcessGroup | None,
        may_be_unused: bool,
        trainer: Any,
    ) -> None:
        # Parameters, not the module: DDP holds its hook where the garbage collector does not
        # look, so a hook that held DDP would keep both for ever.
        self._parameters = dict(_named_parameters(module))
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._module = weakref.ref(module)
        self._leaves_out = bool(getattr(module, "skip_all_reduce_unused_params", False))
        self._open: Tensor | None = None
        self._begin: Callable[..., AllReducer] = partial(
            AllReducer,
            algorithm=algorithm,
            group=group,
            options=options,
            may_be_unused=may_be_unused,
            may_be_left_out=self._leaves_out,
            second_moments=True,
            trainer=trainer,
        )
        self._reducer: AllReducer | None = None
        self._frozen: list[tuple[str, Tensor]] = []
        self._end_watch: Callable[[], None] | None = None
        self._closed = False

    @property
    def reducer(self) -> AllReducer:
        if self._reducer is None:
            raise RuntimeError(
                "compression begins in the first backward: call start() on all ranks, after "
                "init_process_group, to begin it now"
            )
        return self._reducer

    def start(self) -> AllReducer:
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._reducer is None:
            named = self._parameters.items()
            self._frozen = [(name, p) for name, p in named if not p.requires_grad]
            self._reducer = self._begin([(name, p) for name, p in named if p.requires_grad])
        return self._reducer

    def close(self) -> None:
        self._closed = True
        if self._end_watch is not None:
            self._end_watch()
        if self._reducer is not None:
            self._reducer.close()

    def _watch(self) -> None:
        """Let optimizers find the reducer, unless they can. Only when DDP has the hook."""
        if self._end_watch is None:
            names = (name for bucket in self.reducer.buckets for name in bucket)
            parameters = {name: self._parameters[name] for name in names}
            self._end_watch = watch(self.reducer, parameters, advise)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and thresholds: tensors and plain values.

        Every rank must save its own; `oktopk.checkpoint` does.
        """
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue where the state was taken; see `AllReducer.load_state_dict`."""
        self.start().load_state_dict(state, strict)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy.deepcopy: a DDP model copies the state of its hook."""
        return _of_a_copy, ()

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._parameters.items()

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook. It must not wait: backward goes on behind it."""
        buffer = bucket.buffer().detach()  # backward(create_graph=True) leaves a history in it
        if buffer.is_sparse:
            raise ValueError(
                "a sparse gradient came: build the embedding with sparse=False to compress it"
            )
        reducer = self.start()
        self._refuse_unfrozen()
        gradients = self._gradients(bucket, buffer)
        in_backward = torch._C._current_graph_task_id() != -1
        has_data = in_backward if self._counts_data() else None
        future = reducer.submit(gradients, buffer, bucket.is_last(), has_data=has_data)
        self._open = None if bucket.is_last() else buffer[:0]
        self._watch()
        if in_backward and (bucket.is_last() or self._leaves_out):
            # Not earlier: with `checkpoint(..., use_reentrant=True)` an earlier bucket may come in
            # a backward inside the backward, and its end is not that of the step. But where DDP
            # leaves buckets out, any of them may be the last one that comes.
            self._at_end_of_backward(reducer)
        elif bucket.is_last():
            self._end_for_others(reducer)
        return future

    def _refuse_unfrozen(self) -> None:
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{name} was frozen when compression was attached and is trained now, but "
                    "nobody averages it, so replicas would drift apart: unfreeze it before "
                    "DistributedDataParallel() and attach()"
                )

    def _gradients(self, bucket: GradBucket, buffer: Tensor) -> dict[str, Tensor]:
        """Gradients by name: slices of the buffer, which are flat for any layout."""
        parameters = bucket.parameters()
        try:
            names = [self._names[id(p)] for p in parameters]
        except KeyError:
            raise ValueError(
                "DDP averages a parameter that was not in the model when comm_hook() was called: "
                "call it with the model that is in DDP, when that has all its parameters"
            ) from None
        return dict(zip(names, buffer.split([p.numel() for p in parameters]), strict=True))

    def _counts_data(self) -> bool:
        """Whether averages are over the ranks that still have data. DDP does not tell its hook."""
        join = getattr(self._module(), "_join_config", None)
        if join is None or not (join.enable and join.is_first_joinable):
            return False
        return not getattr(self._module(), "_divide_by_initial_world_size", True)

    def _end_for_others(self, reducer: AllReducer) -> None:
        """In join(), for a rank without inputs. It does not step. Another rank's NaN does not end
        its training."""
        with contextlib.suppress(NonFiniteGradientError):
            reducer.wait()
        reducer.usage.stepped = True

    def _at_end_of_backward(self, reducer: AllReducer) -> None:
        """Raise the communication thread's exception from backward() itself.

        A future could only pass on its text. And DDP should finish its own step first, so that
        one may catch the exception and go on: callbacks run in the order in which they were
        queued, and the second is queued behind DDP's.
        """
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback

        def wait() -> None:
            try:
                self._close_step(reducer)
                reducer.wait()
            except BaseException as error:
                self._raise_later(queue_callback, error)
            usage = reducer.usage
            if usage.leave_out and usage.stepping:  # in a closure: nobody else would
                queue_callback(lambda: clear_skipped(reducer))

        queue_callback(wait)

    def _close_step(self, reducer: AllReducer) -> None:
        """Complete the step if DDP has left out its last bucket."""
        nothing, self._open = self._open, None
        if nothing is not None:
            has_data = True if self._counts_data() else None
            reducer.submit({}, nothing, last=True, has_data=has_data)

    @staticmethod
    def _raise_later(queue_callback: Callable[[Callable[[], None]], None], error: Any) -> None:
        def raise_it() -> None:
            raise error

        queue_callback(raise_it)


def _of_a_copy() -> None:
    """A copy of a model has None instead of the handle: DDP does not copy its hook."""
    log.warning(
        "a copy of a compressed DDP model is not compressed itself: it averages densely, unless "
        "you attach to it"
    )


def attach(
    model: nn.Module,
    algorithm: Algorithm,
    *,
    group: dist.ProcessGroup | None = None,
    trainer: Any = None,
    **options: Any,
) -> Compression:
    """Compress the gradients of a DistributedDataParallel model; the rest of training is as before.

    ```python
    model = DDP(model)
    handle = oktopk.attach(model, oktopk.OkTopk(density=0.02, warmup_steps=128))
    ```

    Collective: all ranks attach the same, before the first backward.

    Args:
        model: in DistributedDataParallel; also as torch.compile returns it.
        algorithm: what to reduce with.
        group: a process group that nothing else uses. None makes one of all ranks; a model whose
            DDP has a group of its own needs one of the same ranks here.
        trainer: an object whose lists `sparsities`, `compression_ratios` and
            `communication_sizes` get one number a step.
        options: see `oktopk.Options`.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(
            f"model is a {type(ddp).__name__}, but must be in DistributedDataParallel: call "
            "torch.distributed.init_process_group(), then attach to DDP(model). That works in a "
            "single process, too, where there is nothing to average. Without DDP, and without "
            "torch.distributed in a single process, use oktopk.DistributedOptimizer"
        )
    with raised_by_all(ddp.process_group, ddp.device):
        _check_ddp(ddp)
        _check_group(ddp, group)
        settings = Options.of(**options)
        handle = Compression(ddp, algorithm, settings, group, _has_unused(ddp), trainer)
    handle.start()
    try:
        with raised_by_all(ddp.process_group, ddp.device):
            _register(ddp, handle)
        handle._watch()  # now: the first optimizer's step may come before backward, with a closure
    except Exception:
        handle.close()
        raise
    return handle


def _register(ddp: DistributedDataParallel, handle: Compression) -> None:
    try:
        ddp.register_comm_hook(handle, hook)
    except RuntimeError as error:
        raise ValueError(
            "DDP does not take a hook here. It takes one only, before the first backward, and none "
            f"with mixed_precision= (use autocast). It said: {error}"
        ) from error


def comm_hook(
    module: nn.Module,
    algorithm: Algorithm,
    *,
    group: dist.ProcessGroup | None = None,
    trainer: Any = None,
    find_unused_parameters: bool | None = None,
    **options: Any,
) -> tuple[Compression, Hook]:
    """The pair (state, hook) for `register_comm_hook`, and for frameworks that call it.

    Args:
        module: the model, in DDP or not yet; torch.distributed may be initialised later, too.
            It must be in DDP for `join(divide_by_initial_world_size=False)`, and for DDP's
            `skip_all_reduce_unused_params`.
        find_unused_parameters: whether DDP is to have it, or a static graph. None: as the module
            has it; for one that is not in DDP yet, True, which is always safe, but costs a look
            at every gradient.

    The rest is as for `attach`. Communication begins, and mistakes are found, in the first
    backward.
    """
    unused = _has_unused(module) if find_unused_parameters is None else find_unused_parameters
    return Compression(module, algorithm, Options.of(**options), group, unused, trainer), hook


def hook(state: Compression, bucket: GradBucket) -> Future[Tensor]:
    """DDP's communication hook, see `comm_hook`."""
    return state._reduce(bucket)


def _has_unused(module: nn.Module) -> bool:
    """Whether DDP may leave the average of a parameter unused."""
    if not isinstance(module, DistributedDataParallel):
        return True
    return bool(module.find_unused_parameters or module.static_graph)


def _check_ddp(ddp: DistributedDataParallel) -> None:
    """Refuse models that would fail later, in a way that is hard to understand."""
    problem = None
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()):
        problem = "an optimizer steps in backward (apply_optimizer_in_backward): step it afterwards"
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        problem = "all parameters to train are in delay_all_reduce_named_params: no hook sees them"
    if getattr(ddp, "_use_python_reducer", False):
        problem = (
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which calls hooks in another "
            "way: leave it at True"
        )
    if problem:
        raise ValueError(f"this DDP model cannot be compressed: {problem}")


def _check_group(ddp: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if ranks != dist.get_process_group_ranks(group or dist.group.WORLD):
        raise ValueError(
            f"the model is trained by ranks {ranks}, but communication would be among others: make "
            f"a second group with torch.distributed.new_group({ranks}), on all ranks, and pass it "
            "as group="
        )


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that DDP averages, or will average, in its order.

    Names are those of the user's model, without the prefixes of DDP and torch.compile.
    """
    inner, ignored = module, getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    if isinstance(module, DistributedDataParallel):
        inner, ignored = module.module, module.parameters_to_ignore
    seen = set()
    for prefix, part in inner.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            # Joined by a dot where there is no prefix, too, as DDP compares them.
            if f"{prefix}.{name}" not in ignored and parameter not in seen:
                seen.add(parameter)
                full = f"{prefix}.{name}" if prefix else name
                yield full.replace("_orig_mod.", ""), parameter
