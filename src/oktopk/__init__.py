"""oktopk: sparse allreduce with error feedback for torch.distributed."""

from . import checkpoint
from .adam import Adam, AdamW
from .algorithms import Algorithm, Dense, Gaussiank, GTopk, OkTopk, TopkA, TopkDSA, algorithm, names
from .allreduce import SparseAllreduce
from .buckets import Options
from .ddp import Compression, attach, comm_hook
from .engine import AllReducer
from .optimizer import DistributedOptimizer
from .state import ReplicaError
from .stats import StepStats, Summary
from .transport import NonFiniteGradientError, PeerError
from .version import version_of as _version_of

__version__ = _version_of("oktopk")

__all__ = [
    "Adam",
    "AdamW",
    "Algorithm",
    "AllReducer",
    "Compression",
    "Dense",
    "DistributedOptimizer",
    "GTopk",
    "Gaussiank",
    "NonFiniteGradientError",
    "OkTopk",
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
