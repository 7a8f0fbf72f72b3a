"""The text to learn from, as a tensor of bytes: a file, a folder of files, or Python's library."""

from __future__ import annotations

import codecs
import logging
import os
import stat
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.format import byte_size, plural

log = logging.getLogger("oktopk")

LARGEST = 1 << 30
"""Bytes of text that are read at most: every worker keeps all of it in memory."""
_LARGEST_LIBRARY = 6_000_000
"""Bytes of Python's library that are read at most; Python 3.11 has 4.7 million."""
_PART = 1 << 20


def read_text(path: Path | None, quiet: bool = False) -> Tensor:
    """The bytes of a text, as uint8.

    Args:
        path: a file of UTF-8, or a folder of them; None takes the sources of Python's library.
        quiet: do not warn of files that are left out.
    """
    if path is None:
        return _as_tensor(_library(Path(sysconfig.get_path("stdlib"))))
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            return _as_tensor(_folder(path, quiet))
        if not stat.S_ISREG(kind):  # a pipe or a device may have no end
            raise UserError(f"--data-dir {path} is not a file: name a file or a folder of text")
        _check_size(path.stat().st_size, path)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--data-dir {error.filename or path}: {error.strerror or error}; name a file or a "
            "folder of text"
        ) from None
    if not content:
        raise UserError(f"--data-dir {path} is empty: name a file with text in it")
    if (bad := bad_byte(content)) is not None:
        raise UserError(
            f"--data-dir {path} is not UTF-8: byte {bad} is 0x{content[bad]:02x}; convert it, for "
            "example with `iconv -f latin1 -t utf-8`"
        )
    return _as_tensor([content])


def _library(folder: Path) -> list[bytes]:
    """The modules of Python's standard library, in the order of their names.

    Only those of the folder itself: packages would add tests and tables of characters. The module
    that describes this machine is left out, so that machines with the same Python read the same.
    """
    paths = [path for path in sorted(folder.glob("*.py")) if "_sysconfigdata" not in path.name]
    contents, size = [], 0
    for path in paths:
        content = path.read_bytes()
        if size + len(content) <= _LARGEST_LIBRARY and bad_byte(content) is None:
            contents.append(content)
            size += len(content)
    if not size:
        raise UserError(
            f"this Python has no sources of its library in {folder}: name a text of your own with "
            "--data-dir"
        )
    return contents


def _folder(folder: Path, quiet: bool) -> list[bytes]:
    """The UTF-8 files below a folder, in the order of their paths. Hidden ones are left out."""
    contents, left_out, size = [], [], 0
    for path in _files(folder):
        size += path.stat().st_size
        _check_size(size, folder)
        content = path.read_bytes()
        if bad_byte(content) is None:
            contents.append(content)
        else:
            left_out.append(path)
    if left_out and not quiet:
        log.warning(
            "%s of %s left out, because not UTF-8: %s%s",
            plural(len(left_out), "file"),
            folder,
            ", ".join(str(path.relative_to(folder)) for path in left_out[:3]),
            " ..." if len(left_out) > 3 else "",
        )
    if not any(contents):
        raise UserError(f"--data-dir {folder} has no text in UTF-8: put files of text there")
    return contents


def _files(folder: Path) -> list[Path]:
    found = []
    for base, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(base, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _refuse(error: OSError) -> None:
    raise error  # os.walk would leave out a folder that cannot be read


def bad_byte(content: bytes) -> int | None:
    """Where a content is not UTF-8, if so.

    It is decoded in parts, because a string may take four times the memory of its bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), _PART):
        pending = len(decoder.getstate()[0])  # of a character that began in the part before
        try:
            decoder.decode(content[start : start + _PART], final=start + _PART >= len(content))
        except UnicodeDecodeError as error:
            return start - pending + error.start
    return None


def _check_size(size: int, path: Path) -> None:
    if size > LARGEST:
        raise UserError(
            f"--data-dir {path} has more than {byte_size(LARGEST)}, the most that is read: name a "
            "smaller text, for example one made with `head -c 1G`"
        )


def _as_tensor(contents: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray().join(contents), dtype=torch.uint8)
