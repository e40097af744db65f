"""README.md: short, with one address of the repository, a picture of numbers that were measured, and a diff that is Python."""

import ast
import json
import re
import textwrap
import tomllib

import pytest

from scripts.site import absolute_links, compare_picture, documents
from tests.documents.test_blocks import check_names

README = documents.ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
PROJECT = tomllib.loads((documents.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_links_lead_somewhere_from_a_package_index_too() -> None:
    text = '[a](docs/b.md#c) ![d](docs/e.png) [f](https://g.h/i) [j](#k)\n<source srcset="docs/l.svg">\n`[m](n.md)`\n'
    there = absolute_links.absolute(text, address="https://host/me", version="1.2")
    assert documents.links(there) == [
        "https://host/me/blob/v1.2/docs/b.md#c",
        "https://host/me/raw/v1.2/docs/e.png",
        "https://g.h/i",
        "#k",
        "https://host/me/raw/v1.2/docs/l.svg",
    ]
    assert "`[m](n.md)`" in there
    relative = [link for link in documents.links(TEXT) if "//" not in link]
    assert len(relative) > 20
    assert all(
        link.startswith(("https://", "#"))
        for link in documents.links(absolute_links.absolute(TEXT, address="https://a", version="1"))
    )


def test_no_page_names_an_address_that_nobody_can_clone() -> None:
    address = PROJECT["urls"]["Repository"]
    assert all(url.startswith(address) for url in PROJECT["urls"].values())
    host = address.split("/")[2]
    naming = [page.name for page in documents.documents() if host in page.read_text("utf-8")]
    assert not naming, "pyproject.toml alone names it; pages say: in a clone of this repository"


def test_the_first_screen_says_what_it_is_for_where_it_runs_and_where_to_start() -> None:
    first = TEXT[: TEXT.index("\n## ")]
    places = [
        first.index(words)
        for words in (
            "change\nthe training backend",
            "not yet run on a GPU",
            "compare-light.svg",
            "$ make demo",
            "| I want to ... |",
        )
    ]
    assert places == sorted(places)
    rows = re.findall(r"^\| (?!I want|---)[^|]+ \| .*\]\(.*$", first, re.MULTILINE)
    assert 5 <= len(rows) <= 7
    measured = TEXT[TEXT.index("## Measured") : TEXT.index("## Models")]
    assert len(re.findall(r"^\| [^|-][^|]* \| \[[\d.e-]+(?: s)?\]\([^)]+\) \|$", measured, re.MULTILINE)) == 5


@pytest.mark.parametrize("theme", compare_picture.THEMES)
def test_the_picture_is_drawn_from_the_numbers_beside_it(theme: str) -> None:
    numbers = json.loads(compare_picture.NUMBERS.read_text(encoding="utf-8"))
    drawn = compare_picture.svg(numbers, compare_picture.THEMES[theme])
    assert (documents.ROOT / f"docs/images/compare-{theme}.svg").read_text(encoding="utf-8") == drawn
    assert f"docs/images/compare-{theme}.svg" in documents.links(TEXT)


def test_what_the_picture_claims_is_in_its_numbers() -> None:
    numbers = json.loads(compare_picture.NUMBERS.read_text(encoding="utf-8"))
    verdicts = {backend["label"]: backend["verdict"] for backend in numbers["backends"]}
    same = {"horovod", "deepspeed:stage=1", "deepspeed:stage=2", "deepspeed:stage=3"}
    assert verdicts == {"ddp": "reference", "fleet": "within float32"} | dict.fromkeys(same, "same bits")
    for backend in numbers["backends"][1:]:
        assert len(backend["loss"]) == numbers["updates"] == len(numbers["nudged"])
        assert (max(backend["loss"]) == 0) == (backend["label"] in same)
    largest = max(numbers["backends"][-1]["loss"])
    assert f"differs by at most {float(f'{largest:.1e}'):.1e}".replace("e-0", "e-") in TEXT


def test_a_diff_adds_few_lines_and_its_result_is_python_that_mtrain_understands() -> None:
    (block,) = [block for block in documents.blocks(README) if block.language == "diff"]
    lines = block.text.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    ast.parse(textwrap.dedent(before))
    check_names(ast.parse(textwrap.dedent(after)))
    assert "loss.backward()" in before
    assert "optimizer.update(loss)" in after
    assert sum(line.startswith("+") for line in lines) == 5, "README says five lines"
