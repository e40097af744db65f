"""The page of shipped specs and models has all of them, with the numbers of README.md, the data and the notebook."""

import re

import pytest

from mtrain.rank.spec.assembly import open_task
from mtrain.spec import config, plugins
from mtrain.spec.resolved import Resolved
from scripts.site import documents, shipped
from tests.documents.test_torch_readme_models import NAMES, ROWS
from tests.framework import Framework

DOCS = documents.ROOT / "docs"


@pytest.fixture(scope="module")
def rows(framework: Framework) -> dict[str, list[str]]:
    """Spec or model -> the cells of its row; a model that has the name of a spec is `model NAME`."""
    specs, models = shipped.page().split("## Models")
    found = {}
    for prefix, part in (("", specs), ("model ", models)):
        for line in re.findall(r"^\| (`.*) \|$", part, re.MULTILINE):
            cells = [cell.strip() for cell in line.split(" | ")]
            found[prefix + cells[0].strip("`")] = cells
    return found


def test_every_shipped_spec_and_model_has_a_row(rows: dict[str, list[str]]) -> None:
    models = {entry.name for entry in plugins.names("models") if entry.is_own} - {"own"}
    assert set(rows) == set(config.shipped_names()) | {f"model {name}" for name in models}


def test_parameters_are_those_of_the_readme(rows: dict[str, list[str]]) -> None:
    for row, names in NAMES.items():
        stated = re.split(r"[,;] ", ROWS[row])
        assert [rows[f"model {name}"][1] for name in names] == stated
    assert rows["yolov5n_bccd"][2] == "1.8", "three classes need fewer than 80"


def test_the_summaries_of_plugins_have_the_same_parameters(rows: dict[str, list[str]]) -> None:
    for entry in plugins.names("models"):
        stated = re.search(r", ([\d.]+) M parameters", entry.summary)
        if stated:
            assert rows[f"model {entry.name}"][1] == stated[1], entry.name


@pytest.mark.parametrize("name", ["digits", "unet_digits", "unet_ten_digits", "vit_digits"])
def test_embedded_data_have_the_number_of_classes_of_the_row(name: str, rows: dict[str, list[str]]) -> None:
    resolved = Resolved.of(config.load({"_BASE_": name}, environ={}).spec)
    assert int(rows[name][4]) == len(open_task(resolved).task().class_names)


def test_measurements_are_in_the_section_that_is_linked() -> None:
    for name, found in shipped.MEASURED.items():
        path, _, anchor = found.document.partition("#")
        text = (DOCS / path).read_text(encoding="utf-8")
        assert anchor in documents.anchors(text)
        section = section_of(text, anchor)
        for number in re.findall(r"\d*\.\d+", found.text):
            assert re.search(rf"(?<![\d]){re.escape(number)}(?!\d)", section), f"{name}: {number}"
        assert name in config.shipped_names()


def section_of(text: str, anchor: str) -> str:
    """Return a document from the heading of an anchor to the next heading of its level or above."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    levels = [len(line) - len(line.lstrip("#")) if re.match("#+ ", line) else 0 for line in lines]
    start = next(place for place, line in enumerate(lines) if levels[place] and documents.anchors(line) == [anchor])
    ends = (place for place in range(start + 1, len(lines)) if 0 < levels[place] <= levels[start])
    return "\n".join(lines[start : next(ends, len(lines))])
