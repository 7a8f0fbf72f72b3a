"""The flags of `oktopk train`, made from `Config`: names, types and help are those of its fields.

A value comes from the first of these that has it: the command line, the TOML file, the recipe, the
defaults of `Config`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ...common.cache import expanded
from ...common.errors import UserError
from ...common.values import read
from .config import Config, flag
from .recipes import DEFAULT, RECIPES, recipe

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_METAVARS = {bool: "[BOOL]", int: "N", float: "X", str: "NAME"}
_PATHS = ("_dir", "_manifest", "pretrain", "resume")


@dataclass(frozen=True)
class Option:
    """A field of `Config`, as a user sees it."""

    name: str
    kind: type
    """bool, int, float or str."""
    default: Any
    help: str
    group: str
    """The comment above it and its neighbours, such as "What is trained"."""


def options() -> list[Option]:
    """All fields of `Config`, read from its source: Python keeps neither comments nor the
    docstrings of fields."""
    source = textwrap.dedent(inspect.getsource(Config))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    hints = get_type_hints(Config)
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    found, group, line = [], "Where it begins", 0
    for node, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        for comment in lines[line : node.lineno]:
            if match := re.fullmatch(r"\s+# (\w.*?)\.?", comment):
                group = match[1]
        line = node.lineno
        name = node.target.id
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        kinds = [kind for kind in get_args(hints[name]) or (hints[name],) if kind is not type(None)]
        found.append(Option(name, kinds[0], defaults[name], " ".join(text.split()), group))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field. Those that are not given leave nothing behind."""
    parser.add_argument(
        "recipe_given", nargs="?", metavar="RECIPE", help="the same as --recipe", default=None
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        text = option.help.replace("%", "%%")
        if option.default not in ("", None):
            shown = str(option.default).lower() if option.kind is bool else option.default
            text = f"{text} (default: {shown})"
        groups[option.group].add_argument(
            flag(option.name),
            dest=option.name,
            default=argparse.SUPPRESS,
            type=_reader(option.kind),
            metavar="PATH" if option.name.endswith(_PATHS) else _METAVARS[option.kind],
            help=text,
        )
        if option.name == "recipe":
            groups[option.group].add_argument(
                "--config", metavar="FILE", help="TOML file with any of the values below"
            )


def spell(arguments: Sequence[str]) -> list[str]:
    """Arguments as argparse wants them: dashes for underscores, and a value for each boolean.

    `--compression` may be followed by a value or by something else, which argparse cannot tell
    apart; here it becomes `--compression=true`, and `--no-compression` becomes
    `--compression=false`.
    """
    kinds = {flag(option.name): option.kind for option in options()}
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
            is_value = bool(rest) and rest[0].lower() in (*_TRUE, *_FALSE)
            spelled.append(f"{name}={rest.pop(0) if is_value else 'true'}")
        else:
            spelled.append(name + equals + value)
    return spelled


def build(arguments: argparse.Namespace) -> tuple[Config, frozenset[str]]:
    """The configuration, and the names of the fields that the user gave a value."""
    names = [option.name for option in options()]
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    if (positional := arguments.recipe_given) is not None:
        if flags.get("recipe", positional) != positional:
            raise UserError(f"two recipes, {positional} and {flags['recipe']}: which one is it?")
        flags["recipe"] = positional
    file = read_toml(arguments.config) if arguments.config else {}
    given = {**file, **flags}
    given = {**_of_resumed_run(given), **given}
    name = given.pop("recipe") if "recipe" in given else _recipe_for(given)
    config = recipe(name, **given) if name else Config(**given)
    # A run's own config.toml repeats what the recipe said; that was nobody's wish.
    of_recipe = RECIPES[name].values if name else {}
    wished = {name for name in file if name not in of_recipe or file[name] != of_recipe[name]}
    return config, frozenset(wished | set(flags))


def _of_resumed_run(given: dict[str, Any]) -> dict[str, Any]:
    """What a run that is to go on was begun with."""
    folder = given.get("resume", "")
    if folder == "auto":
        from ..run_folder import latest_run  # needs torch

        name = given.get("recipe") or _recipe_for(given)
        folder = given.get("run_dir", "") or latest_run(name) or ""
    path = expanded(str(folder)) / "config.toml"
    return read_toml(str(path)) if folder and os.path.exists(path) else {}


def _recipe_for(given: dict[str, Any]) -> str:
    """The recipe of those who name a model or a corpus instead, as the published trainer does."""
    if given.get("dnn") == "lstman4":
        return "lstman4"
    return "an4" if given.get("dataset") in ("an4", "manifest") else DEFAULT


def read_toml(path: str) -> dict[str, Any]:
    """The values in a file, of the right types."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise UserError("--config needs, before Python 3.11: pip install tomli") from None
    try:
        values: dict[str, Any] = toml.loads(read(Path(path)).decode())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's errors, and Unicode's
        raise UserError(f"--config {path} is not TOML: {error}") from None
    except RecursionError:
        raise UserError(f"--config {path} is nested too deeply: there are no lists in it") from None
    kinds = {option.name: option.kind for option in options()}
    for key in [key for key in values if key.replace("-", "_") != key]:
        values[key.replace("-", "_")] = values.pop(key)
    for key, value in values.items():
        if isinstance(value, dict):
            raise UserError(f"--config {path}: there are no sections: take [{key}] out")
        if key not in kinds:
            raise UserError(f"--config {path}: unknown key {key}{did_you_mean(key, kinds)}")
        if kinds[key] is float and type(value) is int:
            values[key] = float(value)
        elif type(value) is not kinds[key]:
            raise UserError(
                f"--config {path}: {key} is {value!r}, but must be {_KINDS[kinds[key]]}"
            )
    return values


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _reader:
    """Text to a value; argparse shows the message of ArgumentTypeError."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, text: str) -> Any:
        try:
            if self.kind is not bool:
                return self.kind(text)
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(
                f"expected {_KINDS[self.kind]}, not {text!r}"
            ) from None
