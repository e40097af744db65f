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
    "learning rate": {"script-optimizers", "spec"},
    "gradient accumulation": {"script-optimizers"},
    "batch size": {"spec", "memory"},
    "DDP script": {"any-script", "your-own-script"},
    "own dataset": {"data"},
    "FSDP2": {"backends"},
    "freeze layers": {"spec", "weights"},
    "multi-node": {"hosts", "tutorial-hosts"},
    "mAP": {"tutorial-demo"},
    "callback": {"coming-from", "reporters"},
    "mixed precision": {"versions"},
    "fine-tune": {"weights", "language"},
    "two optimizers": {"script-models"},
    "GAN": {"script-models"},
    "LoRA": {"language"},
    "resume": {"checkpoints"},
    "early stopping": {"checkpoints"},
    "out of memory": {"memory"},
    "gradient checkpointing": {"memory"},
    "gpu": {"versions"},
    "DeepSpeed ZeRO": {"backends"},
    "horovod": {"backends", "tensorflow", "coming-from"},
    "hyperparameter search": {"sweeping"},
    "inference server": {"serving"},
    "onnx": {"export"},
    "int8": {"quantising"},
    "tensor parallelism": {"meshes"},
    "IterableDataset": {"script-data"},
    "torchrun": {"coming-from", "any-script"},
    "transfer learning": {"weights"},
    "tensorboard": {"reporters"},
    "slurm": {"slurm"},
    "kubernetes": {"kubernetes"},
    "voc": {"data"},
    "segmentation": {"data"},
    "compare backends": {"comparing"},
    "install": {"quick-start", "index"},
    "secret": {"security"},
    "exit code": {"errors"},
    "why are the bits equal": {"equal-bits"},
}
"""What is typed -> the pages of which one is to be among the first three."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_in_pages_of_a_folder_finds_38_of_40_usual_words_among_the_first_three(
    site: Path, browser: Any
) -> None:
    assert len(SEARCHES) == 40
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('#__search').click()")
    field = browser.find_element("css selector", "input.md-search__input")
    until(field.is_displayed)
    found = {typed: first_found(browser, field, site, typed) for typed in SEARCHES}
    missed = {typed: found[typed] for typed, wanted in SEARCHES.items() if not wanted & set(found[typed])}
    assert len(missed) <= 2, missed
    assert first_found(browser, field, site, "zzyzx") == []
    assert not browser.get_log("browser")


def first_found(browser: Any, field: Any, site: Path, typed: str) -> list[str]:
    """Type into the search, and return the first three pages found, without their suffixes."""
    enter = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
    browser.execute_script(enter, field, "")
    until(lambda: found_count(browser) is None)
    browser.execute_script(enter, field, typed)  # at once, so that no part of it is searched
    until(lambda: found_count(browser) is not None)
    if not found_count(browser):
        return []
    read = "return [...document.querySelectorAll('.md-search-result__item > a')].map((link) => link.href)"
    until(lambda: browser.execute_script(read))
    places = (re.split(r"[?#]", link)[0].removeprefix(f"{site.as_uri()}/") for link in browser.execute_script(read))
    return list(dict.fromkeys(place.removesuffix(".html") for place in places))[:3]


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
