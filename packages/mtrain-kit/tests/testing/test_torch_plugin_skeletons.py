"""``mtrain plugins new``: what it writes installs, is found, and passes its own checks; it overwrites nothing."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.testing.conftest import PATH, ROOT, mtrain

from mtrain_kit.skeleton import KINDS, _content


def installed(folder: Path, word: str, name: str) -> Path:
    """Write a skeleton in ``folder`` and install it from its files alone; return the folder to import it from."""
    process = mtrain("plugins", "new", word, name, cwd=folder)
    assert process.returncode == 0, process.stderr
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = folder / f"mtrain-{name.replace('_', '-')}"
    for file in source.rglob("*.py"):
        ast.parse(file.read_text())
    process = subprocess.run(
        [*argv, "--target", str(folder / "site"), str(source)], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return folder / "site"


@pytest.mark.job
@pytest.mark.parametrize(
    "word", [word if word == "model" else pytest.param(word, marks=pytest.mark.slow) for word in KINDS]
)
def test_a_skeleton_installs_and_is_found_with_its_own_summary(word: str, tmp_path: Path) -> None:
    site = installed(tmp_path, word, "my_thing")
    listed = mtrain("plugins", "list", KINDS[word], "--json", cwd=tmp_path, PYTHONPATH=f"{site}:{PATH}")
    entry = {entry["name"]: entry for entry in json.loads(listed.stdout)}["my_thing"]
    assert (entry["distribution"], entry["state"]) == ("mtrain-my-thing", "ready")
    assert entry["summary"].endswith("my_thing.")


@pytest.mark.slow
@pytest.mark.parametrize("word", KINDS)
def test_a_skeleton_passes_every_check_at_once(word: str, tmp_path: Path) -> None:
    site = installed(tmp_path, word, "my_thing")
    process = mtrain("plugins", "test", "my_thing", cwd=tmp_path, PYTHONPATH=f"{site}:{PATH}")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.job
@pytest.mark.parametrize(
    ("word", "name", "message"),
    [
        ("model", "vit", "there is a model 'vit' already, of mtrain; choose another"),
        ("model", "My-Net", "'My-Net' given, expected a word of lower-case letters"),
        ("dataset", "../x", "'../x' given, expected a word"),
        ("task", "class", "'class' given, expected a word"),
        ("launcher", "mine", "mtrain-mine: is there already, and nothing is overwritten"),
    ],
)
def test_wrong_names_are_refused_and_nothing_is_overwritten(word: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mtrain-mine").mkdir()
    process = mtrain("plugins", "new", word, name, cwd=tmp_path)
    assert process.returncode == 2, process.stdout
    assert message in process.stderr
    assert list(tmp_path.rglob("*.py")) == []


def test_the_page_on_backends_shows_the_skeleton_as_it_is_written() -> None:
    """The case of whole weights: a module as a full listing; the skeleton passes the whole kit, see above."""
    text = (ROOT / "docs" / "writing-a-backend.md").read_text()
    content = _content("backends", "averaging", "")
    modules = [text for path, text in content.items() if path.startswith("src/") and "def " in text]
    assert len(modules) == 2
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    assert [block.splitlines()[0] for block in blocks if block not in modules] == []


@pytest.mark.parametrize(
    ("page", "example", "least"),
    [
        ("model", "mtrain-convnext", 2),
        ("dataset", "mtrain-labelme", 1),
        ("launcher", "mtrain-pinned", 2),
        ("task", "mtrain-keypoints", 2),
    ],
)
def test_the_code_of_a_guide_is_that_of_its_example(page: str, example: str, least: int) -> None:
    text = (ROOT / "docs" / f"writing-a-{page}.md").read_text()
    files = [file.read_text() for file in (ROOT / "examples" / example / "src").rglob("*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= least
    assert [block.splitlines()[0] for block in blocks if not any(block in file for file in files)] == []
    points = re.findall(r"^```toml\n(\[project.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert points
    assert all(block in (ROOT / "examples" / example / "pyproject.toml").read_text() for block in points)
