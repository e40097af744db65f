"""Run tests in another order: ``pytest -p tests.shuffled --order-seed N``.

Files come in an order of their own, and so do the tests of each file; tests of one file stay together, since they share
fixtures that cost seconds. The order depends on the seed and the tests alone, so that all workers of xdist agree on it.
"""

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order-seed", type=int, required=True, help="the order in which files, and tests in them, are run"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chance = random.Random(config.getoption("--order-seed"))
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    groups = list(files.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_report_header(config: pytest.Config) -> str:
    return f"order of tests: seed {config.getoption('--order-seed')}"
