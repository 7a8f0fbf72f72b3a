from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from launch import Warm
from quick import is_quick
from ranks import Ranks

SIZES = (1, 2, 3, 4, 5, 8)
IMPORTS = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "pytest",
    "heated",
    "oktopk.train.trainer",
)

settings.register_profile("oktopk", deadline=None, max_examples=40)
settings.register_profile("quick", deadline=None, max_examples=10)
settings.load_profile("oktopk")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the contract suite on every combination of its axes (some hours)",
    )


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """The fork server: processes that start without the seconds that importing torch takes."""
    with Warm(*IMPORTS) as forks:
        yield forks


@pytest.fixture(scope="session")
def ranks(warm: Warm) -> Iterator[Ranks]:
    """Eight processes for the whole test run."""
    pool = Ranks(warm, SIZES)
    yield pool
    pool.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item.path.stem, item.name):
            item.add_marker(pytest.mark.quick)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if config.getoption("--exhaustive"):
            item.add_marker(pytest.mark.timeout(3600))
