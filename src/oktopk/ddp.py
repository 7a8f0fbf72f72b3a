"""attach(): compression for a model in DistributedDataParallel.

DDP hands each of its buckets to a hook, which gives the gradients to the communication thread and
returns a future at once. The futures are done when the step is; DDP waits for them at the end of
backward.
"""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with classes.
import contextlib
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
from .buckets import Options
from .engine import AllReducer
from .handle import Handle
from .transport import NonFiniteGradientError
from .watch import watch
from .worker import raised_by_all

Hook = Callable[["Compression", GradBucket], Future[Tensor]]


class Compression(Handle):
    """Compression of one DDP model: what `attach` returns, and the state of the hook."""

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
        self._begin = partial(
            AllReducer,
            algorithm=algorithm,
            group=group,
            options=options,
            may_be_unused=may_be_unused,
            trainer=trainer,
        )
        self._reducer: AllReducer | None = None
        self._frozen: list[tuple[str, Tensor]] = []
        self._end_watch: Callable[[], None] | None = None

    @property
    def reducer(self) -> AllReducer:
        if self._reducer is None:
            raise RuntimeError(
                "compression begins in the first backward: call start() on all ranks, after "
                "init_process_group, to begin it now"
            )
        return self._reducer

    def start(self) -> AllReducer:
        if self._reducer is None:
            named = self._parameters.items()
            self._frozen = [(name, p) for name, p in named if not p.requires_grad]
            self._reducer = self._begin([(name, p) for name, p in named if p.requires_grad])
            advise(self._reducer)
        return self._reducer

    def close(self) -> None:
        if self._end_watch is not None:
            self._end_watch()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and thresholds: tensors and plain values.

        Every rank must save its own; `oktopk.checkpoint` does.
        """
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue where the state was taken; see `AllReducer.load_state_dict`."""
        self.start().load_state_dict(state, strict)

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self._parameters.items()

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook. It must not wait: backward goes on behind it."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ValueError(
                "a sparse gradient came: build the embedding with sparse=False to compress it"
            )
        reducer = self.start()
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{name} was frozen when compression was attached and is trained now, but "
                    "nobody averages it, so replicas would drift apart: unfreeze it before "
                    "DistributedDataParallel() and attach()"
                )
        gradients = {}
        start = 0
        for parameter in bucket.parameters():
            # Slices of the buffer, not bucket.gradients(): flat, whatever the memory format.
            gradients[self._names[id(parameter)]] = buffer[start : start + parameter.numel()]
            start += parameter.numel()
        future = reducer.submit(gradients, buffer, bucket.is_last())
        if self._end_watch is None:  # not before DDP has accepted the hook
            names = (name for bucket in reducer.buckets for name in bucket)
            self._end_watch = watch(reducer, {name: self._parameters[name] for name in names})
        if bucket.is_last():
            self._complete(reducer)
        return future

    def _complete(self, reducer: AllReducer) -> None:
        """See to it that somebody waits for the step, now that all of it has been submitted.

        Not earlier: with `checkpoint(..., use_reentrant=True)` an earlier bucket may come in a
        backward inside the backward, and its end is not that of the step.
        """
        if torch._C._current_graph_task_id() != -1:
            self._at_end_of_backward(reducer)
            return
        # In join(), for a rank without inputs. It does not step itself. Whether a NaN of another
        # one ends training is for that one to decide.
        with contextlib.suppress(NonFiniteGradientError):
            reducer.wait()
        reducer.stepped = True

    def _at_end_of_backward(self, reducer: AllReducer) -> None:
        """Raise the communication thread's exception from backward() itself.

        A future could only pass on its text. And DDP should finish its own step first, so that
        one may catch the exception and go on: callbacks run in the order in which they were
        queued, and the second is queued behind DDP's.
        """
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback

        def wait() -> None:
            try:
                reducer.wait()
            except BaseException as error:
                self._raise_later(queue_callback, error)

        queue_callback(wait)

    @staticmethod
    def _raise_later(queue_callback: Callable[[Callable[[], None]], None], error: Any) -> None:
        def raise_it() -> None:
            raise error

        queue_callback(raise_it)


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
            f"model is a {type(ddp).__name__}, but must be in DistributedDataParallel: attach to "
            "DDP(model), or use oktopk.DistributedOptimizer without DDP"
        )
    with raised_by_all(ddp.process_group):
        _check_group(ddp, group)
        settings = Options.of(**options)
        handle = Compression(ddp, algorithm, settings, group, _has_unused(ddp), trainer)
    handle.start()
    try:
        with raised_by_all(ddp.process_group):
            _register(ddp, handle)
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
            "with mixed_precision= (use autocast) or an optimizer that steps in backward. It "
            f"said: {error}"
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


def _check_group(ddp: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if ranks != dist.get_process_group_ranks(group or dist.group.WORLD):
        raise ValueError(
            f"the model is trained by ranks {ranks}, but communication would be among others: make "
            f"a second group with torch.distributed.new_group({ranks}), on all ranks, and pass it "
            "as group="
        )


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names as the user's model has them, without what DDP and torch.compile put in front."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    ignored = getattr(module, "parameters_to_ignore", ())
    for name, parameter in inner.named_parameters():
        if name not in ignored:
            yield name.replace("_orig_mod.", ""), parameter
