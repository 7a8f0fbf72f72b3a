"""Files of results that say what they are: JSON with a format and a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.values import parse, read


def read_kept(path: Path, name: str, format: str, version: int) -> dict[str, Any]:
    """The content of a file. UserError if it is another one.

    Args:
        name: of the file, in messages.
    """
    try:
        kept = parse(read(path).decode())
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    if not isinstance(kept, dict) or kept.get("format") != format:
        raise UserError(f"{name} does not hold results of {format}")
    if kept.get("version") != version:
        raise UserError(
            f"{name} has version {kept.get('version')}, but must have {version}: it was written by "
            "another version of oktopk; name another file"
        )
    return kept
