"""The reference of all values of a spec, as markdown tables and as a JSON schema."""

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.schema import describe, dot, field_at, model_of, walk
from mtrain.spec.yaml_reader import Path, flow

ITEMS = "groups"
"""Key of the list of sections, whose items have a table of their own."""


def json_schema(schemas: Mapping[str, type[Spec]]) -> dict[str, Any]:
    """Return a JSON schema that accepts the specs of each task in ``schemas``."""
    definitions, kinds = {}, []
    for task, schema in schemas.items():
        described = schema.model_json_schema(ref_template=f"#/$defs/{task}/{{model}}")
        definitions[task] = described.pop("$defs")
        kinds.append({**described, "title": f"spec of a job of the task {task}"})
    return {"title": "spec of a job", "anyOf": kinds, "$defs": definitions}


def markdown(schemas: Mapping[str, type[Spec]]) -> list[str]:
    """Return one table for each section of the core's schema, and then one for each section of each task.

    The tables of a task list the keys that it adds.
    """
    lines = [
        "# Every value of a spec",
        "",
        "Written by `mtrain config schema --markdown`. `mtrain config explain KEY -c SPEC` says what a value is and where it "
        "came from.",
        "",
        "Only `true` and `false` are truth values: `yes`, `no`, `on` and `off` are text. A number has no 0 in front: `010`, which "
        "some readers of YAML take for 8, is text, and where a number is expected it is refused (`0o10` is 8, `0x10` is 16). "
        "Digits may be divided by `_` (`1_000`). `1:30` and `2024-01-01` are text.",
        "",
        "The tables below list what every spec may hold. The task of a job, which its data set and its model name, adds to that:",
        "",
        *(f"* [the task {task}](#the-task-{task})" for task in schemas),
    ]
    lines += _tables(Spec, shown_before=None)
    for task, schema in schemas.items():
        lines += [
            "",
            f"# The task {task}",
            "",
            f"A spec of this task also has the following values, of the task {task}.",
        ]
        lines += _tables(schema, shown_before=Spec, of=f" of {task}")
    return lines


def _tables(schema: type[Spec], *, shown_before: type[Spec] | None, of: str = "") -> list[str]:
    """Return the tables of ``schema`` without the keys that ``shown_before`` has; ``of`` is appended to their headings."""
    defaults = schema().model_dump(mode="json")
    lines: list[str] = []
    section: Path | None = None
    for path, key_field in walk(schema):
        if shown_before is not None and (
            field_at(shown_before, path) is not None or (0 in path and field_at(shown_before, path[: path.index(0)]))
        ):
            continue
        if model_of(key_field.annotation) is not None and path[-1] != ITEMS:
            continue
        if path[:-1] != section:
            section = path[:-1]
            lines += [
                "",
                f"## {dot(section) or 'at the top'}{of}",
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(_row(path, key_field, defaults))
    return lines


def _row(path: Path, key_field: FieldInfo, defaults: Mapping[str, Any]) -> str:
    nested = model_of(key_field.annotation) is not None
    default = "see `mtrain config show`" if nested else f"`{flow(lookup(defaults, path))}`"
    if 0 in path or lookup(defaults, path[:-1]) is None:  # an item of a list, or a section that is null by default
        default = "required" if key_field.is_required() else f"`{flow(key_field.default)}`"
    what = "a list of sections, below" if nested else describe(key_field.annotation, key_field.metadata)
    cells = (f"`{path[-1]}`", what, default, key_field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
