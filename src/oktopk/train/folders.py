"""Where runs are kept: a new folder, the latest one, or the one to go on with."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import MANIFEST
from ..common.cache import expanded
from ..common.errors import UserError
from .config.config import Run

CHECKPOINT = "checkpoint"


def choose_folder(run: Run, rank: int = 0) -> tuple[Path, bool]:
    """A run's folder, and whether to go on with the run in it. Rank 0 chooses for all."""
    if rank:
        return Path(), False
    folder, resumed = find_folder(run)
    return folder or new_run_folder(run.recipe), resumed


def find_folder(run: Run) -> tuple[Path | None, bool]:
    """The folder that a user wants, None for a new one; and whether to go on with the run in it."""
    given = expanded(run.run_dir) if run.run_dir else None
    for path in (given, *given.parents) if given else ():
        if os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"--run-dir {given}: {path} is not a folder; choose another name")
    if run.resume == "auto":
        found = given if given and _has_checkpoint(given) else None
        if not given:
            found = latest_run(run.recipe)
        if found:
            return found, True
    elif run.resume:
        folder = expanded(run.resume)
        if given and given != folder:
            raise UserError(f"--resume {folder} goes on there: leave out --run-dir {given}")
        if not _has_checkpoint(folder):
            raise UserError(f"--resume {folder}: no run with a checkpoint is there")
        return folder, True
    if given and _has_checkpoint(given):
        raise UserError(
            f"--run-dir {given} holds a run already: --resume auto goes on with it, another "
            "folder begins a new one"
        )
    return given, False


def new_run_folder(recipe: str, base: Path = Path("runs")) -> Path:
    """Make runs/RECIPE-YYYYMMDD-HHMMSS, or that with -2, -3 ... if it is taken."""
    name = f"{recipe or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    with writing(base):
        base.mkdir(parents=True, exist_ok=True)
        attempt = 1
        while True:
            path = base / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir(exist_ok=False)
            except FileExistsError:
                attempt += 1
            else:
                return path


def latest_run(recipe: str, base: Path = Path("runs")) -> Path | None:
    """The newest folder of a recipe's runs that has a checkpoint."""
    pattern = re.compile(re.escape(recipe or "run") + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = []
    for name in _names(base):
        match, path = pattern.fullmatch(name), base / name
        if match and _has_checkpoint(path):
            found.append((match[1], int(match[2] or 1), path))
    return max(found)[2] if found else None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A folder that cannot be written to is a user's mistake."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; make room or get the right to "
            f"write there, or name another folder with --run-dir"
        ) from error


def _has_checkpoint(folder: Path) -> bool:
    return os.path.isfile(folder / CHECKPOINT / MANIFEST)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}") from None
