"""Workers start, however they are launched; and when something ends them, nothing stays behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from launch import Warm
from oktopk.workloads.speech import manifest
from oktopk.workloads.speech.manifest import Utterance

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("rich")
pytest.importorskip("jiwer")
if not sys.platform.startswith("linux"):
    pytest.skip("looks for processes in /proc", allow_module_level=True)

TRAIN = [sys.executable, "-W", "ignore", "-m", "oktopk", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_", "SLURM_", "TORCH")
MPIRUN = {  # root, and more workers than cores, are fine here; and no worker needs its own core
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a model and a corpus that take no time."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    utterances = []
    for number in range(12):
        path = folder / f"{number}.wav"
        soundfile.write(path, random.uniform(-0.5, 0.5, 8000), 16_000)
        utterances.append(Utterance(path, "YES", 0.5))
    manifest.write(folder / "list.csv", utterances)
    return [
        *("--dataset", "manifest", "--train-manifest", str(folder / "list.csv")),
        *("--val-manifest", str(folder / "list.csv"), "--width", "16", "--depth", "1"),
        *("--max-steps", "2", "--batch-size", "2", "--examples", "1", "--no-tensorboard"),
    ]


def without_launchers() -> dict[str, str]:
    return {key: os.environ[key] for key in os.environ if not key.startswith(LAUNCHERS)}


class Run:
    """A command, its output in files: pipes would stay open if a worker outlived it."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        name = secrets.token_hex(4)
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        clean = without_launchers()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command,
                env={**clean, **environ},
                stdout=out,
                stderr=err,
                cwd=folder,
                start_new_session=True,
            )

    def wait(self) -> int:
        return self.process.wait(100)

    def session(self) -> list[int]:
        """Processes that it started, and itself."""
        return session(self.process.pid)

    def until(self, happened: str) -> None:
        for _ in range(1000):
            if happened in self.out.read_text():
                return
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.1)
        pytest.fail(f"no {happened!r} in: {self.out.read_text()}")

    def alone(self) -> bool:
        """Have all processes ended, at last?"""
        for _ in range(200):
            if not self.session():
                return True
            time.sleep(0.1)
        return False


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


class Forked:
    """`oktopk train` as a single process, without the seconds that importing torch takes.

    Args:
        first: what the process runs before.
    """

    def __init__(
        self,
        warm: Warm,
        flags: list[str],
        folder: Path,
        environ: dict[str, str] | None = None,
        first: str = "",
    ) -> None:
        name = secrets.token_hex(4)
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.warm = warm
        script = folder / f"{name}.py"
        script.write_text(f"{first}import sys\nfrom oktopk.cli import main\nsys.exit(main())\n")
        self.pid = warm.start(
            script,
            *("train", *flags),
            environ={**without_launchers(), **(environ or {})},
            folder=folder,
            out=self.out,
            err=self.err,
        )

    def wait(self) -> int | None:
        return self.warm.wait(self.pid, timeout=100)[0]

    def alone(self) -> bool:
        return not session(self.pid)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands, and reaps what is left of them."""
    runs: list[Run] = []

    def start(command: list[str], environ: dict[str, str] | None = None) -> Run:
        runs.append(Run(command, tmp_path, environ or {}))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()  # torchrun's workers are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(40)
        for process in run.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.process.wait()


def trained(run: Run | Forked) -> None:
    """Both workers took part, and rank 0 alone spoke."""
    code = run.wait()
    assert code == 0, run.err.read_text()
    shown = run.out.read_text()
    assert shown.count("2 workers on cpu") == 1
    assert "results are in run" in shown
    assert "the page of this run is run/report.html" in shown
    assert (run.out.parent / "run" / "checkpoint" / "manifest.json").exists()


def one_line(run: Run | Forked, says: str) -> None:
    errors = run.err.read_text().splitlines()
    assert len(errors) == 1, errors
    assert errors[0].startswith("oktopk: error: ")
    assert says in errors[0]
    assert run.alone()


def test_own_workers(start: Start, tiny: list[str]) -> None:
    run = start([*TRAIN, *tiny, "--nworkers", "2", "--run-dir", "run"])
    trained(run)
    assert run.err.read_text() == ""
    assert run.alone()


def test_torchrun(start: Start, tiny: list[str]) -> None:
    # The recipe's nworkers is 2; lstm_extended's 8 is not the user's wish, so it gives way.
    command = [sys.executable, *TORCHRUN, *TRAIN[3:], "--recipe", "lstm_extended"]
    small = ["--dnn", "lstman4-small", "--features", "logmel"]
    trained(start([*command, *small, *tiny, "--run-dir", "run"]))


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich", "mpirun"])
def test_mpirun(start: Start, tiny: list[str], mpirun: str) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"{mpirun} is not installed")
    if mpirun == "mpirun" and shutil.which("mpirun.openmpi"):
        pytest.skip("is one of those above")
    # In a shell, as is common: workers then have different parents.
    script = ["bash", "-c", 'true; "$@"; exit $?', "bash"]
    flags = ["--nworkers", "2", "--nwpernode", "2", "--run-dir", "run"]
    trained(start([mpirun, "-n", "2", *script, *TRAIN, *tiny, *flags], MPIRUN))


def srun(rank: int, job: str) -> dict[str, str]:
    """What srun tells a task."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def test_srun(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    job = str(secrets.randbits(31))
    flags = [*tiny, "--run-dir", "run"]
    other, first = (Forked(warm, flags, tmp_path, srun(rank, job)) for rank in (1, 0))
    trained(first)
    assert other.wait() == 0
    assert other.out.read_text() == ""


def test_srun_and_a_mistake(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    """Of two workers that find it, one tells."""
    job = str(secrets.randbits(31))
    flags = [*tiny, "--nworkers", "3"]
    runs = [Forked(warm, flags, tmp_path, srun(rank, job)) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [2, 2]
    told = [run for run in runs if run.err.read_text()]
    assert len(told) == 1, [run.err.read_text() for run in runs]
    one_line(told[0], "--nworkers is 3, but srun started 2 workers")


def test_signal_while_a_mistake_is_reported(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    """Launchers send it as soon as one worker ends. It is no interruption by the user."""
    job = str(secrets.randbits(31))
    stuck = """import time
from oktopk.train.launch.meeting import meet
from oktopk.train.launch.place import place
store = meet(place(), 100)
time.sleep(100)
"""
    first, second = (
        Forked(warm, [*tiny, "--nworkers", "3"], tmp_path, srun(rank, job), stuck if rank else "")
        for rank in (0, 1)
    )
    while "--nworkers is 3" not in first.err.read_text():
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 2
    one_line(first, "--nworkers is 3, but srun started 2 workers")
    os.kill(second.pid, signal.SIGKILL)
    second.wait()


def test_memory_runs_out_on_one_worker(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    """Both end, with the same code, and one tells."""
    job = str(secrets.randbits(31))
    limit = """import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
"""
    flags = [*tiny, "--width", "2500"]  # a matrix of 100 MB
    runs = [
        Forked(warm, flags, tmp_path, srun(rank, job), limit if rank else "") for rank in (0, 1)
    ]
    assert [run.wait() for run in runs] == [2, 2], [run.err.read_text() for run in runs]
    told = [run for run in runs if run.err.read_text()]
    assert len(told) == 1, [run.err.read_text() for run in runs]
    one_line(told[0], "could not be had): use a smaller model, smaller batches")


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("ends = os.pipe(); os.close(ends[0]); end = ends[1]", "nobody reads the output any more"),
        ("end = os.open('/dev/full', os.O_WRONLY)", "No space left on device"),
    ],
    ids=["closed", "full"],
)
def test_output_that_cannot_be_written(
    warm: Warm, tiny: list[str], tmp_path: Path, output: str, says: str
) -> None:
    """Rank 0 alone prints, but all workers end, with the same code."""
    job = str(secrets.randbits(31))
    first = f"import os\n{output}\nos.dup2(end, 1)\n"
    runs = [Forked(warm, tiny, tmp_path, srun(rank, job), first) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [2, 2], [run.err.read_text() for run in runs]
    told = [run for run in runs if run.err.read_text()]
    assert len(told) == 1, [run.err.read_text() for run in runs]
    one_line(told[0], says)


def test_torchrun_and_a_mistake(start: Start, tiny: list[str]) -> None:
    run = start([sys.executable, *TORCHRUN, *TRAIN[3:], *tiny, "--nworkers", "3"])
    assert run.wait() != 0
    errors = run.err.read_text()  # torchrun adds its own
    assert errors.count("--nworkers is 3, but torchrun started 2 workers") == 1
    assert "oktopk/train" not in errors


def test_mistake_found_by_workers(start: Start, tiny: list[str]) -> None:
    run = start([*TRAIN, *tiny, "--pretrain", "nowhere"])
    assert run.wait() == 2
    one_line(run, "--pretrain nowhere")


def test_damaged_inputs(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    """One clear line each, and exit code 2. All are started before the first is waited for."""
    recording = tmp_path / "cut.wav"
    soundfile.write(recording, np.zeros(8000), 16_000)
    manifest.write(tmp_path / "cut.csv", [Utterance(recording, "YES", 0.5)])
    recording.write_bytes(recording.read_bytes()[:5000])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "corpus" / "etc").mkdir(parents=True)
    (tmp_path / "corpus" / "etc" / "an4_train.fileids").write_text("")
    cases = {
        "cut.wav": ["--train-manifest", "cut.csv"],
        "empty.csv": ["--train-manifest", "empty.csv"],
        "corpus": ["--dataset", "an4", "--data-dir", "corpus"],
        "librispeech": ["--dataset", "librispeech"],
        "--nworkers is 0": ["--nworkers", "0"],
    }
    if importlib.util.find_spec("trackio") is None:
        cases["pip install trackio"] = ["--report-to", "trackio"]
    one = ["--nworkers", "1"]
    runs = {says: Forked(warm, [*tiny, *one, *flags], tmp_path) for says, flags in cases.items()}
    for says, run in runs.items():
        assert run.wait() == 2, run.err.read_text()
        one_line(run, says)


def test_odd_environments(warm: Warm, tiny: list[str], tmp_path: Path) -> None:
    launched = {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    cases = {
        "GLOO_SOCKET_IFNAME is nope0, but": {"GLOO_SOCKET_IFNAME": "lo,nope0"},
        "could not meet the others at 127.0.0.1:0": {**launched, "WORLD_SIZE": str(10**30)},
        "could not meet the others at 127.0.0.1:port": {**launched, "MASTER_PORT": "port"},
        "no such home": {"OKTOPK_CACHE": "~nobody-at-all"},
    }
    flags = [*tiny, "--run-dir", "run"]
    one = ["--nworkers", "1"]
    runs = {
        says: Forked(warm, flags if "RANK" in environ else [*flags, *one], tmp_path, environ)
        for says, environ in cases.items()
    }
    for says, run in runs.items():
        assert run.wait() == 2, run.err.read_text()
        one_line(run, says)


def test_ctrl_c(start: Start, tiny: list[str]) -> None:
    """It reaches all processes of a terminal at once."""
    run = start([*TRAIN, *tiny, "--max-steps", "100000", "--max-epochs", "100000"])
    run.until("step 1")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    errors = run.err.read_text()
    assert errors.count("\n") == 1
    assert "--resume auto" in errors
    assert run.alone()


def test_parent_is_killed(start: Start, tiny: list[str]) -> None:
    run = start([*TRAIN, *tiny, "--max-steps", "100000", "--max-epochs", "100000"])
    run.until("step 1")
    assert len(run.session()) >= 3
    run.process.kill()
    run.process.wait()
    assert run.alone()
