"""Mistakes that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that a user can mend; shown as one line, without a traceback.

    Names of files and contents of damaged ones can hold any character, so the message is made
    printable.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text on one line, with escapes for what no terminal can show.

    A byte of a file name that is not UTF-8 becomes `\\xff`, a line break `\\n`.
    """
    return "".join(x if x.isprintable() else _escape(x) for x in text)


def _escape(character: str) -> str:
    byte = ord(character) - 0xDC00  # Python reads a byte that is not UTF-8 as U+DC00 plus its value
    if 0x80 <= byte <= 0xFF:
        return f"\\x{byte:02x}"
    return character.encode("unicode_escape").decode()
