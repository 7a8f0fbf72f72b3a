"""oktopk: sparse allreduce with error feedback for torch.distributed.

Names are imported when they are first used, so that `oktopk --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .common.version import version_of as _version_of

if TYPE_CHECKING:
    from . import checkpoint
    from .adam import Adam, AdamW
    from .algorithms import (
        Algorithm,
        Auto,
        Dense,
        Gaussiank,
        GTopk,
        OkTopk,
        OkTopkVariable,
        TopkA,
        TopkDSA,
        algorithm,
        names,
    )
    from .core.allreduce import SparseAllreduce
    from .core.buckets import Options
    from .core.peers import ReplicaError
    from .core.reducer import AllReducer
    from .core.stats import StepStats, Summary
    from .core.transport import NonFiniteGradientError, PeerError
    from .ddp import Compression, attach, comm_hook
    from .optimizer import DistributedOptimizer

__version__ = _version_of("oktopk")

__all__ = [
    "Adam",
    "AdamW",
    "Algorithm",
    "AllReducer",
    "Auto",
    "Compression",
    "Dense",
    "DistributedOptimizer",
    "GTopk",
    "Gaussiank",
    "NonFiniteGradientError",
    "OkTopk",
    "OkTopkVariable",
    "Options",
    "PeerError",
    "ReplicaError",
    "SparseAllreduce",
    "StepStats",
    "Summary",
    "TopkA",
    "TopkDSA",
    "__version__",
    "algorithm",
    "attach",
    "checkpoint",
    "comm_hook",
    "names",
]

_HOMES = {
    "adam": "Adam AdamW",
    "algorithms": "Algorithm Auto Dense GTopk Gaussiank OkTopk OkTopkVariable TopkA TopkDSA "
    "algorithm names",
    "core.allreduce": "SparseAllreduce",
    "core.buckets": "Options",
    "ddp": "Compression attach comm_hook",
    "core.reducer": "AllReducer",
    "optimizer": "DistributedOptimizer",
    "core.peers": "ReplicaError",
    "core.stats": "StepStats Summary",
    "core.transport": "NonFiniteGradientError PeerError",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = {
    "adam",
    "algorithms",
    "checkpoint",
    "core",
    "ddp",
    "handle",
    "integrations",
    "kernels",
    "optimizer",
    "wire",
}


if not TYPE_CHECKING:  # or a name that does not exist would have a type

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
