from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from launch import Warm
from ranks import Ranks

SIZES = (1, 2, 3, 4, 5, 8)

settings.register_profile("oktopk", deadline=None, max_examples=40)
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
def ranks() -> Iterator[Ranks]:
    """Eight processes for the whole test run."""
    pool = Ranks(SIZES)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs scripts without the seconds that importing torch takes."""
    with Warm("torch._dynamo", "heated", "oktopk.train.trainer") as forks:
        yield forks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if config.getoption("--exhaustive"):
            item.add_marker(pytest.mark.timeout(3600))
