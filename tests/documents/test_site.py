"""The documentation as a site: built in strict mode, and complete without a network."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def test_no_row_of_a_table_is_left_in_a_paragraph(site: Path) -> None:
    assert not [str(page) for page in site.rglob("*.html") if re.search(r"<(p|li)>\s*\|", page.read_text("utf-8"))]


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


SEARCHES = {
    "voc": "data",
    "onnx": "export",
    "slurm": "slurm",
    "kubernetes": "kubernetes",
    "tensorboard": "reporters",
    "gpu": "versions",
    "compare backends": "comparing",
    "own data": "data",
    "out of memory": "memory",
    "secret": "security",
    "tutorial": "tutorial-demo",
    "two hosts": "tutorial-hosts",
    "exit code": "errors",
    "shipped specs": "shipped",
    "why are the bits equal": "equal-bits",
}
"""What is typed -> the page that comes first."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_in_pages_of_a_folder_finds_the_right_page_first(site: Path, browser: Any) -> None:
    assert {typed: first_found(browser, site, typed) for typed in SEARCHES} == SEARCHES
    assert first_found(browser, site, "zzyzx") is None
    assert not browser.get_log("browser")


def first_found(browser: Any, site: Path, typed: str) -> str | None:
    """Type into the search of a page that was opened from a folder, and return the first page found, without its suffix."""
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('#__search').click()")
    field = browser.find_element("css selector", "input.md-search__input")
    until(field.is_displayed)
    enter = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    browser.execute_script(enter, field, typed)  # at once, so that no part of it is searched
    until(lambda: found_count(browser) is not None)
    if not found_count(browser):
        return None
    until(lambda: browser.find_elements("css selector", ".md-search-result__item > a"))
    link = browser.find_element("css selector", ".md-search-result__item > a").get_attribute("href")
    return link.split("?")[0].removeprefix(f"{site.as_uri()}/").removesuffix(".html")


def found_count(browser: Any) -> int | None:
    """Return how many pages the search says it has found; None while it has not answered."""
    said = browser.find_element("css selector", ".md-search-result__meta").text
    number = re.match(r"(\d+|No) matching document", said)
    return None if number is None else 0 if number[1] == "No" else int(number[1])


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition of the page, a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the page does not answer"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_code_and_lists_of_files_are_not_searched(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert {"index.html", "data.html", "reference.html", "files/CONTRIBUTING.html"} <= places
    assert not [place for place in places if re.search(r"\.(py|yml|toml|ipynb|json)\.html$", place)]
    assert "files/examples/own-script/index.html" not in places
