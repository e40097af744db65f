"""Options of ``pytest --pyargs mtrain_kit --backend NAME``: a pytest plugin, loaded before tests are collected."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--backend``, ``--ranks`` and ``--backend-options``."""
    group = parser.getgroup("mtrain", "conformance of mtrain's backends (pytest --pyargs mtrain_kit)")
    group.addoption("--backend", dest="mtrain_backend", help="name of the backend plugin to test")
    group.addoption("--ranks", dest="mtrain_ranks", type=int, help="ranks of its jobs")
    group.addoption(
        "--backend-options",
        dest="mtrain_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the backend",
    )
