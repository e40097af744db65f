"""Knowledge of one kind of task stays inside the task object: core, the starter and the ranks do not mention it."""

import re
from pathlib import Path

import pytest

import mtrain

PACKAGE = Path(mtrain.__file__).parent
WORDS = re.compile(
    r"(?<![A-Za-z])((?i:box|boxes|bbox|anchors?|coco|mosaic|detect(?:s|ion|or|ors)?|classif(?:y|ies|ier|ication)))(?![a-z])"
    r"|(?<![A-Za-z])(?:mAP|AP(?:50|75|s|m|l)?|AR100)(?![A-Za-z0-9])"
)
ALLOWED = {
    "spec/yaml_reader.py": {"anchor"},  # YAML's own
    "jobs/preflight/facts.py": {"coco"},  # the name of a library
    "jobs/preflight/findings.py": {"box"},  # an argument of a table that is printed
    "records/svg.py": {"anchor", "box"},  # the view box and text anchors of SVG
    "cli/data.py": {"coco"},  # `mtrain data make digits` writes that form
    "cli/config_import.py": {"coco"},  # an example
    "cli/train.py": {"box"},  # an argument of rich's Table: the frame around it
    "cli/foreign_flags.py": {"anchors"},  # a flag of YOLOv5's, and the option of its model that is the answer
}
"""File -> words that it may use."""
FILES = sorted(
    file
    for pattern in (
        *(f"{folder}/**/*.py*" for folder in ("core", "spec", "system", "rank", "jobs", "cli")),
        *("launchers/*.py", "records/*.py"),
    )
    for file in PACKAGE.glob(pattern)
    if file.suffix in (".py", ".pyi") and file.parent != PACKAGE / "spec" / "importers"
)


def words_of(text: str) -> set[str]:
    return {found.group().lower() if found.group(1) else found.group() for found in WORDS.finditer(text)}


def test_no_kind_of_task_is_named():
    guilty = {}
    for file in FILES:
        name = file.relative_to(PACKAGE).as_posix()
        text = re.sub(r"^\s*(?:from|import) .*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if words := words_of(text) - ALLOWED.get(name, set()):
            guilty[name] = sorted(words)
    assert len(FILES) > 100
    assert guilty == {}


def test_every_exception_is_still_needed():
    needless = {
        name: unused
        for name, allowed in ALLOWED.items()
        if (unused := allowed - words_of((PACKAGE / name).read_text(encoding="utf-8")))
    }
    assert needless == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a box of AP50 and mAP", {"box", "AP50", "mAP"}),
        ('names = ("AP", "AP75")', {"AP", "AP75"}),
        ("boxes_wh_px, CocoEvaluator", {"boxes", "coco"}),
        ("the toolbox maps, captions, an inbox, APPEND, Mapping", set()),
        ("DetectionTask.Detector", {"detection", "detector"}),
    ],
)
def test_the_search_sees_words_and_not_parts_of_words(text, expected):
    assert words_of(text) == expected
