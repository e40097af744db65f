"""Install the example of a plugin backend, ``examples/mtrain-sharded``, into a folder of its own, as a user would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "mtrain-sharded"


def install(folder: Path) -> Path:
    """Install the distribution from its files alone, nothing is downloaded; return the folder for ``sys.path``."""
    source = shutil.copytree(EXAMPLE, folder / "source")  # building leaves files beside the source
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    process = subprocess.run(
        [*argv, "--target", str(folder / "site"), str(source)], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return folder / "site"


def use(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and the processes that it starts find the distribution, until the test ends."""
    former = os.environ.get("PYTHONPATH")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), str(ROOT), former])))
