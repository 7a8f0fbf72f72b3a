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
    "algorithm",
    "attach",
    "checkpoint",
    "comm_hook",
    "names",
]
