"""Mistakes that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that a user can mend; shown as one line, without a traceback."""
