"""The cache, for corpora without a folder of their own; and paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError


def cache_dir() -> Path:
    """`$OKTOPK_CACHE`, or `oktopk` in the user's cache folder. It may not exist yet."""
    own = os.environ.get("OKTOPK_CACHE")
    common = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = expanded(own or os.path.join(common, "oktopk"))
    try:
        str(folder).encode()
    except UnicodeEncodeError:  # torch could not write there
        raise UserError(f"the cache {folder} is not UTF-8: set OKTOPK_CACHE to another") from None
    return folder


def expanded(path: str) -> Path:
    """A path as the user wrote it, with `~` replaced by a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: there is no such home; write the whole path") from None
