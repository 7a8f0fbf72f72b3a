"""The README's examples run as they stand, and documents outside the site have no dead links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import oktopk
from launch import Warm

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DDP, WRAPPER, TENSOR = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"]


@pytest.mark.parametrize(
    ("example", "expected"),
    [(DDP, "47.7 x fewer entries"), (WRAPPER, "48 x fewer entries"), (TENSOR, "bytes sent")],
    ids=["ddp", "wrapper", "tensor"],
)
def test_examples_of_the_readme(warm: Warm, tmp_path: Path, example: str, expected: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(example)
    # Both ranks print into one file, and their lines may be joined.
    assert warm.torchrun(script).count(expected) == 2


@pytest.mark.parametrize(
    ("example", "ratio"), [(WRAPPER, 48), (TENSOR, 50)], ids=["wrapper", "tensor"]
)
def test_without_init_process_group_one_rank_works_alone(
    warm: Warm, tmp_path: Path, example: str, ratio: int
) -> None:
    lines = example.splitlines(keepends=True)
    script = tmp_path / "example.py"
    script.write_text("".join(line for line in lines if "init_process_group" not in line))
    assert f"{ratio} x fewer entries" in warm.alone(script)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """`make docs` checks the links within docs/."""
    for link in re.findall(r"\]\(([^)]*)\)", (ROOT / page).read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    found = re.findall(r"^::: oktopk\.(\w+)$", pages, re.MULTILINE)
    assert sorted(found) == sorted({*oktopk.__all__} - {"__version__"})
