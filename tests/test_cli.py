"""The command line: every field is a flag, values have their order, and mistakes are one line."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import oktopk
from oktopk.cli import main
from oktopk.common.errors import UserError, mistake
from oktopk.common.sections import flag
from oktopk.train.config import options
from oktopk.train.config.config import Config, sections
from oktopk.train.config.recipes import recipe
from oktopk.train.launch.place import Place, address, first_node, meeting_file, place
from oktopk.workloads import RECIPES, WORKLOADS, workload_for

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def parse(line: str | list[str]) -> tuple[Config, frozenset[str]]:
    """What `oktopk train` makes of its arguments."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    options.add_arguments(parser)
    arguments = shlex.split(line) if isinstance(line, str) else line
    return options.build(parser.parse_args(options.spell(arguments)))


def config(line: str | list[str]) -> Config:
    return parse(line)[0]


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    owned = [each for some in options.options().values() for each in some]
    kinds = {kind for each in WORKLOADS for kind in sections(each).values()}
    assert len(owned) == sum(len(dataclasses.fields(kind)) for kind in kinds)
    assert {kind for kind, _ in owned} == kinds
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for kind, option in owned:
        assert f"{flag(option.name)} " in shown
        assert option.help in shown
        assert kind.title in shown
    assert "(default: 0.02)" in shown


def test_command_of_the_published_trainer() -> None:
    parsed, explicit = parse(
        "--dnn lstman4 --dataset an4 --data-dir D --nworkers 2 --max-epochs 1 --batch-size 8 "
        "--lr 0.01 --compression --compressor oktopk --density 0.02 --sigma-scale 2.5 "
        "--nwpernode 1 --nsteps-update 1 --pretrain P"
    )
    wanted = recipe("lstman4", data_dir="D", nworkers=2, max_epochs=1, nwpernode=1, pretrain="P")
    assert parsed == wanted
    assert {"nworkers", "nwpernode", "compression"} <= explicit


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "spoken"),
        ("an4", "an4"),
        ("--recipe lstm_debug", "lstm_debug"),
        ("an4 --recipe an4", "an4"),
        ("--dnn lstman4", "lstman4"),
        ("--dnn lstman4 --dataset spoken", "lstman4"),
        ("--dataset an4", "an4"),
        ("--dataset spoken", "spoken"),
        ("--dataset an4 --dnn lstman4", "lstman4"),
        ("lstm_debug --dnn lstman4-small", "lstm_debug"),
        ("--dnn lstman4-small", "spoken"),
        ("--dataset manifest --train-manifest a --val-manifest b", "an4"),
    ],
)
def test_recipe(line: str, name: str) -> None:
    assert config(line).run.recipe == name


def test_flags_before_toml_before_recipe_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('recipe = "an4"\nbatch_size = 5\nlr = 1\nmax-epochs = 7\n')
    parsed, explicit = parse(["--config", str(file), "--max_epochs", "9"])
    assert parsed.run.recipe == "an4"
    assert parsed.run.max_epochs == 9
    assert parsed.run.batch_size == 5
    assert parsed.optimizer.lr == 1.0
    assert type(parsed.optimizer.lr) is float
    assert parsed.optimizer.name == "adamw"
    assert parsed.compression.density == Config().compression.density
    assert explicit == {"recipe", "batch_size", "lr", "max_epochs"}
    assert config(["spoken", "--config", str(file)]).run.recipe == "spoken"


def test_toml_with_sections(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    flat = 'dataset = "an4"\nwidth = 5\noptimizer = "sgd"\nlr = 1\ncompression = false\n'
    file.write_text(flat)
    wanted = parse(["--config", str(file)])
    file.write_text(
        '[workload]\ndataset = "an4"\nwidth = 5\n[optimizer]\noptimizer = "sgd"\nlr = 1\n'
        "[compression]\ncompression = false\n"
    )
    assert parse(["--config", str(file)]) == wanted
    assert wanted[0].optimizer.name == "sgd"
    assert not wanted[0].compression.enabled


def test_values_of_a_recipe_are_nobodys_wish(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(_toml(recipe("spoken")))
    parsed, explicit = parse(["--config", str(file)])
    assert parsed == recipe("spoken")
    assert "nworkers" not in explicit
    file.write_text(_toml(recipe("spoken", nworkers=3)))
    assert "nworkers" in parse(["--config", str(file)])[1]


def test_dashes_underscores_and_equals() -> None:
    for line in ("--sigma-scale 1.5", "--sigma_scale 1.5", "--sigma_scale=1.5"):
        assert config(line).compression.sigma_scale == 1.5
    assert config("--run-dir my_run--1").run.run_dir == "my_run--1"
    assert config("--checkpoint-every -1").run.checkpoint_every == -1


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--compression", True),
        *((f"--compression {word}", True) for word in ("True", "true", "1", "yes")),
        *((f"--compression {word}", False) for word in ("False", "false", "0", "no")),
        ("--compression=False", False),
        ("--no-compression", False),
        ("--no_compression", False),
        ("--compression --lr 0.1", True),
        ("--compression an4", True),
        ("--no-compression an4", False),
    ],
)
def test_booleans(line: str, value: bool) -> None:
    assert config(line).compression.enabled is value


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("", ("tensorboard",)),
        ("--report-to wandb", ("wandb",)),
        ("--report-to wandb tensorboard text --lr 0.1", ("wandb", "tensorboard")),
        ("text --report_to=wandb,trackio", ("wandb", "trackio")),
        ("--report-to none text", ()),
        ("--report-to tensorboard wandb --no-tensorboard", ("wandb",)),
    ],
)
def test_several_names(line: str, names: tuple[str, ...]) -> None:
    found = config(line)
    assert found.run.reporters == names
    assert found.run.recipe == ("text" if "text" in line.split() else "spoken")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train --report-to --lr 0.1", "--report-to: expected one argument"),
        ("train --report-to mlflow", "'mlflow', but must be some of tensorboard, wandb, trackio"),
        ("train --report-to none wandb", "--report-to is none wandb: none goes with no other"),
        ("train --detail-every -1", "--detail-every is -1, but must be at least 0"),
        ("train --batchsize 8", "did you mean --batch-size?"),
        ("train --max-epoch 8", "did you mean --max-epochs?"),
        ("train --max-epochs many", "--max-epochs: expected a whole number, not 'many'"),
        ("train --max-epochs", "--max-epochs: expected one argument"),
        ("train --lr fast", "expected a number"),
        ("train --augment=perhaps", "expected true or false"),
        ("train --no-augment=1", "takes no value"),
        ("train --nworkers 0", "--nworkers is 0, but must be at least 1"),
        ("train --nworkers 100000", "at most 256 are started on one machine"),
        ("train text --heads 3", "--width 128 must be a multiple of --heads 3: change one"),
        ("train --run-dir /dev/null", "/dev/null is not a folder; choose another name"),
        ("train --run-dir /dev/null/run", "/dev/null is not a folder; choose another name"),
        ("train --resume nowhere", "--resume nowhere: no run with a checkpoint is there"),
        ("train --dataset nope", "must be one of an4, spoken, manifest"),
        ("train --lr nan", "--lr: expected a number, not 'nan'"),
        (
            "train --sigma-scale nan --compressor topka",
            "--sigma-scale: expected a number, not 'nan'",
        ),
        ("train --density=-inf --no-compression", "--density: expected a number, not '-inf'"),
        ("train nope", "unknown recipe 'nope'"),
        ("train an4 --recipe spoken", "two recipes"),
        ("train --config nowhere.toml", "nowhere.toml: No such file"),
        ("train an4 spoken", "unrecognized arguments: spoken"),
        ("trian", "did you mean train?"),
        ("data", "required: CORPUS"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_mistakes_are_one_line(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("oktopk: error: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize = 8", "unknown key batchsize; did you mean batch_size?"),
        ('batch_size = "8"', "batch_size is '8', but must be a whole number"),
        ("batch_size = true", "batch_size is True, but must be a whole number"),
        ("augment = 1", "augment is 1, but must be true or false"),
        ("lr = [1]", "lr is [1], but must be a number"),
        ("[train]\nlr = 1", "unknown section [train]; there are run, workload, optimizer"),
        ("[run]\nlr = 1", "unknown key lr in [run]"),
        ("[run.optimizer]\nlr = 1", "unknown key optimizer in [run]"),
        ("lr 1", "is not TOML"),
        ("lr = -1", "--lr is -1.0, but must be above 0"),
        (f"lr = {10**400}", "--lr is inf, but must be a finite number"),
        (f"max_epochs = {10**400}", "but must be at most 1000000000000000"),
    ],
)
def test_mistakes_in_toml(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"), max_codepoint=0x7E), max_size=12)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any that holds together, of a recipe or none."""
    number = st.floats(0.001, 0.9, allow_nan=False)
    whole = st.integers(1, 1000)
    name = draw(st.sampled_from(["", *RECIPES]))
    values: dict[str, Any] = {
        each.name: draw({bool: st.booleans(), int: whole, float: number}[each.kind])
        for section in sections(workload_for({"recipe": name})).values()
        for each in section.options().values()
        if each.kind is not str and draw(st.booleans())
    }
    for path in ("data_dir", "run_dir", "pretrain"):
        if draw(st.booleans()):
            values[path] = draw(_TEXT)
    values.update(optimizer="sgd", compressor=draw(st.sampled_from(["oktopk", "topka", "dense"])))
    values["anneal"], values["capacity"] = 1 + draw(number), 1 + draw(number)
    if name == "text":  # its heads share the width
        values["heads"] = draw(st.integers(1, 8))
        values["width"] = values["heads"] * draw(whole)
    return recipe(name, **values) if name else Config.of(**values)


@given(configs())
@example(Config.of(pretrain="--"))
def test_a_config_survives_the_command_line(wanted: Config) -> None:
    line = [f"{flag(name)}={value}" for name, value in wanted.as_dict().items()]
    assert config(line) == wanted


@given(configs())
def test_a_config_survives_toml(tmp_path_factory: pytest.TempPathFactory, wanted: Config) -> None:
    file = tmp_path_factory.getbasetemp() / "config.toml"
    file.write_text(_toml(wanted))
    assert config(["--config", str(file)]) == wanted


def test_list_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("train", "recipes", "data"))


def test_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert main(["recipes"]) == 2
    error = capsys.readouterr().err
    assert "rich" in error
    assert "pip install 'oktopk[train]'" in error
    assert error.count("\n") == 1


def test_help_does_without_torch() -> None:
    program = """
import sys
from oktopk.cli import main
for command in ("", "train", "report", "lab", "bench", "data", "data an4"):
    try:
        main([*command.split(), "--help"])
    except SystemExit:
        pass
print(*sorted({"torch", "numba", "numpy"} & {*sys.modules}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("usage: oktopk") == 7
    assert done.stderr == "\n"


def test_names_of_the_package_are_there_when_they_are_used() -> None:
    assert {*oktopk.__all__} <= {*dir(oktopk)}
    for name in dir(oktopk):  # its modules, too
        assert getattr(oktopk, name) is not None or name == "__doc__"
    with pytest.raises(AttributeError, match="has no attribute 'attack'"):
        _ = oktopk.attack  # type: ignore[attr-defined]


def test_output_that_nobody_reads() -> None:
    program = "import sys; from oktopk.cli import main; sys.exit(main(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_streams_that_are_closed() -> None:
    for command, code, errors in (
        ("--help >&-", 0, ""),
        ("recipes >&-", 0, ""),
        ("nope >&-", 2, "oktopk: error: unknown command nope; `oktopk --help` lists them\n"),
        ("nope 2>&- >&-", 2, ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {command}', "sh", sys.executable, "-m", "oktopk"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, "", errors), command


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UserError("a\nb\x1b[31m \udcff"), r"a\nb\x1b[31m \xff"),
        (OSError(28, "No space left on device", "a\nb"), r"a\nb: No space left on device"),
        (MemoryError(), "memory ran out: use a smaller model"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "(2.00 GiB could not"),
        (FileNotFoundError(2, "No such file", "ours"), ""),
        (ValueError("ours"), ""),
        (ImportError("ours", name="oktopk.train.nothing"), ""),
    ],
)
def test_which_errors_are_the_users(error: Exception, says: str) -> None:
    shown = mistake(error)
    assert shown.isprintable()
    assert says in shown
    assert bool(shown) == bool(says)


def test_names_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are shown, on either stream."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.raw").write_bytes(b"\0\1" * 8000)
    old = tmp_path / "old.csv"
    old.write_bytes(b"path,transcript,seconds\na.raw,YES,1\nn\xff.raw,NO,1\n")
    assert main(["data", "manifest", str(old), "--data-dir", str(folder)]) == 1
    assert r"n\xff.raw: not found" in capsys.readouterr().out
    moved = folder / "new.csv"
    arguments = ["--data-dir", str(folder), "--output", str(moved)]
    assert main(["data", "manifest", str(old), *arguments]) == 0
    assert r"caf\xe9" in capsys.readouterr().out
    assert main(["train", "--config", str(folder / "a\nb.toml")]) == 2
    error = capsys.readouterr().err
    assert r"caf\xe9/a\nb.toml: No such file" in error
    assert error.count("\n") == 1


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SBATCH = {
    "SLURM_JOB_ID": "30001",
    "SLURM_JOB_NODELIST": "gpu[03-04],node7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "mpirun"),
        (HYDRA, "mpirun"),
        (SRUN, "srun"),
        # The innermost counts: srun may start torchrun, or the daemons of mpirun.
        ({**SRUN, **OPEN_MPI, "SLURM_PROCID": "1"}, "mpirun"),
        ({**SRUN, **HYDRA, "SLURM_PROCID": "1"}, "mpirun"),
        ({**SRUN, **TORCHRUN, "SLURM_PROCID": "1"}, "torchrun"),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, "srun"),  # srun --mpi=pmi2
    ],
)
def test_place(environ: dict[str, str], launcher: str) -> None:
    assert place(environ) == Place(3, 4, 1, 2, launcher)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SBATCH,
        {**SBATCH, "SLURM_STEP_ID": "4294967291"},  # the batch script is a step of its own
        {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "1"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "1"},
    ],
)
def test_nobody_launched(environ: dict[str, str]) -> None:
    assert place(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        *({key: TORCHRUN[key] for key in TORCHRUN if key != gone} for gone in TORCHRUN),
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "RANK": "-1"},
        {**TORCHRUN, "RANK": ""},
        {**TORCHRUN, "LOCAL_RANK": "2"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "5"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "3"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"},
        {key: SRUN[key] for key in SRUN if key != "SLURM_STEP_NUM_TASKS"},
    ],
)
def test_inconsistent_launchers(environ: dict[str, str]) -> None:
    with pytest.raises(UserError):
        place(environ)


def test_where_workers_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = Place(3, 4, 1, 2, "srun"), Place(1, 2, 1, 2, "mpirun")
    assert address(far, SRUN) == ("gpu03", str(20000 + 30001 % 20000))
    assert address(far, {**SRUN, "MASTER_PORT": "5"}) == ("gpu03", "5")
    assert address(near, {"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == ("a", "5")
    assert address(near, {}) is None
    with pytest.raises(UserError, match="mpirun -x MASTER_ADDR="):
        address(Place(3, 4, 1, 2, "mpirun"), OPEN_MPI)
    for nodes, first in {"n1": "n1", "n[1-4]": "n1", "r[2,4]n[07-9],x": "r2n07"}.items():
        assert first_node(nodes) == first

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jobs = [
        {"PMIX_NAMESPACE": "1", "PMIX_SERVER_URI2": "a:1"},
        {"PMIX_NAMESPACE": "1", "PMIX_SERVER_URI2": "a:2"},
        {},
    ]
    files = [meeting_file(near, job) for job in jobs]
    assert len(set(files)) == 3
    assert files == [meeting_file(near, job) for job in jobs]
    assert files[0].parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["slurm.sh", "pbs.sh"])
def test_batch_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", CLUSTER / name], check=True, timeout=30)
    text = (CLUSTER / name).read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if " oktopk train " in f" {line}")
    arguments = shlex.split(command.partition("oktopk train ")[2].replace('"$@"', ""))
    assert config(arguments).run.recipe == "lstman4"


def _toml(config: Config) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(value, bool):
            return str(value).lower()
        assert math.isfinite(value)
        return repr(value)

    return "".join(f"{name} = {written(value)}\n" for name, value in config.as_dict().items())
