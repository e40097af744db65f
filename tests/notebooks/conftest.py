"""Fixtures of the tests that run kernels."""

import pytest


@pytest.fixture(autouse=True)
def _files_of_kernels(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of kernels, and IPython's profile, out of the developer's home."""
    home = tmp_path_factory.mktemp("jupyter")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(home / "ipython"))
