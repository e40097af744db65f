"""Run every check of the kit as a test: ``pytest --pyargs mtrain_kit --backend NAME [--ranks 2] [--backend-options
KEY=VALUE]``."""

import json
import subprocess
import sys
from typing import Any

import pytest

from mtrain_kit.catalogue import CHECKS


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run ``mtrain plugins test`` once and return its results by id of the check."""
    name = request.config.getoption("mtrain_backend", None)
    if name is None:
        pytest.skip("name a backend: pytest --pyargs mtrain_kit --backend NAME")
    folder = tmp_path_factory.mktemp("conformance")
    ranks = request.config.getoption("mtrain_ranks")
    options = [f"backend.options.{text}" for text in request.config.getoption("mtrain_options")]
    argv = [
        sys.executable,
        "-m",
        "mtrain",
        "plugins",
        "test",
        name,
        "--out",
        str(folder),
        "--json",
        str(folder / "found.json"),
    ]
    argv += [] if ranks is None else ["--ranks", str(ranks)]
    for option in options:
        argv += ["-o", option]
    process = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603
    if process.returncode not in (0, 1):
        pytest.fail(process.stderr, pytrace=False)
    print(process.stdout)
    results = json.loads((folder / "found.json").read_text())
    return {check["id"]: check for check in results["checks"]}


@pytest.mark.parametrize("check", [check.id for check in CHECKS])
def test_the_backend_keeps_the_promise(conformance: dict[str, Any], check: str) -> None:
    """Fail with the claim of the check, its measures and where to look."""
    result = conformance[check]
    violations = [
        f"{m['what']}: {m['value']}, bound {m['bound']} ({m['detail']})" for m in result["measures"] if not m["ok"]
    ]
    message = "\n".join([result["claim"], result["error"], result["reason"], *violations, f"look at: {result['look']}"])
    assert result["verdict"] == "passed", message
