"""The version that the package tells of itself."""

from __future__ import annotations

import re
from pathlib import Path

import oktopk
from oktopk.common.version import version_of


def test_the_version_is_that_of_the_project() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert found is not None
    assert oktopk.__version__ == found[1]


def test_what_is_not_installed_has_no_version() -> None:
    assert version_of("a-package-that-nobody-has") == "unknown"
