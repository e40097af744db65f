"""The documentation as a site: built in strict mode, and complete without a network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//|<link\b[^>]*rel=\"stylesheet\"[^>]*\bhref=\"(?:https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_builds_without_a_warning_and_has_its_pages(site: Path) -> None:
    for page in (
        "index",
        "quick-start",
        "spec",
        "reference",
        "files/CONTRIBUTING",
        "files/examples/own-script/train.py",
    ):
        assert (site / f"{page}.html").is_file(), page
    assert "compare_backends" in (site / "reference.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    assert not [str(page) for page in pages if _LOADED.search(page.read_text(encoding="utf-8"))]
    styles = [
        text
        for sheet in site.rglob("*.css")
        for text in re.findall(r"url\(([^)]*)\)", sheet.read_text(encoding="utf-8"))
    ]
    assert not [text for text in styles if "//" in text and "data:" not in text]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_diagrams_are_images_and_every_link_between_pages_leads_somewhere(site: Path) -> None:
    assert 'class="diagram"' in (site / "design.html").read_text(encoding="utf-8")
    dead = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r"(?:href|src)=\"([^\"#:]+)[#\"]", page.read_text(encoding="utf-8")):
            if not (page.parent / link).exists():
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead
