"""oktopk: sparse allreduce with error feedback for torch.distributed."""

from .algorithms import Algorithm, Dense, Gaussiank, GTopk, OkTopk, TopkA, TopkDSA, algorithm, names
from .allreduce import SparseAllreduce
from .stats import StepStats
from .transport import NonFiniteGradientError, PeerError

__all__ = [
    "Algorithm",
    "Dense",
    "GTopk",
    "Gaussiank",
    "NonFiniteGradientError",
    "OkTopk",
    "PeerError",
    "SparseAllreduce",
    "StepStats",
    "TopkA",
    "TopkDSA",
    "algorithm",
    "names",
]
