"""Every check of the kit as a test: ``pytest --pyargs mtrain.testing --backend NAME [--ranks 2] [--backend-options KEY=VALUE]``."""

import json
import subprocess
import sys
from typing import Any

import pytest

from mtrain.testing.catalogue import CHECKS


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``mtrain plugins test`` writes, by id of the check; run once."""
    name = request.config.getoption("mtrain_backend", None)
    if name is None:
        pytest.skip("name a backend: pytest --pyargs mtrain.testing --backend NAME")
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
    done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in (0, 1):
        pytest.fail(done.stderr, pytrace=False)
    print(done.stdout)
    found = json.loads((folder / "found.json").read_text())
    return {check["id"]: check for check in found["checks"]}


@pytest.mark.parametrize("check", [check.id for check in CHECKS])
def test_the_backend_keeps_the_promise(conformance: dict[str, Any], check: str) -> None:
    """The claim of one check."""
    found = conformance[check]
    broken = [
        f"{m['what']}: {m['value']}, bound {m['bound']} ({m['detail']})" for m in found["measures"] if not m["ok"]
    ]
    told = "\n".join([found["claim"], found["error"], found["reason"], *broken, f"look at: {found['look']}"])
    assert found["verdict"] == "passed", told
