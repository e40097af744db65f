"""The page of all keys of a spec, made from its schema: `python -m scripts.site.spec` writes `docs/spec.md`."""

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.schema import dot, field_at, model_of, walk
from mtrain.spec.yaml_reader import Path as Keys
from mtrain.spec.yaml_reader import flow

PAGE = Path(__file__).parents[2] / "docs" / "spec.md"
ITEMS = "groups"
"""Key of the list of sections, whose items have a heading of their own."""
LONGEST_DEFAULT = 40
"""Characters of a default that are shown; `mtrain config show` shows longer ones."""
INTRODUCTION = """# Every key of a spec

A key is shown with its default, unless that is long, then what else it may be. `null` means: not set. `-o KEY=VALUE` sets one;
`mtrain config explain KEY -c SPEC` says what it is and where it came from.

Only `true` and `false` are truth values: `yes`, `no`, `on` and `off` are text. A number has no 0 in front (`0o10` is 8); digits may be
divided by `_`. `1:30` and `2024-01-01` are text.

`PATH.py:Name` is a class or function of your own, relative to the spec; `package.module:Name` works, too. `mtrain plugins list` shows the
plugins of each kind.
"""
TASKS = """## Keys of tasks

The data set and the model of a job decide its task, which adds these keys.
"""
EXAMPLES = {
    "model": """model:
  name: yolov5s
  weights: yolov5s.safetensors""",
    "data": """data:
  format: yolo
  root: /data/cells
  train: images/train
  val: images/val
  names: [red, white]""",
    "train": """train:
  epochs: 100
  batch_size: 64
  max_micro_batch: auto
  precision: auto
  ema: {decay: 0.999}
  freeze: ['^model\\.[0-9]\\.']
  patience: 20""",
    "optimizer": """optimizer:
  rule: adamw
  learning_rate: 0.001
  groups:
    - {match: 'norm|bias$', weight_decay: 0}
    - {match: ''}""",
    "schedule": """schedule:
  name: cosine
  per: update
  warmup: {epochs: null, updates: 500}""",
    "backend": "backend: {name: deepspeed, options: {stage: 3}}",
    "parallel": "parallel: {replicate: 2, shard: 4}",
    "cluster": """cluster:
  name: ssh
  ips: [10.0.0.1, 10.0.0.2]
  nproc_per_node: 4
  max_restarts: 3""",
    "launcher": "launcher: {name: torchrun}",
    "evaluate": "evaluate: {every_epochs: 5, augment: true}",
    "checkpoint": """checkpoint:
  every_minutes: 30
  keep_last: 3
  copy_to: s3://bucket/runs""",
    "report": """report:
  name: cells
  reporters: {csv: true}
  profile: [10, 12]""",
    "classification": """_BASE_: resnet18_folder
data:
  root: /data/mugs
  split: 0.2
  image_size: 224
  augment: {hsv_v: 0.4}""",
    "detection": """_BASE_: yolov5s
data:
  image_size: 640
  cache: ram
  classes: {mug: cup, table: null}
  augment: {mosaic: 0.5, close_mosaic_epochs: 10}""",
    "segmentation": """_BASE_: unet_voc
data:
  image_size: 512
  augment: {random_scale: [0.75, 1.5]}""",
    "language": """_BASE_: gpt_docs
data: {tokenizer: ./my-model, length: 1024}
generate: {temperature: 0.8, top_p: 0.95}""",
    "own": """model: {name: './nets.py:MyNet', framework: torch}
data: {format: './sets.py:MySet'}
evaluate: {metrics: ['./scores.py:f1']}""",
}
"""Section, or task -> an example."""


@dataclass
class Entry:
    """A key that some tasks have with the same meaning."""

    name: str
    allowed: str
    meaning: str
    defaults: dict[str, str] = field(default_factory=dict)
    """Task -> the default there; the core's has the name ''."""

    def line(self) -> str:
        """Return the line of the page."""
        values = [*self.defaults.values()]
        most = max(values, key=values.count)
        others = [f"{task} {value}" for task, value in self.defaults.items() if value != most]
        allowed = "; ".join(filter(None, (self.allowed, *others)))
        meaning = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", self.meaning)
        shown = f"* `{self.name}: {most}`" if 0 < len(most) <= LONGEST_DEFAULT else f"* `{self.name}`"
        return shown + (f" ({allowed})" if allowed else "") + (f": {meaning}" if meaning else "")


def page(schemas: Mapping[str, type[Spec]]) -> str:
    """Return the Markdown of the page: the keys of every spec by section, and then those of tasks."""
    parts = [INTRODUCTION]
    core = _sections(Spec, "")
    tops = dict.fromkeys(section[:1] for section in core if section)
    for top in tops:
        parts += [f"## {top[0]}\n", _example(str(top[0]))]
        for section in (section for section in core if section[:1] == top):
            heading = "" if section == top else f"### {dot(section).removesuffix('.0')}\n"
            parts += [heading, _lines(core[section])] if heading else [_lines(core[section])]
    parts += ["## At the top\n", _lines(core[()]), TASKS]
    added: dict[tuple[Keys, tuple[str, ...]], list[Entry]] = {}
    for section, entries in _added(schemas).items():
        for entry in entries:
            added.setdefault((section, tuple(entry.defaults)), []).append(entry)
    parts += ["For example:\n", *(_example(task) for task in schemas if task in EXAMPLES)]
    for (section, tasks), entries in sorted(added.items(), key=lambda item: (-len(item[0][1]), item[0][1])):
        parts += [f"### {dot(section)} of {_joined(tasks)}\n", _lines(entries)]
    return "\n".join(parts)


def _example(name: str) -> str:
    return f"```yaml\n{EXAMPLES[name]}\n```\n" if name in EXAMPLES else ""


def _lines(entries: Sequence[Entry]) -> str:
    return "".join(f"{entry.line()}\n" for entry in entries)


def _joined(tasks: Sequence[str]) -> str:
    return f"{', '.join(tasks[:-1])} and {tasks[-1]}" if len(tasks) > 1 else tasks[0]


def _sections(schema: type[Spec], task: str) -> dict[Keys, list[Entry]]:
    """Return the keys of a schema by section."""
    defaults = schema().model_dump(mode="json")
    found: dict[Keys, list[Entry]] = {}
    for path, key_field in walk(schema):
        nested = model_of(key_field.annotation) is not None
        if nested and path[-1] != ITEMS:
            continue
        if nested:
            default, allowed = "", "list of sections"
        else:
            default = _default(path, key_field, defaults)
            allowed = allowed_values(key_field.annotation, key_field.metadata, default)
        entry = Entry(str(path[-1]), allowed, key_field.description or "", {task: default})
        found.setdefault(path[:-1], []).append(entry)
    return found


def _default(path: Keys, key_field: FieldInfo, defaults: Mapping[str, Any]) -> str:
    if 0 not in path and lookup(defaults, path[:-1]) is not None:
        return flow(lookup(defaults, path))
    # An item of a list, or a section that is null by default.
    return "" if key_field.is_required() else flow(key_field.get_default(call_default_factory=True))


def _added(schemas: Mapping[str, type[Spec]]) -> dict[Keys, list[Entry]]:
    """Return what tasks add; a key that several have with the same meaning is one entry."""
    found: dict[Keys, list[Entry]] = {}
    for task, schema in schemas.items():
        for section, entries in _sections(schema, task).items():
            known = found.setdefault(section, [])
            for entry in entries:
                path = (*section, entry.name)
                if field_at(Spec, path) is not None or (0 in path and field_at(Spec, path[: path.index(0)])):
                    continue
                same = (each for each in known if (each.name, each.meaning) == (entry.name, entry.meaning))
                if (twin := next(same, None)) is not None and twin.allowed == entry.allowed:
                    twin.defaults.update(entry.defaults)
                else:
                    known.append(entry)
    return found


def allowed_values(annotation: Any, metadata: Sequence[Any], default: str) -> str:
    """Return in short what a key may be, as `int > 0` or `` `none|ram` ``; what its default shows is left out."""
    found = list(dict.fromkeys(_allowed(annotation, metadata)))
    if found == ["true", "false"] or (found == ["text"] and default != "null"):
        return ""
    chosen = [word.strip("'") for word in found if word.startswith("'")]
    shown = (default, "text" if chosen else "", {"[": "list", "{": "mapping"}.get(default[:1]))
    others = [word for word in found if not word.startswith("'") and word not in shown]
    if default.isdigit():
        others = [word.removeprefix("int").strip() for word in others if word != "int"]
    if len(chosen) == 1 and chosen[0] == default:
        chosen = []
    return ", ".join([*([f"`{'|'.join(chosen)}`"] if chosen else []), *others])


def _allowed(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _allowed(inner, [*metadata, *extra])
    if origin in (Union, types.UnionType):
        return [word for choice in get_args(annotation) for word in _allowed(choice, metadata)]
    if origin is Literal:
        return [repr(choice) for choice in get_args(annotation)]
    if origin in (list, tuple, Sequence):
        words = [
            word.strip("'") for choice in get_args(annotation) for word in _allowed(choice, ()) if word.startswith("'")
        ]
        return [f"list of `{'|'.join(words)}`" if words else "list"]
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return ["mapping"]
    if annotation in (None, types.NoneType):
        return ["null"]
    if annotation is bool:
        return ["true", "false"]
    word = {int: "int", float: "", str: "text"}.get(annotation, "")
    return (
        [" ".join(filter(None, (word, _bounds(metadata, whole=annotation is int))))]
        if annotation in (int, float, str)
        else []
    )


def _bounds(metadata: Sequence[Any], *, whole: bool) -> str:
    """Return the limits of a number, as `> 0` or `0 to 1`."""
    limits: dict[str, Any] = {}
    for entry in metadata:
        for name in ("gt", "ge", "lt", "le"):
            for part in (entry, *getattr(entry, "metadata", ())):
                if getattr(part, name, None) is not None:
                    limits[name] = _number(getattr(part, name))
    if whole and limits.get("gt") == "0":
        limits = {"ge": "1", **{name: limit for name, limit in limits.items() if name != "gt"}}
    if {"ge", "le"} <= set(limits):
        return f"{limits['ge']} to {limits['le']}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(f"{signs[name]} {value}" for name, value in limits.items())


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    from mtrain.spec.building import Tasks

    PAGE.write_text(page(Tasks().schemas), encoding="utf-8")
