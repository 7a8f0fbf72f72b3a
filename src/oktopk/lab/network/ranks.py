"""The environment of a rank, as launchers set it."""

from __future__ import annotations

import os

from ...common.host import cores
from .hosts import Hosts


def environment(
    hosts: Hosts, ranks_per_host: int, rank: int, meeting: tuple[str, int]
) -> dict[str, str]:
    """The environment that torchrun would give a rank.

    Args:
        meeting: `hosts.meeting`, the same for all ranks.
    """
    host, local_rank = divmod(rank, ranks_per_host)
    size = len(hosts.hosts) * ranks_per_host
    address, port = meeting
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "GROUP_RANK": host,
        "NODE_RANK": host,
        "NNODES": len(hosts.hosts),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    # Numerical libraries would take all cores, on every host; torchrun limits them, too.
    threads = {"OMP_NUM_THREADS": str(max(1, len(cores()) // size))}
    return {**threads, **os.environ, **{name: str(value) for name, value in told.items()}}
