"""Where corpora are kept that have no folder of their own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$OKTOPK_CACHE`, or else `oktopk` in the user's cache folder. It may not exist yet."""
    own = os.environ.get("OKTOPK_CACHE")
    if own:
        return Path(own).expanduser()
    common = os.environ.get("XDG_CACHE_HOME")
    return (Path(common) if common else Path.home() / ".cache") / "oktopk"
