"""The command line: `oktopk train`, `recipes`, `data`, `lab`, `bench` and `plan`.

A mistake of the user is one line and exit code 2; an interruption is exit code 130. A command
imports its modules when it runs: then a missing extra stops only the commands that need it, and
help does not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .common.errors import USER_ERROR, UserError, mistake
from .common.flags import did_you_mean
from .common.version import version_of
from .train.launch.place import place


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
    from .train.launch.meeting import report

    report(message, here)


def _run(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in _COMMANDS:
        return _COMMANDS[command][0](rest)
    if command and not command.startswith("-"):
        close = did_you_mean(command, _COMMANDS)
        raise UserError(f"unknown command {command}{close or '; `oktopk --help` lists them'}")
    parser = _Parser("", "Communication-efficient training: sparse allreduce with error feedback.")
    parser.add_argument("--version", action="version", version=f"oktopk {version_of('oktopk')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def _train(arguments: list[str]) -> int:
    from .train.config import options

    parser = _Parser("train", options.DESCRIPTION)
    options.add_arguments(parser)
    config, explicit = options.build(parser.parse_args(options.spell(arguments)))
    from .train.launch.launch import run

    return run(config, explicit)


def _recipes(arguments: list[str]) -> int:
    _Parser("recipes", "List the recipes of `oktopk train`.").parse_args(arguments)
    from rich.console import Console
    from rich.table import Table

    from .workloads import RECIPES

    table = Table.grid(padding=(0, 3))
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.summary)
    Console().print(table)
    print("\n`oktopk train RECIPE` shows all values before it begins")
    return 0


def _data(arguments: list[str]) -> int:
    from .workloads import WORKLOADS

    parser = _Parser(
        "data", "Get corpora ready. Datasets that are not listed here need no command."
    )
    corpora = parser.add_subparsers(dest="corpus", metavar="CORPUS", required=True)
    for workload in WORKLOADS:
        workload.add_data_commands(corpora)
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


def _lab(arguments: list[str]) -> int:
    from .lab.network import command

    parser = _Parser("lab")
    parser.usage = (
        "oktopk lab [--hosts N] [--rate RATE] [--delay DELAY] [--FLAG VALUE ...] -- COMMAND"
    )
    command.add_arguments(parser)
    own, for_hosts = command.split(arguments)
    return command.run(parser.parse_args(own), for_hosts)


def _bench(arguments: list[str]) -> int:
    from .lab.bench import command

    parser = _Parser("bench")
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def _plan(arguments: list[str]) -> int:
    from .lab.plan import command

    parser = _Parser("plan")
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a model"),
    "recipes": (_recipes, "list the recipes of `oktopk train`"),
    "data": (_data, "get corpora ready"),
    "lab": (_lab, "run a command on hosts of an emulated network"),
    "bench": (_bench, "compare ways to average gradients"),
    "plan": (_plan, "predict a step on other hardware"),
}


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without repeating the usage."""

    def __init__(self, command: str = "", description: str = "", **options: Any) -> None:
        options = {"prog": f"oktopk {command}".rstrip(), **options}
        formatter = argparse.RawDescriptionHelpFormatter
        given = {"description": description, "formatter_class": formatter, "allow_abbrev": False}
        super().__init__(**{**given, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")
