"""The outside plugin of the docs: a distribution of its own, installed, found by name, and put to the conformance kit."""

import ast
import json
from pathlib import Path

import pytest
from tests.testing.conftest import PATH, ROOT, mtrain

from tests.script.runs import SCRIPTS, largest_difference, weights
from tests.sharded_example import EXAMPLE, install
from tests.starts import starts_processes


@pytest.fixture(scope="module")
@starts_processes
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the distribution was installed, from its files alone: nothing is downloaded."""
    return install(tmp_path_factory.mktemp("sharded"))


def path(installed: Path) -> str:
    return f"{installed}:{PATH}"


def test_its_name_is_listed_once_it_is_installed(installed: Path, tmp_path: Path) -> None:
    process = mtrain("plugins", "list", "backends", "--json", cwd=tmp_path, PYTHONPATH=path(installed))
    actual = {entry["name"]: entry for entry in json.loads(process.stdout)}
    assert (actual["sharded"]["distribution"], actual["sharded"]["state"]) == ("mtrain-sharded", "ready")
    assert actual["sharded"]["summary"].startswith("An example of a backend"), "its own"


def test_it_uses_nothing_of_mtrain_but_what_the_docs_declare_public() -> None:
    nodes = [node for file in EXAMPLE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    used = {
        f"mtrain.core.{alias.name}" if node.module == "mtrain.core" else str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mtrain.")
        for alias in node.names
    }
    public = (ROOT / "docs" / "writing-a-backend.md").read_text()
    assert used
    assert [name for name in used if "._" in name or f"`{name}`" not in public] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_keeps_every_promise(installed: Path, tmp_path: Path, ranks: int) -> None:
    process = mtrain("plugins", "test", "sharded", "--ranks", str(ranks), cwd=tmp_path, PYTHONPATH=path(installed))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_trains_to_the_weights_of_ddp(installed: Path, tmp_path: Path, ranks: int) -> None:
    """Accumulation, weights used never or now and then; in float64."""
    script = [str(SCRIPTS / "train_torch.py"), "--precision", "fp64", "--dropout", "0", "--epochs", "1"]
    quiet = ["-o", "report.plots=false", "report.tensorboard=false"]
    for backend in ("ddp", "sharded"):
        argv = ["run", *quiet, "--name", backend, "--backend", backend, "--nproc-per-node", str(ranks)]
        process = mtrain(*argv, *script, cwd=tmp_path, PYTHONPATH=path(installed))
        assert process.returncode == 0, process.stdout + process.stderr
    difference = largest_difference(weights(tmp_path, "sharded"), weights(tmp_path, "ddp"))
    print(f"sharded on {ranks} ranks: largest difference to ddp {difference:.1e}")
    assert difference <= 1e-12
