"""The page of all keys of a spec: it is what the schema says, and each section has a heading, a list and an example."""

import re
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from mtrain.spec.building import Tasks
from mtrain.spec.model import Spec
from mtrain.spec.schema import model_of, walk
from scripts.site import spec as spec_page

SCHEMAS = Tasks().schemas
TEXT = spec_page.page(SCHEMAS)


def test_the_page_in_docs_is_made_from_the_schema() -> None:
    assert spec_page.PAGE.read_text(encoding="utf-8") == TEXT, "python -m scripts.site.spec"


def test_every_section_has_one_heading_and_its_keys_below() -> None:
    headings = re.findall(r"^#{2,3} (.*)$", TEXT, re.MULTILINE)
    assert len(headings) == len(set(headings))
    sections = {part.split("\n", 1)[0]: part for part in re.split(r"^#{2,3} ", TEXT, flags=re.MULTILINE)[1:]}
    for path, field in walk(Spec):
        if model_of(field.annotation) is None:
            heading = ".".join(str(part) for part in path[:-1] if part != 0) or "At the top"
            assert re.search(rf"^\* `{path[-1]}\b", sections[heading], re.MULTILINE), path
    assert {"data.augment of detection", "data of classification, detection and segmentation"} <= set(sections)


def test_every_key_of_a_task_is_on_the_page() -> None:
    keys = set(re.findall(r"^\* `(\w+)", TEXT, re.MULTILINE))
    found = {
        path[-1] for schema in SCHEMAS.values() for path, field in walk(schema) if model_of(field.annotation) is None
    }
    assert found == keys - {"groups"}


def test_a_key_of_several_tasks_is_listed_once_with_the_defaults_that_differ() -> None:
    (line,) = re.findall(r"^\* `hsv_v.*$", TEXT, re.MULTILINE)
    assert line.startswith("* `hsv_v: 0.4` (0 to 1; classification 0.0): ")


def test_sections_and_tasks_have_an_example() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    assert {key for block in blocks for key in block} >= {name for name in Spec.model_fields if name != "plugins"}
    assert set(spec_page.EXAMPLES) == {name for name in Spec.model_fields if name != "plugins"} | set(SCHEMAS)


@pytest.mark.parametrize(
    ("annotation", "metadata", "default", "said"),
    [
        (int, [Field(gt=0)], "1", ">= 1"),
        (int | None, [Field(gt=0, le=9)], "null", "int 1 to 9"),
        (list[str], [], "[]", ""),
        (Annotated[float, Field(ge=0, le=1)], [], "0.5", "0 to 1"),
        (str | None, [], "null", "text"),
        (str, [], "ddp", ""),
        (bool, [], "true", ""),
        (bool | Literal["auto"], [], "auto", "true, false"),
        (Literal["none", "ram"], [], "none", "`none|ram`"),
        (int | Literal["auto"] | None, [], "auto", "int, null"),
        (list[Literal["a", "b"]], [], "[a]", "list of `a|b`"),
    ],
)
def test_what_a_key_may_be_is_short_and_leaves_out_its_default(
    annotation: object, metadata: list[object], default: str, said: str
) -> None:
    assert spec_page.allowed_values(annotation, metadata, default) == said
