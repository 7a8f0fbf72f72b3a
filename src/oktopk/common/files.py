"""Files that are replaced as a whole: whoever reads one finds the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .errors import UserError


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a new file to write; it takes the place of `path` at the end of the block.

    A failure inside the block leaves the old file as it was. Several processes may do this at the
    same time; the last one wins.

    Args:
        durable: wait until the content, and then the name, are on disk, so that this holds even
            when the machine stops.
    """
    part = _part(path)
    try:
        yield part
        if durable:
            sync(part)
        os.replace(part, path)
        if durable:
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write(path: Path, content: bytes) -> None:
    """Replace a file's content, durably."""
    with replacing(path, durable=True) as part:
        part.write_bytes(content)


def probe(path: Path) -> None:
    """OSError if `replacing` could not write the file."""
    part = _part(path)
    part.touch()
    part.unlink()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_ordinary(path: Path, name: str = "") -> None:
    """UserError if the path is a device or a pipe: replacing /dev/null would destroy it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{name or path} is not an ordinary file: name one that is, or a new one")
