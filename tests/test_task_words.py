"""Knowledge of one kind of task stays inside the task object: core, the starter and the ranks do not mention it."""

import re

import pytest

from tests.sources import source_files

WORDS = re.compile(
    r"(?<![A-Za-z])((?i:box|boxes|bbox|anchors?|coco|mosaic|detect(?:s|ion|or|ors)?|classif(?:y|ies|ier|ication)))(?![a-z])"
    r"|(?<![A-Za-z])(?:mAP|AP(?:50|75|s|m|l)?|AR100)(?![A-Za-z0-9])"
)
ALLOWED = {
    "spec/yaml_reader.py": {"anchor"},  # YAML's own
    "system/interpreter.py": {"coco"},  # the name of a library
    "jobs/preflight/findings.py": {"box"},  # an argument of a table that is printed
    "records/svg.py": {"anchor", "box"},  # the view box and text anchors of SVG
    "commands/data.py": {"coco"},  # `mtrain data make digits` writes that form
    "commands/config.py": {"coco"},  # an example
    "commands/results.py": {"AP", "AP50", "classification", "coco", "detection"},  # examples in the words on results
    "commands/train.py": {"box"},  # an argument of rich's Table: the frame around it
    "commands/foreign_flags.py": {"anchors"},  # a flag of YOLOv5's, and the option of its model that is the answer
    "rank/script/rules.py": {"classifier"},  # how the last layer of a network is often called, whatever it does
    "spec/training.py": {"classifier"},  # the same
    "mtrain_ui/trackers/mlflow.py": {"AP"},  # an example of a name that MLflow does not take
}
"""File -> words that it may use."""
PLACES = re.compile(
    r"(core|spec(?!/importers)|system|rank|jobs|commands)/|(launchers|records)/[^/]+$"
    r"|mtrain_(clusters|sweep|ui)/|mtrain_\w+/commands/"
)
FILES = {name: file for name, file in source_files(endings=(".py", ".pyi")).items() if PLACES.match(name)}


def words_of(text: str) -> set[str]:
    return {found.group().lower() if found.group(1) else found.group() for found in WORDS.finditer(text)}


def test_no_kind_of_task_is_named():
    guilty = {}
    for name, file in FILES.items():
        text = re.sub(r"^\s*(?:from|import) .*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if words := words_of(text) - ALLOWED.get(name, set()):
            guilty[name] = sorted(words)
    assert len(FILES) > 100
    assert guilty == {}


def test_every_exception_is_still_needed():
    needless = {
        name: unused
        for name, allowed in ALLOWED.items()
        if (unused := allowed - words_of(FILES[name].read_text(encoding="utf-8")))
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
