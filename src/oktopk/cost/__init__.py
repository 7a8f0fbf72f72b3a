"""The cost model: how long a step takes, from equations. Pure Python, without torch.

    cost = predict("oktopk", numel=27_600_000, k=552_000, size=8, wire="int8",
                   link=Link(rate=125e6, latency=50e-6), machine=Machine())
    cost.seconds, cost.bytes_sent

Read `machine.py` for what is known of links and machines, `sizes.py` for the bytes of a message,
`patterns.py` for the patterns of communication, and `algorithms.py` for the equations.
"""

from __future__ import annotations

from .algorithms import ALGORITHMS, predict
from .machine import Cost, Link, Machine, Nodes
from .overlap import Step, step_time
from .sizes import WIRES

__all__ = [
    "ALGORITHMS",
    "WIRES",
    "Cost",
    "Link",
    "Machine",
    "Nodes",
    "Step",
    "predict",
    "step_time",
]
