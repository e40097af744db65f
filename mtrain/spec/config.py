"""Read files, environment, ``-o`` and flags into a validated spec that knows the origin of every value.

Precedence: flag > ``-o`` > ``MTRAIN_*`` environment > file > its ``_BASE_`` > defaults of ``plugins.toml`` > default.
This is the only module of ``spec`` that reads ``os.environ``.
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from mtrain.errors import PluginError, SpecError
from mtrain.spec import former_keys, plugins
from mtrain.spec.model import Spec, both_lengths
from mtrain.spec.provenance import Layers, Origin
from mtrain.spec.schema import Problem, dotted, field_at, problems_of
from mtrain.spec.sources import Given, Sources, display, find_config, is_shipped, shipped_names, shortened
from mtrain.spec.suggest import closest, hint
from mtrain.spec.yaml_reader import Path

__all__ = ["Given", "Loaded", "Origin", "debug", "dump", "from_json", "load", "read", "resolved_json", "shipped_names"]

DEMO = "digits"
HERE = "mtrain.yml"
AUTO = "auto"
_PLUGIN_KEYS = (
    ("model", "name", "models"),
    ("data", "format", "datasets"),
    ("backend", "name", "backends"),
    ("cluster", "name", "clusters"),
    ("launcher", "name", "launchers"),
)
"""(section, key, kind of plugin) of the choices of plugins whose ``options`` the section holds."""
_REPLACEABLE = (("backend", "backends"), ("cluster", "clusters"), ("launcher", "launchers"))
"""(section, kind of plugin) of the choices after which options of the former choice are left out."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated spec, with the origin of its values."""

    spec: Spec
    source: str
    """The file that was read, worded for people."""
    path: FilePath | None
    name: str
    """Name of the file without folder and suffix."""
    provenance: Mapping[str, Origin]
    """Origin of each value that was set, by dotted path; a path that is absent has its default."""
    values: Mapping[str, Any]
    """All values of the spec as plain data, defaults included."""
    history: Mapping[str, Sequence[tuple[Any, Origin]]] = field(default_factory=dict)
    """The values that each value replaced, with their origins, by dotted path; the weakest source first."""
    policy: plugins.Policy = field(default_factory=plugins.Policy)
    notes: tuple[str, ...] = ()
    """Sentences on decisions made while reading that the user should know, such as values that were left out."""

    def origin(self, path: str) -> Origin:
        """Return the origin of the value at ``path``, or of the nearest section around it that was set as a whole."""
        return self.provenance.get(path, Origin("default"))


def load(
    path: str | None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Read and validate a spec.

    ``path``: a file, or the name of a shipped config; None: ``./mtrain.yml``, else the embedded demo. ``overrides``:
    texts of the form ``PATH=VALUE``. ``flags``: value or ``Given`` by dotted path. ``environ``: environment variables;
    None: those of the process.

    Raises: ``SpecError`` that lists every mistake of every source, one line each.
    """
    file, source = _locate(path)
    sources = Sources(defaults=Spec().model_dump(mode="json"))
    sources.add_file(file)
    sources.add_environment(os.environ if environ is None else environ)
    sources.add_overrides(overrides)
    sources.add_flags(flags or {})
    policy = _policy(sources, file)
    former_keys.settle(sources, policy)
    dropped = [note for section, kind in _REPLACEABLE for note in _drop_former_options(sources, policy, section, kind)]
    notes = (*sources.notes, *dropped)
    _add_plugin_defaults(sources, policy)
    spec = _validate(sources, policy)
    layers = sources.layers
    return Loaded(
        spec=spec,
        source=source,
        path=file,
        name=file.stem,
        provenance={dotted(key): origin for key, origin in layers.origins.items()},
        values=spec.model_dump(mode="json"),
        history={dotted(key): tuple(entries) for key, entries in layers.history.items()},
        policy=policy,
        notes=notes,
    )


def resolved_json(spec: Spec) -> str:
    """Return the spec as JSON text, with every default written out."""
    return spec.model_dump_json(indent=2) + "\n"


def from_json(text: str, *, name: str = "spec") -> Spec:
    """Return the spec that ``resolved_json`` wrote as ``text``. Raises: ``SpecError`` if the text is not valid."""
    try:
        return Spec.model_validate_json(text)
    except ValidationError as error:
        lines = [f"{name} {dotted(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False)]
        raise SpecError(lines) from None


def dump(spec: Spec, path: str | FilePath) -> None:
    """Write a spec into a file, for the ranks of a job to read."""
    FilePath(path).write_text(resolved_json(spec), encoding="utf-8")


def read(path: str | FilePath) -> Spec:
    """Read a spec that ``dump`` wrote. Raises: ``SpecError`` if the file is missing or holds no valid spec."""
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    return from_json(text, name=str(path))


def debug(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``MTRAIN_DEBUG`` is set, which makes every error show its traceback."""
    return (os.environ if environ is None else environ).get("MTRAIN_DEBUG", "") not in ("", "0")


def _locate(path: str | None) -> tuple[FilePath, str]:
    """Return the file of the spec, and a description of it for people."""
    if path is None:
        here = FilePath(HERE)
        if here.is_file():
            return here.resolve(), f"{HERE} in the current folder"
        return _shipped(DEMO), f"the embedded demo {DEMO!r} (no -c was given and there is no {HERE} here)"
    file = find_config(path)
    if file is not None:
        return file, f"the shipped config {display(file)}" if is_shipped(file) else display(file)
    if os.path.isdir(path):
        raise SpecError(f"{path}: is a folder; give a YAML file in it, or the name of a shipped config")
    parent = FilePath(path).parent
    entries = [*parent.glob("*.yml"), *parent.glob("*.yaml")] if os.path.isdir(parent) else []
    near = [str(parent / entry.name) for entry in entries]
    suggestion = hint(path, [*shipped_names(), *near])
    raise SpecError(f"{shortened(path)}: no such file, and no shipped config of that name{suggestion}")


def _shipped(name: str) -> FilePath:
    file = find_config(f"{name}.yml", beside=FilePath("/nonexistent"))
    if file is None:
        raise SpecError(f"the shipped config {name!r} is missing: the installation of mtrain is incomplete")
    return file


def _policy(sources: Sources, file: FilePath) -> plugins.Policy:
    """Read the plugin policy: the file that the spec names, else one beside the spec, else one in the current folder.

    The path of the file is written into the spec, so that every rank reads the same one.
    """
    named_file = sources.layers.get(("plugins",))
    folder = next((near for near in (file.parent, FilePath()) if (near / plugins.POLICY_FILE).is_file()), None)
    try:
        if isinstance(named_file, str):
            return plugins.read_policy(named_file)
        if folder is not None and not is_shipped(file):
            chosen = str((folder / plugins.POLICY_FILE).resolve())
            sources.layers.assign(("plugins",), chosen, Origin("plugins", file=chosen), sources.defaults)
            return plugins.read_policy(chosen)
        return plugins.read_policy()
    except PluginError as error:
        sources.problems.extend(str(error).splitlines())
        return plugins.Policy()


def _drop_former_options(sources: Sources, policy: plugins.Policy, section: str, kind: str) -> list[str]:
    """Drop options that were set for another plugin of this kind, and return a note on each.

    When a stronger source chooses another plugin, options from weaker sources that it does not have are dropped.
    Unknown options from the same or a stronger source remain and become errors.
    """
    name, chosen = sources.layers.get((section, "name")), sources.layers.origin((section, "name"))
    options = sources.layers.get((section, "options"))
    if not isinstance(name, str) or not isinstance(options, dict) or not _replaced(sources, section, name):
        return []
    try:
        valid_options = {} if name == AUTO else plugins.load(kind, name, policy=policy).Options.model_fields
    except PluginError:
        return []
    paths: list[Path] = [(section, "options", option) for option in options if option not in valid_options]
    foreign = [path for path in paths if sources.layers.origin(path).is_weaker_than(chosen)]
    notes = [
        f"{sources.layers.origin(path)} {dotted(path)}: left out, {name} has no such option ({chosen})"
        for path in foreign
    ]
    for path in foreign:
        sources.layers.drop(path)
    return notes


def _replaced(sources: Sources, section: str, name: str) -> bool:
    """Return whether the strongest source that names a plugin has changed it to ``name`` from another one."""
    former = [value for value, _ in sources.layers.history.get((section, "name"), ())]
    default = field_at(Spec, (section, "name"))
    return (former[-1] if former else default.default if default is not None else None) != name


def _add_plugin_defaults(sources: Sources, policy: plugins.Policy) -> None:
    """Set the default options of ``plugins.toml`` that no source has set."""
    for section, key, kind in _PLUGIN_KEYS:
        name = _given_or_default(sources, (section, key))
        defaults = policy.of(kind, name).options if isinstance(name, str) else {}
        for option, value in defaults.items():
            path: Path = (section, "options", option)
            options = sources.layers.get(path[:2])
            is_free = options is None or (isinstance(options, dict) and option not in options)
            if is_free and not former_keys.sets_option(sources, path):
                origin = Origin("plugins", text=f"{plugins.POLICY_FILE} [{kind}.{name}]")
                sources.layers.assign(path, value, origin, sources.defaults)


def _validate(sources: Sources, policy: plugins.Policy) -> Spec:
    """Return the validated spec, or raise ``SpecError`` with the problems of all sources."""
    values = sources.layers.values
    spec, problems = _try(values)
    if spec is None and _repair(sources, problems):
        spec, problems = _try(values)
    lengths = [sources.layers.get(("train", key)) for key in ("epochs", "updates")]
    if None not in lengths:  # The error is reported at `train.updates`, where its line is known, instead of at `train`.
        problems = [problem for problem in problems if problem.path != ("train",) or problem.kind != "value_error"]
        problems.append(Problem(("train", "updates"), both_lengths(*lengths), "value_error"))
    problems += _plugin_problems(sources, policy)
    if spec is None or problems or sources.problems:
        problems.sort(key=lambda problem: _place(sources.layers.origin(problem.path)))
        lines = [_line(sources.layers, problem) for problem in problems]
        raise SpecError(list(dict.fromkeys([*sources.problems, *lines])))
    return spec


def _place(origin: Origin) -> tuple[bool, str, int]:
    """Return a key that sorts origins in files first, by file and line, and then those without a file."""
    return origin.file is None, origin.file or "", origin.line or 0


def _try(values: Mapping[str, Any]) -> tuple[Spec | None, list[Problem]]:
    try:
        return Spec.model_validate(deepcopy(values)), []
    except ValidationError as error:
        return None, problems_of(error, Spec, values)


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
    origin = layers.origin(problem.path)
    where = dotted(problem.path)
    if origin.file is not None:
        return f"{origin} {where}: {problem.message}"
    if origin.kind in ("override", "environment"):
        key = origin.text.removeprefix("-o ").partition("=")[0].strip()
        plain = origin.kind == "environment" or key == where
        return f"{origin.text}: {problem.message}" if plain else f"{origin.text}: {where}: {problem.message}"
    return f"{f'{origin.text}: ' if origin.text else ''}{where}: {problem.message}"


def _plugin_problems(sources: Sources, policy: plugins.Policy) -> list[Problem]:
    """Return the problems with the names of plugins and with their options."""
    problems = []
    for section, key, kind in _PLUGIN_KEYS:
        name = _given_or_default(sources, (section, key))
        options = sources.layers.get((section, "options"))
        if not isinstance(name, str):
            continue
        if kind in ("clusters", "launchers") and name == AUTO:
            problems += _options_without_plugin(section, options)
            continue
        try:
            plugins.find(kind, name, policy=policy)
            # The options of a launcher are validated with the plan, which adds most of them.
            if kind != "launchers" and isinstance(options, dict) and options:
                plugins.options(kind, name, options, path=f"{section}.options", policy=policy)
        except PluginError as error:
            problems.append(Problem((section, key), str(error), "plugin"))
        except SpecError as error:
            for text in error.problems:
                where, _, message = text.partition(": ")
                problems.append(Problem(_keys(where), message, "option"))
    return problems + _unknown_launcher(sources, policy)


def _options_without_plugin(section: str, options: Any) -> list[Problem]:
    keys = list(options) if isinstance(options, dict) else []
    message = f"{section}.name is auto, which has no options; name the {section}"
    return [Problem((section, "options", key), message, "option") for key in keys]


def _unknown_launcher(sources: Sources, policy: plugins.Policy) -> list[Problem]:
    """Return the problem with a value of ``cluster.launcher`` that is neither a cluster nor a launcher."""
    name = sources.layers.get(former_keys.LAUNCHER)  # A known name has been moved to the key that it stands for.
    if not isinstance(name, str):
        return []
    entries = [*plugins.names("clusters", policy=policy), *plugins.names("launchers", policy=policy)]
    usable = [entry.name for entry in entries if entry.enabled]
    message = f"no launcher or cluster {name!r} (known: {', '.join(usable)})"
    best = closest(name, usable)
    return [Problem(former_keys.LAUNCHER, message + (f"; did you mean {best!r}?" if best else ""), "plugin")]


def _keys(where: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in where.split("."))


def _given_or_default(sources: Sources, path: Path) -> Any:
    value = sources.layers.get(path)
    if value is not None:
        return value
    schema_field = field_at(Spec, path)
    return schema_field.default if schema_field is not None else None
