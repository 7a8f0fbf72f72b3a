"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str:
    """The version, or "unknown" without an installation, as when oktopk runs from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
