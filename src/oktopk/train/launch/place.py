"""The place of this process: its rank under torchrun, mpirun or srun, and where ranks meet.

All of this is read from environment variables. Only torchrun says where the ranks meet. Under the
other launchers, ranks of one machine meet in a file whose name all of them can compute; ranks of
several machines meet at MASTER_ADDR and MASTER_PORT, which for srun follow from the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import UserError

LOCAL = "oktopk"
"""The launcher of workers that `oktopk train` started itself."""


@dataclass(frozen=True)
class Place:
    """A worker among the workers."""

    rank: int
    size: int
    local_rank: int
    """Among the workers of this machine."""
    local_size: int
    launcher: str
    """torchrun, mpirun, srun, or oktopk."""

    def __post_init__(self) -> None:
        if not (
            0 <= self.rank < self.size
            and 0 <= self.local_rank < self.local_size
            and self.local_size <= self.size
        ):
            raise UserError(
                f"{self.launcher} says that this is worker {self.rank} of {self.size}, and "
                f"{self.local_rank} of {self.local_size} on its machine, which cannot be: "
                "unset variables that are left from another run, or start it without a launcher"
            )


# The variables of each launcher: rank, size, local rank, local size.
_Names = tuple[str, str, str, str]
_TORCHRUN: _Names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI: _Names = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA: _Names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN_LOCAL_SIZE = "SLURM_STEP_TASKS_PER_NODE"
_SRUN: _Names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _SRUN_LOCAL_SIZE)

# Slurm numbers the steps that srun starts from 0, and those that are not srun's from here on: the
# batch script itself, the shell of salloc.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Where a launcher put this process; None if none did.

    The order matters: mpirun may start its daemons with srun, and torchrun may be started by
    either, so that the innermost launcher is asked first.
    """
    if any(name in environ for name in _TORCHRUN[:3]):
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]:
            raise UserError(
                f"RANK is set, but {missing[0]} is not: start the workers with torchrun"
            )
        return Place(*_numbers(environ, _TORCHRUN, "torchrun"), "torchrun")
    if any(name in environ for name in _OPEN_MPI[:2]):
        return Place(*_numbers(environ, _OPEN_MPI, "mpirun"), "mpirun")
    # srun --mpi=pmi2 sets PMI_RANK as well, but not the local rank.
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not _srun_step(environ)):
        return Place(*_numbers(environ, _HYDRA, "mpirun"), "mpirun")
    if _srun_step(environ):
        counts = {**environ, _SRUN_LOCAL_SIZE: _srun_local_size(environ)}
        return Place(*_numbers(counts, _SRUN, "srun"), "srun")
    return None


def _numbers(environ: Mapping[str, str], names: _Names, launcher: str) -> tuple[int, int, int, int]:
    given = [name for name in names if name in environ]
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(
            f"{', '.join(given)} of {launcher} is set, but {missing[0]} is not: start the workers "
            f"with {launcher}, or unset the variables of another run"
        )
    for name in names:
        if not environ[name].isdecimal():
            raise UserError(f"{name} is {environ[name]!r}, but must be a number")
    rank, size, local_rank, local_size = (int(environ[name]) for name in names)
    return rank, size, local_rank, local_size


def _srun_step(environ: Mapping[str, str]) -> bool:
    """Is this a task of srun? A batch script, and the shell of salloc or `srun --pty`, have a rank
    too, 0, but nobody started the others."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _FIRST_RESERVED_STEP or "SLURM_PROCID" not in environ:
        return False
    return not (environ.get("SLURM_STEP_NUM_TASKS") == "1" and "SLURM_PTY_PORT" in environ)


def _srun_local_size(environ: Mapping[str, str]) -> str:
    """This machine's part of, for example, 4(x2),3."""
    counts = environ.get(_SRUN_LOCAL_SIZE, "")
    try:
        tasks: list[str] = []
        for part in counts.split(","):
            count, _, times = part.partition("(x")
            tasks += [count] * int(times.rstrip(")") or 1)
        return tasks[int(environ.get("SLURM_NODEID", "0"))]
    except (ValueError, IndexError):
        raise UserError(
            f"{_SRUN_LOCAL_SIZE} is {counts!r}, which says nothing of machine "
            f"{environ.get('SLURM_NODEID', '0')}: start the workers with srun"
        ) from None


def address(place: Place, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Host and port where the ranks meet; None if they are all on this machine and no launcher
    chose a port: then they meet in `meeting_file`."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if host and port:
        return host, port
    if place.local_size == place.size:
        return None
    if place.launcher == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        job = environ.get("SLURM_JOB_ID", "")
        if nodes and job.isdecimal():
            # All ranks must know the port before they can speak: as is common, the job's number
            # gives one, and jobs that share a machine get different ones.
            return host or first_node(nodes), port or str(20000 + int(job) % 20000)
    raise UserError(
        f"{place.launcher} started workers on several machines, but MASTER_ADDR and MASTER_PORT "
        "are not set: name the first machine and a free port of it, for example "
        "`mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...`"
    )


def first_node(nodes: str) -> str:
    """The first host of a list in Slurm's notation: node[01-04,7],gpu3 begins with node01."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def meeting_file(place: Place, environ: Mapping[str, str] = os.environ) -> Path:
    """A file of this job, and of no job before it, for the ranks of one machine to meet in."""
    if place.launcher == "srun":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    else:  # Open MPI: the job, and the port of its daemon, since the job's number is but a pid
        names = ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_orte_hnp_uri")
    identity = [environ.get(name, "") for name in names]
    if not any(identity):  # MPICH's and Intel's mpirun do not say
        identity = _proxy()
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"oktopk-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not (stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()):
        raise UserError(f"{folder} is not a folder of your own: set TMPDIR to one that is")
    return folder / key


def _proxy() -> list[str]:
    """The process that started the ranks of this machine, by number and start. Ranks may be in
    shells of their own (`mpirun bash -c ...`), so that the parent is not always it."""
    parent = process = os.getppid()
    try:
        while process > 1:
            # pid (name) state parent ... the 22nd is the start
            stat = Path(f"/proc/{process}/stat").read_text()
            name, _, rest = stat.partition("(")[2].rpartition(")")
            fields = rest.split()
            if name.startswith("hydra"):
                return [str(process), fields[19]]
            process = int(fields[1])
    except (OSError, IndexError, ValueError):  # no /proc
        pass
    return [str(parent)]
