"""Tensors that claim to be on a GPU, on a machine without one.

Their content is on the CPU, and all operations run there. But they follow the rules of devices:

- An operation takes tensors of one device. A number in a CPU tensor without dimensions may meet
  the elements of a GPU's tensor; anything else raises `DeviceMismatch`.
- What a factory makes is where its `device=` says.
- Where the host would wait for the device, that is counted: values that are read, shapes that
  depend on values, copies to the CPU, and copies to the device that may block.

Collectives go to the real process group with the content of their tensors.

    with Claims() as device:
        vector = device.take(torch.ones(3))
        (vector * 2).tolist()
    assert device.waits.total() == 1

A mode belongs to a thread. `Claims.enter_here` and `leave_here` are for other threads.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Operations that give the host a value."""
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose results have a size that the host must ask for."""
MASKED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that ask for a size if an index is a mask."""


def guard() -> None:
    """Let tensors on "cuda" be indexed by a build of torch without CUDA.

    To index a tensor, torch makes its device the current one, and asks a table how. A build without
    CUDA has no entry for it. Torch has an entry that does nothing, for builds with CUDA on machines
    without a GPU. It takes that one where the entry of the build counts no GPUs. So this puts an
    object there that says so. Fake tensors need it, too.
    """
    if not torch.backends.cuda.is_built():
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        table = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        cuda = 1  # c10::DeviceType::CUDA
        if table[cuda] is None:
            table[cuda] = ctypes.addressof(_no_gpus)
    torch._C._ensureCUDADeviceGuardSet()


_zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda this: 0)
_methods = (ctypes.c_void_p * 64)(*[ctypes.cast(_zero, ctypes.c_void_p).value] * 64)
_no_gpus = ctypes.c_void_p(ctypes.addressof(_methods))
"""A C++ object all of whose methods return 0."""

TAKES_NUMBERS = {
    aten.fill_.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that take a number from the CPU, besides those on elements."""


class DeviceMismatch(RuntimeError):
    """An operation has tensors of two devices."""


class Claimed(Tensor):
    """A tensor that claims to be on a GPU."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> Claimed:
        claimed: Claimed = Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=CUDA,
        )
        claimed.content = content
        return claimed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Methods that do not come to the dispatcher."""
        if func is Tensor.data_ptr:
            return args[0].content.data_ptr()
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func is Tensor.numpy:
            raise DeviceMismatch("numpy() of a tensor on a GPU")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(f"{func} outside of `Claims`: its mode is not active in this thread")


class Claims(TorchDispatchMode):
    """The mode in which such tensors live, and what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """How often the host would have waited for the device, by operation."""
        self.uploads = 0
        """Copies from the CPU to the device for which the host does not wait."""
        self.operations: Counter[str] = Counter()
        """Operations on claimed tensors."""
        self._patches = ExitStack()

    def __enter__(self) -> Claims:
        guard()
        self._patches.enter_context(mock.patch("torch.cuda._lazy_init"))
        self.enter_here()
        return self

    def __exit__(self, *error: Any) -> None:
        self.leave_here(*error)
        self._patches.close()

    def enter_here(self) -> None:
        """Let the mode hold in this thread, too."""
        # Otherwise torch.tensor(..., device="cuda") would not ask the mode.
        _here.lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()

    def leave_here(self, *error: Any) -> None:
        super().__exit__(*(error or (None, None, None)))
        torch._C._set_only_lift_cpu_tensors(_here.lifts)

    @staticmethod
    def take(content: Tensor) -> Claimed:
        """A claimed tensor with a copy of this content."""
        return Claimed(content.clone())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        claimed = [t for t in tensors if isinstance(t, Claimed)]
        device = kwargs.get("device")
        wanted = None if device is None else torch.device(device)
        if not claimed and (wanted is None or wanted.type == "cpu"):
            return func(*args, **kwargs)
        there = wanted.type == "cuda" if wanted is not None else bool(claimed)
        if wanted is not None and wanted.type == "cuda" and wanted.index not in (None, 0):
            raise DeviceMismatch(f"{func}: there is no {wanted}")
        if func in (aten._to_copy.default, aten.copy_.default):
            self._note_copy(func, args, kwargs, there)
            there = there if func is aten._to_copy.default else isinstance(args[0], Claimed)
        else:
            self._check(func, tensors, claimed)
            self._note(func, args)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        return self._run(func, args, kwargs, claimed, there)

    def _run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        claimed: Sequence[Claimed],
        there: bool,
    ) -> Any:
        """Run an operation on the content, and give its results to the device."""
        self.operations[str(func)] += 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [t.content if isinstance(t, Claimed) else t for t in leaves]
        on_cpu, options = pytree.tree_unflatten(leaves, spec)
        shapes = [t.content.shape for t in claimed]
        result = func(*on_cpu, **options)
        if shapes != [t.content.shape for t in claimed]:
            raise NotImplementedError(f"{func} has changed the shape of a tensor")
        known = {id(t.content): t for t in claimed}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or not there:
                return value
            same = known.get(id(value))
            return Claimed(value) if same is None else same

        return pytree.tree_map(wrap, result)

    def _check(self, func: Any, tensors: Sequence[Tensor], claimed: Sequence[Claimed]) -> None:
        """All tensors are of one device, but for numbers among elements."""
        strangers = [t for t in tensors if not isinstance(t, Claimed)]
        if not claimed or not strangers:
            return
        numbers = all(t.ndim == 0 for t in strangers)
        if numbers and (torch.Tag.pointwise in func.tags or func in TAKES_NUMBERS):
            return
        shapes = [tuple(t.shape) for t in strangers]
        raise DeviceMismatch(f"{func} has tensors on {CUDA}, and on the CPU of shape {shapes}")

    def _note_copy(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], there: bool
    ) -> None:
        """A copy between the CPU and the device. The host waits for it, unless it is from the CPU,
        and told not to block."""
        source, at_once = args[0], kwargs.get("non_blocking", False)
        if func is aten.copy_.default:
            source, there = args[1], isinstance(args[0], Claimed)
            at_once = at_once or (len(args) > 2 and args[2])
        if isinstance(source, Claimed) and not there:
            self.waits["copy to the CPU"] += 1
        elif there and not isinstance(source, Claimed):
            if at_once:
                self.uploads += 1
            else:
                self.waits["copy to the device"] += 1

    def _note(self, func: Any, args: Sequence[Any]) -> None:
        if func in READS or func in SHAPED_BY_VALUES:
            self.waits[str(func.overloadpacket).removeprefix("aten.")] += 1
        elif func in MASKED and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.waits[str(func.overloadpacket).removeprefix("aten.") + " by a mask"] += 1


_here = threading.local()
