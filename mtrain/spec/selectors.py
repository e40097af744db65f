"""Leave out what was given for a former choice: one rule for every value of a spec that chooses what other keys mean.

Such a selector is a plugin's name, which decides on its options, or the task, which decides on sections. What a weaker
source gave for the former choice and the new one does not know is left out, with a note. What the same or a stronger
source gave stays, and is an error.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic.fields import FieldInfo

from mtrain.errors import PluginError
from mtrain.spec import plugins, references
from mtrain.spec.building import DATA, MODEL, Tasks, default_at, task_of
from mtrain.spec.model import Spec
from mtrain.spec.plugin_kinds import SELECTORS, Selector
from mtrain.spec.provenance import Layers, Origin
from mtrain.spec.registry import Registry
from mtrain.spec.schema import dot, field_at, keys_at, model_of, walk
from mtrain.spec.section import Off
from mtrain.spec.yaml_reader import Path, flow

OF_A_FORMAT: Sequence[Path] = (("data", "train"), ("data", "val"), ("data", "images"))
"""Paths that every data format knows and each reads in its own way."""
POLICY: Path = ("plugins",)
CODE_OF_A_RUN: Mapping[Path, str] = {
    ("backend", "python"): "a program",
    ("cluster", "options", "python"): "a program",
    ("cluster", "options", "setup"): "lines for a shell",
    POLICY: "plugins",
}
"""Paths that name code other than by a reference -> what they name."""
MOST_NAMED = 8
"""Largest number of values that one note names."""


LENGTHS_OF_WARMUP: Sequence[Path] = (("schedule", "warmup", "epochs"), ("schedule", "warmup", "updates"))
"""Two ways to say one thing; a source that gives both means the larger one."""


def settle_lengths(layers: Layers) -> None:
    """Let a length of the warm-up take the place of one in the other unit that a weaker source gave."""
    # The longer of both counts, so a default of the other unit would lengthen what the user has shortened.
    weaker, stronger = sorted(LENGTHS_OF_WARMUP, key=layers.number)
    if None not in (layers.get(weaker), layers.get(stronger)) and layers.number(weaker) < layers.number(stronger):
        layers.assign(weaker, None, layers.origin(stronger), {})


def settle_options(layers: Layers, *, registry: Registry) -> list[str]:
    """Leave out the options of former plugins, and the paths of a former data format; return a note for each choice."""
    notes = []
    for selector in SELECTORS:
        chosen = layers.get(selector.path)
        if not isinstance(chosen, str):
            continue
        former, replaced, origin = _former(layers, selector.path)
        if former is None:
            continue
        stale = [
            path for path in _unknown_options(layers, selector, chosen, registry) if _is_weaker(layers, path, origin)
        ]
        if selector.path == DATA and replaced is not None:
            stale = [
                path for path in OF_A_FORMAT if layers.get(path) is not None and _is_weaker(layers, path, origin)
            ] + stale
        if stale:
            notes.append(_left_out(layers, stale, f"{dot(selector.path)} {former}; it is {chosen} now ({origin})"))
    return notes


def _unknown_options(layers: Layers, selector: Selector, name: str, registry: Registry) -> list[Path]:
    options = layers.get(selector.options)
    if not isinstance(options, dict):
        return []
    try:
        valid_options = {} if name == selector.unset else registry.load(selector.kind, name).Options.model_fields
    # A plugin that cannot be loaded is reported by the validation, with the line of its name.
    except PluginError:
        return []
    return [(*selector.options, option) for option in options if option not in valid_options]


def _former(layers: Layers, path: Path) -> tuple[Any, Origin | None, Origin]:
    """Return the value that the present one of ``path`` replaced, its origin, and that of the replacement.

    The default counts as the weakest value, with the origin None. The value is None where the present one is the
    default and no other was given.
    """
    values: list[tuple[Any, Origin | None]] = [(default_at(path), None), *layers.choices(path)]
    position = len(values) - 1
    # A source that repeats the name chooses nothing anew: what was given for it meanwhile still fits.
    while position and values[position - 1][0] == values[-1][0]:
        position -= 1
    former, replaced = values[position - 1] if position else (None, None)
    return former, replaced, values[position][1] or Origin("default")


def _is_weaker(layers: Layers, path: Path, origin: Origin) -> bool:
    return layers.origin(path).level < origin.level


def _left_out(layers: Layers, paths: Sequence[Path], reason: str) -> str:
    """Drop ``paths``, and return the note on it."""
    places = [f"{dot(path)} ({layers.origin(path)})" for path in paths[:MOST_NAMED]]
    if len(paths) > MOST_NAMED:
        places.append(f"and {len(paths) - MOST_NAMED} more")
    for path in paths:
        _drop(layers, path)
    return f"{', '.join(places)}: left out, {'was' if len(paths) == 1 else 'were'} given for {reason}"


def _drop(layers: Layers, path: Path) -> None:
    """Drop a value, and every section around it that has become empty by it."""
    layers.drop(path)
    while len(path) > 1 and layers.get(path[:-1]) == {}:
        path = path[:-1]
        layers.drop(path)


def settle_task(layers: Layers, schema: type[Spec], *, tasks: Tasks) -> list[str]:
    """Leave out keys of other tasks than the job's; return notes on those that had an effect.

    Args:
        layers: The merged sources.
        schema: The schema of the job.
        tasks: The installed tasks.
    """
    active = []
    for path, owners in list(_foreign(layers.values, schema, tasks)):
        # A key that is switched off asks for nothing, so it is left out without a note.
        if any(_is_off(layers.get(path), key_field) for key_field in owners.values()):
            _drop(layers, path)
        else:
            active.append(path)
    if not active:
        return []
    level, former = _former_task(layers, schema.task, tasks.registry)
    stale = [path for path in active if layers.origin(path).level < level]
    if not stale:
        return []
    origins = [layers.origin(path) for path in (DATA, MODEL)]
    origin = next((origin for origin in origins if origin.level == level), origins[0])
    return [_left_out(layers, stale, f"the task {former}; it is {schema.task} now ({origin})")]


def _foreign(
    values: Mapping[str, Any], schema: type[Spec], tasks: Tasks, prefix: Path = ()
) -> Iterator[tuple[Path, Mapping[str, FieldInfo]]]:
    """Yield the path of each value that ``schema`` does not have and other tasks do, with their keys by task."""
    for key, value in values.items():
        path = (*prefix, key)
        if field_at(schema, path) is not None:
            if isinstance(value, dict) and keys_at(schema, path):
                yield from _foreign(value, schema, tasks, path)
            continue
        owners = tasks.owners(path)
        if isinstance(value, dict) and value and any(model_of(owner.annotation) for owner in owners.values()):
            yield from _foreign(value, schema, tasks, path)
        elif owners:
            yield path, owners


def _is_off(value: Any, key_field: FieldInfo) -> bool:
    """Return whether a value switches its key off; a key that says no other value is off at its default."""
    default = key_field.get_default(call_default_factory=True)
    off = next((entry.value for entry in key_field.metadata if isinstance(entry, Off)), default)
    return bool(value == off) or value == {}


def _former_task(layers: Layers, task: str, registry: Registry) -> tuple[int, str]:
    """Return the level since which the job is of ``task``, and the task before; level 0: it has always been."""
    level = layers.level
    while level and _task_as_of(layers, level - 1, registry) == task:
        level -= 1
    return level, _task_as_of(layers, level - 1, registry) if level else ""


def _task_as_of(layers: Layers, level: int, registry: Registry) -> str:
    """Return the task of the layers up to ``level``; "unknown" where it cannot be found."""
    values: dict[str, Any] = {}
    for section, key in (MODEL, DATA):
        choices = [value for value, origin in layers.choices((section, key)) if origin.level <= level]
        values[str(section)] = {key: choices[-1] if choices else None}
    try:
        return task_of(values, registry=registry)
    except PluginError:
        return "unknown"


def refuse_code_of_a_run(layers: Layers, file: FilePath, is_of_run: Callable[[Origin], bool]) -> list[str]:
    """Return a line for each program or policy of plugins that nothing but a run folder names."""
    problems = []
    for path, what in CODE_OF_A_RUN.items():
        value = layers.get(path)
        # A policy in the current folder is the user's own, also where the run folder names it.
        own = path == POLICY and value == str((FilePath() / plugins.POLICY_FILE).resolve()) != str(
            (file.parent / plugins.POLICY_FILE).resolve()
        )
        if value and isinstance(value, str | list) and is_of_run(layers.origin(path)) and not own:
            problems.append(_refuse_untrusted(layers.origin(path), path, what, value))
    # A policy beside the spec is read without being named, so it is refused where it only exists.
    beside = file.parent / plugins.POLICY_FILE
    if is_of_run(Origin("file", file=str(file))) and layers.get(POLICY) is None and os.path.lexists(beside):
        problems.append(_refuse_untrusted(Origin("file", file=str(beside)), POLICY, "plugins", str(beside)))
    return problems


def _refuse_untrusted(origin: Origin, path: Path, what: str, value: Any) -> str:
    named = value if isinstance(value, str) else flow(value)
    return (
        f"{origin} {dot(path)}: names {what}, {named}, and a run folder is not trusted to run code; give the spec that "
        f"names it with -c, or name it yourself: -o {_override(path, value)}"
    )


def settle_references(layers: Layers, schema: type[Spec], *, is_of_run: Callable[[Origin], bool]) -> list[str]:
    """Make the paths in references to the user's own code absolute; return a line for each that is refused.

    A path is taken from the folder of the file that names it, or from the current folder where the command line or the
    environment does.
    """
    problems = []
    for path, key_field in walk(schema):
        marks = [entry for entry in key_field.metadata if isinstance(entry, references.May)]
        if not marks:
            continue
        files = marks[0].files
        value = layers.get(path)
        texts = {path: value} if isinstance(value, str) else {}
        if isinstance(value, list):
            texts = {(*path, place): text for place, text in enumerate(value)}
        if isinstance(value, dict):
            texts = {(*path, name): name for name, options in value.items() if options is not False}
        for place, text in texts.items():
            is_file = isinstance(text, str) and bool(files) and text.lower().endswith(files)
            if not isinstance(text, str) or not (is_file or references.is_reference(text)):
                continue
            origin = layers.origin(place)
            # A spec in a run folder runs no code that only it names: such a folder
            # may come from somebody else. A file of a pipeline holds no code.
            if is_of_run(origin) and not is_file:
                problems.append(
                    f"{origin} {dot(place)}: names code, {text}, and a run folder is not trusted to run code; give the "
                    f"spec that names it with -c, or name it yourself: -o {_override(path, value)}"
                )
                continue
            folder = FilePath() if origin.file is None else FilePath(origin.file).parent
            anchored = references.make_absolute(text, folder, files=files)
            if isinstance(value, dict):
                _rename(layers, place, anchored)
            else:
                _replace(layers, place, anchored)
    return problems


def _override(path: Path, value: Any) -> str:
    return f"{dot(path)}={value}" if isinstance(value, str) else f"'{dot(path)}={flow(value)}'"


def _rename(layers: Layers, path: Path, name: str) -> None:
    """Give the value at ``path`` another key, in the same place of its mapping; its origin stays."""
    container: Any = layers.values
    for key in path[:-1]:
        container = container[key]
    items = [(name if key == path[-1] else key, value) for key, value in container.items()]
    container.clear()
    container.update(items)
    renamed = (*path[:-1], name)
    for below in [other for other in layers.origins if other[: len(path)] == path]:
        layers.origins[(*renamed, *below[len(path) :])] = layers.origins.pop(below)


def _replace(layers: Layers, path: Path, value: Any) -> None:
    """Set a value that exists; its origin stays."""
    container: Any = layers.values
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
