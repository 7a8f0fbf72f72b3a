"""`--measure`: run the micro-benchmark on ranks, wherever they are."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date

from ...common.errors import UserError
from ...common.host import cores, machine, processor
from ...common.values import build, parse
from ...cost import Link, Machine
from ...train.launch.place import Place
from ..network import Hosts, Loopback
from .calibration import Calibration

_SECONDS = 300


def on_hosts(hosts: Hosts) -> tuple[Machine, Link]:
    """Measure with one rank on each host, all of them on this machine."""
    size = len(hosts.hosts)
    address, port = hosts.meeting
    processes = []
    for rank in range(size):
        env = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"},
            **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)},
            **{"OMP_NUM_THREADS": "1", "OKTOPK_RANKS_HERE": str(size)},
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        command = [sys.executable, "-m", "oktopk.lab.plan.probe"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(hosts.start(rank, command, env, stdin=subprocess.DEVNULL, **pipes))
    said = ""
    for rank, process in enumerate(processes):
        try:
            out, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"--measure: rank {rank} was not done in {_SECONDS} seconds") from None
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise UserError(f"--measure: rank {rank} failed: {last[0]}")
        said = said or out
    found = parse(said)
    return build(Machine, found["machine"]), build(Link, found["link"])


def on_this_machine(ranks: int) -> Calibration:
    """Measure with local ranks, which talk over loopback."""
    with Loopback(ranks) as hosts:
        found, link = on_hosts(hosts)
    return Calibration(found, link, _source(f"{ranks} ranks over loopback"))


def on_this_job(place: Place) -> Calibration:
    """Measure between the ranks that a launcher started, of which this is one."""
    import torch
    import torch.distributed as dist

    from ...common.together import gather
    from ...train.launch.meeting import SECONDS_TO_MEET, meet
    from ...train.launch.worker import join
    from .probe import probe

    join(place, meet(place, SECONDS_TO_MEET), torch.device("cpu"))
    here = gather(machine()).count(machine())
    found, link = probe(here)
    dist.destroy_process_group()
    return Calibration(found, link, _source(f"the {place.size} ranks of this job"))


def _source(ranks: str) -> str:
    today = date.today().isoformat()
    return f"measured {today} on {processor()}, {len(cores())} cores, with {ranks}"
