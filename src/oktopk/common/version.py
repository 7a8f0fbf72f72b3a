"""Versions of packages, as they are installed."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str:
    """The version, or "unknown" where it is not installed: when oktopk is run from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
