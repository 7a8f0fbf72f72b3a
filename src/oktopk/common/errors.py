"""Mistakes that a user can fix."""

from __future__ import annotations

import errno

from . import host as room

USER_ERROR = 2
"""The exit code for them."""
INSTALL = "pip install 'oktopk[train]'"
"""Gets all packages that `oktopk train` needs."""

_OF_THE_SYSTEM = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EPIPE),
    errno.EFBIG,
}


class UserError(Exception):
    """A mistake that a user can fix. It is shown as one line, without a traceback.

    File names, and contents of damaged files, can hold any character, so the message is made
    printable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def mistake(error: BaseException) -> str:
    """The line to show if a user can fix the error; empty if it may be a fault of the library."""
    if isinstance(error, UserError):
        return str(error)
    if lack := room.shortage(error):
        return f"{lack}: use a smaller model, smaller batches, or fewer workers"
    if isinstance(error, ImportError):
        return _missing_package(error)
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output any more"
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        name = f"{error.filename}: " if error.filename else ""
        return printable(f"{name}{error.strerror}")
    return ""


def _missing_package(error: ImportError) -> str:
    """Says what to install; empty if one of our own modules is missing instead of a package."""
    name = (error.name or "").partition(".")[0]
    if not name or name == "oktopk":
        return ""
    return f"the package {name} is missing or broken ({error}): {INSTALL}"


def printable(text: str) -> str:
    """The text on one line, with escapes for characters that no terminal can show.

    A byte of a file name that is not UTF-8 becomes `\\xff`, a line break `\\n`.
    """
    return "".join(x if x.isprintable() else _escape(x) for x in text)


def _escape(character: str) -> str:
    byte = ord(character) - 0xDC00  # Python reads a byte that is not UTF-8 as U+DC00 plus its value
    if 0x80 <= byte <= 0xFF:
        return f"\\x{byte:02x}"
    return character.encode("unicode_escape").decode()
