"""What the documents are made of: fenced blocks, links and anchors. Used by the site and by the tests of the documents."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *(\S*).*$")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
_ATTRIBUTE = re.compile(r"(<(?:img|source)\b[^>]*?\b(?:src|srcset)=\")([^\"\s]+)(\")")
"""An image in HTML: `<picture>` has one for light pages and one for dark pages, for which Markdown has no form."""
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")
_CODE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)
_MARK = re.compile(r"<!-- not checked: (.+?) -->", re.DOTALL)


_RUN = re.compile(r"<!-- (?:not run: (?P<none>.+?)|run: (?P<some>.+?); not the others: (?P<why>.+?)) -->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document: its language, its text without indentation, and its first line's number."""

    page: Path
    line: int
    language: str
    text: str
    not_checked: str | None
    """Reason in a comment `<!-- not checked: REASON -->` before the block; None: the block is checked."""
    not_run: str | None = None
    """Reason in a comment before the block why its commands are not run: `<!-- not run: REASON -->`, or for some of them
    `<!-- run: mtrain config, mtrain plan; not the others: REASON -->`; None: all are run."""
    runs: tuple[str, ...] = ()
    """How the commands begin that are run although `not_run` gives a reason."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Every document for people: those at the top of the repository, in docs, benchmarks, examples and packages."""
    patterns = (
        "*.md",
        "docs/**/*.md",
        "benchmarks/*.md",
        "examples/README.md",
        "examples/*/README.md",
        "packages/*/README.md",
    )
    return sorted(page for pattern in patterns for page in ROOT.glob(pattern))


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a document."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = -1
    before: list[str] = []
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if start < 0 and fence:
            start, indent, mark, language = number, len(fence[1]), fence[2], fence[3]
        elif start >= 0 and fence and fence[2].startswith(mark) and not fence[3]:
            text = "".join(f"{inner[indent:]}\n" for inner in lines[start + 1 : number])
            yield Block(page, start + 2, language, text, _reason(before), *_run(before))
            start, before = -1, []
        elif start < 0:
            before.append(line)
    assert start < 0, f"{page}:{start + 1}: a block that does not end"


def _reason(before: list[str]) -> str | None:
    """Return the reason of a comment that stands directly before a block."""
    text = "\n".join(before).rstrip()
    marks = list(_MARK.finditer(text))
    return " ".join(marks[-1][1].split()) if marks and marks[-1].end() == len(text) else None


def _run(before: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return why commands are not run, and how those begin that are, by a comment directly before a block."""
    text = "\n".join(before).rstrip()
    marks = list(_RUN.finditer(text))
    if not marks or marks[-1].end() != len(text):
        return None, ()
    some = tuple(part.strip() for part in (marks[-1]["some"] or "").split(",") if part.strip())
    return " ".join((marks[-1]["none"] or marks[-1]["why"]).split()), some


def prose(text: str, change: Callable[[str], str]) -> str:
    """Return a document with `change` applied to what is no fenced block."""
    parts: list[str] = []
    kept: list[str] = []
    mark = ""
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line.rstrip("\n"))
        if not mark and fence:
            parts, kept, mark = [*parts, change("".join(kept))], [line], fence[2]
        elif mark and fence and fence[2].startswith(mark) and not fence[3]:
            parts, kept, mark = [*parts, "".join([*kept, line])], [], ""
        else:
            kept.append(line)
    return "".join([*parts, "".join(kept) if mark else change("".join(kept))])


def change_links(text: str, change: Callable[[str], str]) -> str:
    """Return a document with every link's target changed; code keeps its text."""

    def in_prose(part: str) -> str:
        spans: list[tuple[int, int]] = []

        def one(match: re.Match[str]) -> str:
            inside = any(start <= match.start(2) < end for start, end in spans)
            return match[0] if inside else f"{match[1]}{change(match[2])}{match[3]}"

        for pattern in (_LINK, _ATTRIBUTE):
            spans = [match.span() for match in _CODE.finditer(part)]
            part = pattern.sub(one, part)
        return part

    return prose(text, in_prose)


def links(text: str) -> list[str]:
    """Return the targets of the links of a document."""
    found: list[str] = []

    def note(target: str) -> str:
        found.append(target)
        return target

    change_links(text, note)
    return found


def anchors(text: str) -> list[str]:
    """Return the anchors of the headings of a document, as repository pages and the site make them."""
    found: list[str] = []

    def note(part: str) -> str:
        found.extend(_slug(match[1]) for line in part.splitlines() if (match := _HEADING.match(line)))
        return part

    prose(text, note)
    return found


def _slug(heading: str) -> str:
    words = re.sub(r"[`*]|\]\([^)]*\)|!?\[", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def diagram(source: str) -> str:
    """Return the path below docs of the image of a Mermaid block, which `scripts/diagrams` draws."""
    return f"diagrams/{hashlib.sha256(source.strip().encode()).hexdigest()[:12]}.svg"


def cells(row: str) -> int:
    """Return the number of cells of a table's row; bars in code and escaped ones separate nothing."""
    plain = _CODE.sub("", row.strip()).replace("\\|", "")
    return plain.strip("|").count("|") + 1
