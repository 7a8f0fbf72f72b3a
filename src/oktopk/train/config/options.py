"""The flags of `oktopk train`, made from the sections of `Config` and of all workloads.

A value comes from the first of these that has it: the command line, the TOML file, the recipe, the
defaults of the sections.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.cache import expanded
from ...common.errors import UserError
from ...common.flags import did_you_mean
from ...common.sections import Option, Section, flag
from ...common.typed import WORDS, from_text, from_toml
from ...common.values import parse_toml, read
from ...workloads import RECIPES, WORKLOADS, workload_for
from .config import Config, sections
from .recipes import DEFAULT, recipe

DESCRIPTION = f"""Train with sparse allreduce. Starts its workers on this machine, unless torchrun,
mpirun or srun has started them already.

A value comes from the command line, else from the TOML file of --config, else from the recipe, else
it is the default shown here. Without a recipe, {DEFAULT} is used, or the recipe that fits the given
dataset and model best. Flags may be spelled with underscores. Booleans are given as --compression,
--compression false, or --no-compression.
"""
_EXAMPLES = """examples:
  oktopk train                                 a few minutes, no download
  oktopk train text                            the same for a language model
  oktopk train text --data-dir book.txt        learn from a text of your own
  oktopk train an4 --nworkers 4 --density 0.01
  oktopk train an4 --resume auto               go on with the latest run
  oktopk train --config runs/best/config.toml --seed 2
  oktopk train --dnn lstman4 --dataset an4 --data-dir corpora --nworkers 2 --compressor oktopk
  torchrun --standalone --nproc-per-node 4 -m oktopk train lstman4
  mpirun -n 4 oktopk train lstman4
  srun --ntasks 8 oktopk train lstman4
"""
_METAVARS = {bool: "[BOOL]", int: "N", float: "X", str: "NAME"}


def options(section: str = "") -> dict[str, list[tuple[type[Section], Option]]]:
    """Options by name, with the sections that have them: several workloads may have one.

    Args:
        section: as `Config` names it; by default all.
    """
    names = [section] if section else list(sections(WORKLOADS[0]))
    owners = dict.fromkeys(sections(each)[name] for name in names for each in WORKLOADS)
    found: dict[str, list[tuple[type[Section], Option]]] = {}
    for owner in owners:
        for name, each in owner.options().items():
            found.setdefault(name, []).append((owner, each))
    return found


def hints(section: str = "") -> dict[str, Any]:
    """The type of each option, of one section or of all."""
    return {name: owned[0][1].hint for name, owned in options(section).items()}


# argparse, since none of the libraries that make flags from dataclasses has all of these: flags
# with underscores, `--compression True`, `--no-x`, did-you-mean, recipes and shared flags.
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each option. Those that are not given leave nothing behind."""
    parser.usage = "oktopk train [RECIPE] [--config FILE] [--FLAG VALUE ...]"
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "recipe_given",
        nargs="?",
        metavar="RECIPE",
        help=f"{', '.join(RECIPES)}; see `oktopk recipes`",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, owned in options().items():
        title = _title(owned)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        option = owned[0][1]
        groups[title].add_argument(
            flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            type=_reader(option),
            metavar="PATH" if option.path else _METAVARS[option.kind],
            help=_help(owned).replace("%", "%%"),
        )
        if name == "recipe":
            groups[title].add_argument(
                "--config", metavar="FILE", help="TOML file with any of the values below"
            )


def _title(owned: Sequence[tuple[type[Section], Option]]) -> str:
    owner = owned[0][0]
    if len(owned) > 1:
        return "What is trained"
    for workload in WORKLOADS:
        if workload is owner:
            return f"{owner.title} (--dataset {', '.join(workload.datasets())})"
    return owner.title


def _help(owned: Sequence[tuple[type[Section], Option]]) -> str:
    """Help and default; of each workload, if several have the option."""
    texts = []
    for owner, option in owned:
        text = option.help
        if option.default not in ("", None):
            shown = str(option.default).lower() if option.kind is bool else option.default
            text = f"{text} (default: {shown})"
        texts.append(text if len(owned) == 1 else f"{owner.title}: {text}")
    return " ".join(texts)


def _reader(option: Option) -> Any:
    """Text to a value; argparse shows the message of ArgumentTypeError."""

    def read_flag(text: str) -> Any:
        try:
            return from_text(option.hint, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_flag


def spell(arguments: Sequence[str]) -> list[str]:
    """Arguments as argparse wants them: dashes for underscores, and a value for each boolean.

    `--compression` may be followed by a value or by something else, which argparse cannot tell
    apart; here it becomes `--compression=true`, and `--no-compression` becomes
    `--compression=false`. `--report-to` takes all choices that follow it.
    """
    kinds = {flag(name): owned[0][1].kind for name, owned in options().items()}
    several = {
        flag(name): owned[0][1].choices for name, owned in options().items() if owned[0][1].several
    }
    other = ("--config", "--help")
    negations = {f"--no-{name[2:]}": name for name, kind in kinds.items() if kind is bool}
    spelled, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            spelled.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in negations:
            if equals:
                raise UserError(f"{name} takes no value: use {negations[name]}={value}")
            spelled.append(f"{negations[name]}=false")
        elif name not in kinds and name not in other:
            raise UserError(f"unknown flag {name}{did_you_mean(name, [*kinds, *negations])}")
        elif kinds.get(name) is bool and not equals:
            is_value = bool(rest) and rest[0].lower() in WORDS
            spelled.append(f"{name}={rest.pop(0) if is_value else 'true'}")
        elif name in several and not equals and rest and not rest[0].startswith("--"):
            taken = [rest.pop(0)]
            while rest and rest[0] in several[name]:
                taken.append(rest.pop(0))
            spelled.append(f"{name}={' '.join(taken)}")
        else:
            spelled.append(name + equals + value)
    return spelled


def build(arguments: argparse.Namespace) -> tuple[Config, frozenset[str]]:
    """The configuration, and the names of the options that the user gave a value."""
    known = options()
    # Before Python 3.13, argparse makes [] of the value `--`.
    given_flags = {name: "--" if value == [] else value for name, value in vars(arguments).items()}
    flags = {name: value for name, value in given_flags.items() if name in known}
    if (positional := arguments.recipe_given) is not None:
        if flags.get("recipe", positional) != positional:
            raise UserError(f"two recipes, {positional} and {flags['recipe']}: which one is it?")
        flags["recipe"] = positional
    file = read_toml(arguments.config) if arguments.config else {}
    given = {**file, **flags}
    given = {**_of_resumed_run(given), **given}
    name = given.pop("recipe") if "recipe" in given else _recipe_for(given)
    config = recipe(name, **given) if name else Config.of(**given)
    # A run's own config.toml repeats the recipe's values; the user did not ask for those.
    of_recipe = RECIPES[name].values if name else {}
    wished = {name for name in file if name not in of_recipe or file[name] != of_recipe[name]}
    return config, frozenset(wished | set(flags))


def _of_resumed_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a run began with, if it is to go on."""
    folder = given.get("resume", "")
    if folder == "auto":
        from ..folders import latest_run  # needs torch

        name = given["recipe"] if "recipe" in given else _recipe_for(given)
        folder = given.get("run_dir", "") or latest_run(name) or ""
    path = expanded(str(folder)) / "config.toml"
    values = read_toml(str(path)) if folder and os.path.exists(path) else {}
    try:
        workload_for({**values, **given})
    except UserError as error:
        raise UserError(f"--resume {folder}: {error}" if values else str(error)) from None
    return values


def _recipe_for(given: Mapping[str, Any]) -> str:
    """The recipe of users who name none."""
    return workload_for(given).default_recipe(given)


def read_toml(path: str) -> dict[str, Any]:
    """The values in a file, of the right types. They may stand in sections, named as `Config`'s."""
    try:
        values = parse_toml(read(Path(path)))
    except ImportError:
        raise UserError("--config needs, before Python 3.11: pip install tomli") from None
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's errors, and Unicode's
        raise UserError(f"--config {path} is not TOML: {error}") from None
    try:
        return _typed(values)
    except ValueError as error:
        raise UserError(f"--config {path}: {error}") from None


def _typed(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    known, found = hints(section), dict[str, Any]()
    for key, value in values.items():
        key = key.replace("-", "_")
        if isinstance(value, dict) and not section:
            if key not in (names := sections(WORKLOADS[0])):
                raise ValueError(f"unknown section [{key}]; there are {', '.join(names)}")
            found |= _typed(value, key)
        elif key not in known:
            where = f" in [{section}]" if section else ""
            raise ValueError(f"unknown key {key}{where}{did_you_mean(key, known)}")
        else:
            try:
                found[key] = from_toml(known[key], value)
            except ValueError as error:
                raise ValueError(f"{key} is {error}") from None
    return found
