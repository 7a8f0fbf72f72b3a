"""Packages that only training needs, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import UserError

INSTALL = "pip install 'oktopk[speech]'"


def need(module: str) -> Any:
    """The module, or one line that says how to get it.

    An OSError is a package without the C library that it wraps.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UserError(f"this needs the package {module}: {INSTALL} ({error})") from None
