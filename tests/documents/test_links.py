"""Links, anchors, diagrams and the site's pages, without building the site."""

import re

import pytest

from scripts.site import documents

ROOT = documents.ROOT
PAGES = documents.documents()


def test_every_link_of_a_document_leads_somewhere() -> None:
    dead = []
    for page in PAGES:
        for link in documents.links(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in documents.anchors(target.read_text(encoding="utf-8"))):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 40
    assert not dead


def test_links_in_code_are_no_links_and_links_over_two_lines_are() -> None:
    text = "[a](b.md) `[c](d.md)`\n```\n[e](f.md)\n```\n[two\nlines](g.md#h) ![i](j.png)\n"
    assert documents.links(text) == ["b.md", "g.md#h", "j.png"]
    picture = (
        '<picture>\n<source media="(a)" srcset="k.svg">\n<img src="l.svg" alt="m">\n</picture>\n`<img src="n.svg">`\n'
    )
    assert documents.links(picture) == ["k.svg", "l.svg"]


def test_anchors_are_those_of_repository_pages() -> None:
    text = "# What `mtrain` trusts: A, B\n```\n# no heading\n```\n## GPT-2 & [link](x.md)\n"
    assert documents.anchors(text) == ["what-mtrain-trusts-a-b", "gpt-2--link"]


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", contents, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("notebook/")}  # found by links from results alone
    assert pages <= named, "add these to `nav` in mkdocs.yml"


def broken_tables(text: str) -> list[str]:
    """Rows that no table shows: those without a row of dashes above, and those with another number of cells."""
    broken: list[str] = []

    def look(part: str) -> str:
        lines = part.splitlines()
        width = 0
        for line, following in zip(lines, [*lines[1:], ""], strict=False):
            if not line.lstrip().startswith("|"):
                width = 0
            elif not width and re.fullmatch(r" *\|?( *:?-+:? *\|?)+", following):
                width = documents.cells(line)
                if documents.cells(following) != width:
                    broken.append(line)
            elif documents.cells(line) != width:
                broken.append(line)
        return part

    documents.prose(text, look)
    return broken


def test_a_row_outside_a_table_and_one_with_another_number_of_cells_are_broken() -> None:
    table = "| a | b |\n|---|--:|\n| `c | d` | e \\| f |\n"
    assert broken_tables(table) == []
    assert broken_tables(f"{table}\n| g | h |\n") == ["| g | h |"]
    assert broken_tables(f"{table}| i |\n| j | k | l |\n") == ["| i |", "| j | k | l |"]
    assert broken_tables("| m | n |\n|---|\n") == ["| m | n |", "|---|"]
    assert broken_tables("```\n| o | p |\n```\n") == []


def test_every_row_is_shown_in_its_table() -> None:
    broken = [f"{page.relative_to(ROOT)}: {row}" for page in PAGES for row in broken_tables(page.read_text("utf-8"))]
    assert not broken


@pytest.mark.slow
def test_every_diagram_has_an_image_for_the_site() -> None:
    blocks = [block for page in PAGES for block in documents.blocks(page) if block.language == "mermaid"]
    drawn = {f"diagrams/{image.name}" for image in (ROOT / "docs/diagrams").glob("*.svg")}
    assert blocks
    assert {documents.diagram(block.text) for block in blocks} == drawn, "run scripts/diagrams"
