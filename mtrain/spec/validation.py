"""Validate the merged sources of a spec, and word every mistake with the place of its value."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from mtrain.errors import PluginError, SpecError
from mtrain.spec.building import Tasks
from mtrain.spec.model import Spec
from mtrain.spec.plugin_kinds import REPORTERS, SELECTORS, Selector
from mtrain.spec.provenance import Layers, Origin, lookup
from mtrain.spec.registry import Registry
from mtrain.spec.schema import Problem, dot, problems_of
from mtrain.spec.sources import Sources
from mtrain.spec.training import both_lengths
from mtrain.spec.yaml_reader import Path

MAX_REPORTERS = 32
"""Most reporters that a spec may name."""


def validate(sources: Sources, tasks: Tasks, schema_problem: Problem | None) -> Spec:
    """Return the validated spec, or raise ``SpecError`` with the problems of all sources.

    ``schema_problem``: why the schema of the job is not known. Keys of any task are then taken to be right.
    """
    schema = sources.schema
    values = sources.layers.values
    spec, problems = _try(values, schema)
    # A second time, because only pydantic knows which type a key needs.
    if spec is None and _repair(sources, problems):
        spec, problems = _try(values, schema)
    lengths = [sources.layers.get(("train", key)) for key in ("epochs", "updates")]
    if None not in lengths:  # The error is reported at `train.updates`, where its line is known, instead of at `train`.
        problems = [problem for problem in problems if problem.path != ("train",) or problem.kind != "value_error"]
        problems.append(Problem(("train", "updates"), both_lengths(*lengths), "value_error"))
    problems = list(_named_owners(problems, schema, tasks))
    problems += _plugin_problems(sources, tasks.registry)
    if schema_problem is not None and not any(problem.path == schema_problem.path for problem in problems):
        problems.append(schema_problem)
    if spec is None or problems or sources.problems:
        problems.sort(key=lambda problem: _place(sources.layers.origin(problem.path)))
        lines = [_line(sources.layers, problem) for problem in problems]
        raise SpecError(list(dict.fromkeys([*sources.problems, *lines])))
    return spec


def _named_owners(problems: Sequence[Problem], schema: type[Spec], tasks: Tasks) -> Iterator[Problem]:
    """Say of an unknown key that another task has, whose it is.

    Where the job's task is not known, an unknown key is no problem if the task may bring it.
    """
    for problem in problems:
        if problem.kind != "extra_forbidden":
            yield problem
        elif schema.task:
            owners = " or ".join(tasks.owners(problem.path))
            message = f"unknown key: it belongs to the task {owners}, and this job's task is {schema.task}"
            yield replace(problem, message=message) if owners else problem
        elif len(problem.path) > 1 and problem.path[0] not in tasks.extended_sections:
            yield problem


def _place(origin: Origin) -> tuple[bool, str, int]:
    """Return a key that sorts origins in files first, by file and line, and then those without a file."""
    return origin.file is None, origin.file or "", origin.line or 0


def _try(values: Mapping[str, Any], schema: type[Spec]) -> tuple[Spec | None, list[Problem]]:
    try:
        return schema.model_validate(deepcopy(values)), []
    except ValidationError as error:
        return None, problems_of(error, schema, values)


def _repair(sources: Sources, problems: Sequence[Problem]) -> bool:
    """Convert values from ``-o`` and the environment to the type that the schema requires; return whether any was.

    Where text is required, the text as it was typed is used instead of the number or truth value that YAML makes of it.
    Where a list is required, a single item becomes a list of one.
    """
    repaired = False
    for problem in problems:
        origin = sources.layers.origin(problem.path)
        if origin.kind not in ("override", "environment"):
            continue
        if problem.kind == "string_type" and not isinstance(problem.given, dict | list):
            text = sources.raw.get(problem.path, str(problem.given))
        elif problem.kind == "string_type" and problem.path in sources.raw:
            text = sources.raw[problem.path]
        elif problem.kind == "list_type" and not isinstance(problem.given, dict):
            text = None
        else:
            continue
        value = [problem.given] if text is None else text
        sources.layers.assign(problem.path, value, origin, sources.defaults)
        # The conversion replaced the value by itself, so its entry in the history would mislead.
        sources.layers.history[problem.path].pop()
        repaired = True
    return repaired


def _line(layers: Layers, problem: Problem) -> str:
    """Return the message for one problem, with the file and line, or the text, in which its value was set."""
    origin = _blame(layers, problem)
    where = dot(problem.path)
    if origin.file is not None and not origin.text:
        return f"{origin} {where}: {problem.message}"
    if origin.kind in ("override", "environment"):
        plain = origin.kind == "environment" or _typed_key(origin) == where
        return f"{origin}: {problem.message}" if plain else f"{origin}: {where}: {problem.message}"
    return f"{f'{origin}: ' if origin.text else ''}{where}: {problem.message}"


def _blame(layers: Layers, problem: Problem) -> Origin:
    """Return where the value was set that a problem is about.

    Of a section, that is the key which the message names, the one that was set last.
    """
    origin, section = layers.origin(problem.path), layers.get(problem.path)
    if isinstance(section, dict):
        named = [(*problem.path, key) for key in re.findall(r"\w+", problem.message) if key in section]
        if named:
            return max(map(layers.origin, named), key=lambda each: each.level)
    elif layers.is_set(problem.path):
        return origin
    # What was typed for one key is not to blame for another one of its section.
    key = _typed_key(origin)
    return origin if origin.file is not None or f"{dot(problem.path)}.".startswith(f"{key}.") else Origin("default")


def _typed_key(origin: Origin) -> str:
    """Return the key that was typed to set a value, with dots."""
    key = origin.text.removeprefix("-o ").partition("=")[0].strip()
    return key.removeprefix("MTRAIN_").replace("__", ".").lower() if origin.kind == "environment" else key


def _plugin_problems(sources: Sources, registry: Registry) -> list[Problem]:
    """Return the problems with the names of plugins and with their options."""
    problems = []
    for selector in SELECTORS:
        name = given_or_default(sources, selector.path)
        options = sources.layers.get(selector.options)
        if not isinstance(name, str):
            continue
        if name == selector.unset:
            problems += _options_without_plugin(selector, options)
            continue
        given = options if not selector.planned and isinstance(options, dict) and options else None
        problems += _problems_with(registry, selector.kind, name, given, place=selector.path, section=selector.options)
    return problems + _reporter_problems(sources, registry)


def _reporter_problems(sources: Sources, registry: Registry) -> list[Problem]:
    """Return the problems with the names of reporters and with their options."""
    named = sources.layers.get(REPORTERS)
    if not isinstance(named, dict):
        return []
    if len(named) > MAX_REPORTERS:
        return [Problem(REPORTERS, f"{len(named)} reporters are named; at most {MAX_REPORTERS} can be", "plugin")]
    problems = []
    for name, options in named.items():
        path: Path = (*REPORTERS, str(name))
        given = options if isinstance(options, dict) else None
        problems += _problems_with(registry, "reporters", str(name), given, place=path, section=path)
    return problems


def _problems_with(
    registry: Registry, kind: str, name: str, options: dict[str, Any] | None, *, place: Path, section: Path
) -> list[Problem]:
    """Return the problems with a plugin, named at ``place``, and with its options in ``section``; None: they are not looked at."""
    try:
        registry.find(kind, name)
        if options is not None:
            registry.options(kind, name, options, path="options")
    except PluginError as error:
        return [Problem(place, str(error), "plugin")]
    except SpecError as error:
        parts = [text.partition(": ") for text in error.problems]
        return [Problem((*section, *_keys(where)[1:]), message, "option") for where, _, message in parts]
    return []


def _options_without_plugin(selector: Selector, options: Any) -> list[Problem]:
    keys = list(options) if isinstance(options, dict) else []
    message = f"{dot(selector.path)} is {selector.unset}, which has no options; name the {selector.path[0]}"
    return [Problem((*selector.options, key), message, "option") for key in keys]


def _keys(where: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in where.split("."))


def given_or_default(sources: Sources, path: Path) -> Any:
    """Return the value that was set at ``path``; the default if none was."""
    value = sources.layers.get(path)
    return lookup(sources.defaults, path) if value is None else value
