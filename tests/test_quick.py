"""The list of quick tests names every test module, and only tests that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import quick

MODULES = {file.stem: file for file in Path(__file__).parent.glob("test_*.py")}


def test_every_module_is_quick_or_left_out() -> None:
    assert not quick.QUICK.keys() & quick.LEFT_OUT.keys()
    assert quick.QUICK.keys() | quick.LEFT_OUT.keys() == MODULES.keys()


@pytest.mark.parametrize("module", quick.QUICK)
def test_every_pattern_has_a_test(module: str) -> None:
    names = re.findall(r"^def (test_\w+)", MODULES[module].read_text(), re.MULTILINE)
    for pattern in quick.QUICK[module].split():
        function = pattern.partition("[")[0]
        assert any(fnmatchcase(name, function) for name in names), pattern
