"""The command line: `oktopk train`, `recipes`, `data`, `lab` and `bench`.

A mistake of the user is one line and exit code 2; an interruption 130. What a subcommand needs is
imported when it runs: extras are missed only where they are used, and help does not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .common.errors import USER_ERROR, UserError, mistake
from .common.version import version_of
from .train.config import options
from .train.config.recipes import DEFAULT, RECIPES
from .train.launch.place import place

_TRAIN = f"""Train with sparse allreduce. Starts its workers on this machine, unless torchrun,
mpirun or srun has started them already.

A value comes from the command line, else from the TOML file of --config, else from the recipe, else
it is the default shown here. Without a recipe, {DEFAULT} is used; but with --dnn lstman4 the recipe
lstman4, and with --dataset an4 the recipe an4. Flags may be spelled with underscores. Booleans are
given as --augment, --augment false, or --no-augment.
"""

_TRAIN_EXAMPLES = """examples:
  oktopk train                                 a few minutes, no download
  oktopk train an4 --nworkers 4 --density 0.01
  oktopk train an4 --resume auto               go on with the latest run
  oktopk train --config runs/best/config.toml --seed 2
  oktopk train --dnn lstman4 --dataset an4 --data-dir corpora --nworkers 2 --compressor oktopk
  torchrun --standalone --nproc-per-node 4 -m oktopk train lstman4
  mpirun -n 4 oktopk train lstman4
  srun --ntasks 8 oktopk train lstman4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files, as on stderr
    try:
        try:
            return _run(arguments)
        finally:
            _flush()
    except BrokenPipeError:  # as after `| head`
        return 1
    except KeyboardInterrupt:
        print("oktopk: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        message = mistake(error)
        if not message:
            raise
        _report(f"oktopk: error: {message}")
        return USER_ERROR


def _open_streams() -> None:
    """Streams that are closed, as by `>&-`, lead nowhere, in this process and in workers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):
                os.fstat(number)
                number = null  # another file has the number by now
            os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _report(message: str) -> None:
    """Print a line; of several workers that a launcher started, only one does."""
    try:
        here = place()
    except UserError:  # perhaps the very one to be reported
        here = None
    if here is None:
        print(message, file=sys.stderr)
        return
    from .train.launch import launch

    launch.report(message, here)


def _run(arguments: list[str]) -> int:
    parser = _Parser(
        prog="oktopk",
        description="Communication-efficient training: sparse allreduce with error feedback.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oktopk {version_of('oktopk')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a model",
        description=_TRAIN,
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="oktopk train [RECIPE] [--config FILE] [--FLAG VALUE ...]",
        allow_abbrev=False,
    )
    commands.add_parser("recipes", help="list the recipes of `oktopk train`", allow_abbrev=False)
    data = commands.add_parser("data", help="get speech corpora ready", allow_abbrev=False)
    lab = commands.add_parser(
        "lab",
        help="run a command on hosts of an emulated network",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="oktopk lab [--hosts N] [--rate RATE] [--delay DELAY] [--FLAG VALUE ...] -- COMMAND",
        allow_abbrev=False,
    )
    bench = commands.add_parser(
        "bench", help="compare ways to average gradients", allow_abbrev=False
    )

    command = arguments[0] if arguments else ""
    if command == "train":
        options.add_arguments(train)
        arguments = ["train", *options.spell(arguments[1:])]
    elif command == "data":
        from .workloads.speech import command as data_command

        data_command.add_arguments(data)
    elif command == "lab":
        from .lab.network import command as lab_command

        lab_command.add_arguments(lab)
        arguments, for_hosts = lab_command.split(arguments)
    elif command == "bench":
        from .lab.bench import command as bench_command

        bench_command.add_arguments(bench)
    elif command and not command.startswith("-") and command not in commands.choices:
        close = options.did_you_mean(command, commands.choices)
        raise UserError(f"unknown command {command}{close or '; `oktopk --help` lists them'}")
    parsed = parser.parse_args(arguments)
    if parsed.command == "train":
        from .train.launch import launch

        config, explicit = options.build(parsed)
        return launch.run(config, explicit)
    if parsed.command == "recipes":
        return _list_recipes()
    if parsed.command == "data":
        return data_command.run(parsed)
    if parsed.command == "lab":
        return lab_command.run(parsed, for_hosts)
    if parsed.command == "bench":
        return bench_command.run(parsed)
    parser.print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage. Subcommands inherit it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _list_recipes() -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.summary)
    Console().print(table)
    print("\n`oktopk train RECIPE` shows all values before it begins")
    return 0
