"""Packages that only training needs. They are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import INSTALL, UserError


def need(module: str) -> Any:
    """The module, or one line that says how to get it.

    An OSError means that a package lacks the C library that it wraps.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UserError(f"this needs the package {module}: {INSTALL} ({error})") from None
