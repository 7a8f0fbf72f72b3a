"""Packages that not everybody needs. They are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import UserError


def need(module: str, extra: str = "train") -> Any:
    """The module, or one line that says how to get it.

    An OSError means that a package lacks the C library that it wraps.

    Args:
        extra: of oktopk, the one that has the package.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        install = f"pip install 'oktopk[{extra}]'"
        raise UserError(f"this needs the package {module}: {install} ({error})") from None
