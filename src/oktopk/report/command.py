"""`oktopk report`: run folders as one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..common import files
from ..common.cache import expanded
from ..common.errors import UserError, printable
from . import RunSource, write_page

NAME = "report.html"

DESCRIPTION = """Show one run, or several side by side, as one HTML page.

The page holds everything that it shows: it opens from disk, needs no network, and can be sent by
mail. `oktopk train` writes one into the run folder at the end of every run. This command makes one
of several runs, of a run that is still going on, or of one that was stopped.
"""
_EPILOG = """examples:
  oktopk report runs/text-20261119-212706             writes report.html into that folder
  oktopk report runs/a runs/b                         both side by side, in ./report.html
  oktopk report dense=runs/a sparse=runs/b            the same, with names of your own
  oktopk report runs/text-* --output texts.html
It needs the packages of the extra `report`: pip install 'oktopk[report]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "oktopk report RUN... [--output FILE]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder, or NAME=FOLDER to give the run a name on the page",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the page; by default {NAME} in the folder of the run, or, for several runs, here",
    )


def run(arguments: argparse.Namespace) -> int:
    sources = [_source(text) for text in arguments.runs]
    output = _output(arguments.output, sources)
    try:
        write_page(output, sources)
    except OSError as error:
        raise UserError(
            f"cannot write {output}: {error.strerror or error}; --output names another file"
        ) from None
    print(printable(str(output)))
    return 0


def _source(text: str) -> RunSource:
    folder, label = expanded(text), ""
    if not folder.exists() and "=" in text:
        label, _, name = text.partition("=")
        folder = expanded(name)
    if (folder / "comparison.json").exists():
        raise UserError(
            f"{folder} holds a comparison: `oktopk compare` writes its page, {folder / NAME}; to "
            f"show some of its runs only, name them: {folder / 'cells'} has their folders"
        )
    return RunSource(folder, label)


def _output(given: str | None, sources: Sequence[RunSource]) -> Path:
    if given is None:
        return sources[0].folder / NAME if len(sources) == 1 else Path(NAME)
    path = expanded(given)
    if path.is_dir():
        raise UserError(f"--output {path} is a folder: name a file, such as {path / NAME}")
    files.check_ordinary(path, f"--output {path}")
    return path
