"""Read files, environment, ``-o`` and flags into a validated spec that knows the origin of every value.

Precedence: flag > ``-o`` > ``MTRAIN_*`` environment > file > its ``_BASE_`` > defaults of ``plugins.toml`` > default.
This is the only module of ``spec`` that reads ``os.environ``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from mtrain.errors import PluginError, SpecError
from mtrain.spec import outputs, plugins
from mtrain.spec.building import DATA, MODEL, Tasks, schema_of, task_of
from mtrain.spec.files import MAX_OWN_BYTES, read_text
from mtrain.spec.model import Spec
from mtrain.spec.plugin_kinds import SELECTORS
from mtrain.spec.provenance import Layers
from mtrain.spec.provenance import Origin as Origin
from mtrain.spec.registry import Registry
from mtrain.spec.resolved import Resolved
from mtrain.spec.run_spec import check_whole, is_of_a_run
from mtrain.spec.schema import Problem, dot
from mtrain.spec.selectors import (
    refuse_code_of_a_run,
    settle_lengths,
    settle_options,
    settle_references,
    settle_task,
)
from mtrain.spec.sources import Files, Sources, display, find_config, is_shipped, shorten
from mtrain.spec.sources import Given as Given
from mtrain.spec.sources import shipped_names as shipped_names
from mtrain.spec.suggest import hint
from mtrain.spec.trial import Trial
from mtrain.spec.validation import given_or_default, validate
from mtrain.spec.yaml_reader import Path

Source = str | Mapping[str, Any] | None
"""A spec to read: a file, the name of a shipped config, or its values as Python has them; None: the default one."""
DEMO = "digits"
HERE = "mtrain.yml"
IN_CODE = "spec"
"""Name of a spec that was written in Python, for messages and for its run folder."""


class ScriptSpec(str):
    """Path of the spec of a script's job, which may be a file that says where a script runs and not what is trained."""

    __slots__ = ()


class RunSpec(str):
    """Path of the spec in a folder that was named as a run's, whether or not mtrain has written the folder."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunValues:
    """Values that were chosen for the run that is resumed: a source above all but the command line."""

    file: str
    """The spec in the run folder."""
    values: Mapping[str, Any]
    """By dotted path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCall:
    """A user's own training script, and how it is called."""

    path: FilePath
    arguments: tuple[str, ...]
    digest: str
    """SHA-256 of the script, which must be the same on all hosts."""
    outside_paths: tuple[str, ...]
    """Paths of the spec that the user has set; the script may not set them to other values."""
    trial: Trial | None = None
    """What ``mtrain compare`` changes about the script's training; None: it runs as it is."""
    knows_mtrain: bool = True
    """Whether the script imports mtrain, so that it trains in a session; else mtrain sees nothing of its training."""


@dataclass(frozen=True)
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
    registry: Registry = field(default_factory=Registry)
    """The plugins that may load."""
    notes: tuple[str, ...] = ()
    """Sentences on decisions made while reading that the user should know, such as values that were left out."""
    script: ScriptCall | None = None
    """The script that the ranks run, for ``mtrain run``."""

    @cached_property
    def job(self) -> Resolved:
        """Return the spec with the plugins that it names."""
        return Resolved(self.spec, self.registry)

    def origin(self, path: str) -> Origin:
        """Return the origin of the value at ``path``, or of the nearest section around it that was set as a whole."""
        return self.provenance.get(path, Origin("default"))


def load(
    path: "Source | Files",
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    run: RunValues | None = None,
    folder_file: FilePath | None = None,
) -> Loaded:
    """Read and validate a spec.

    ``path``: a file, the name of a shipped config, the values of a spec, whose relative paths are taken from the current folder,
    or files that were read; None: ``./mtrain.yml``, else the embedded demo. A file of another project that an importer knows is
    imported, and what changes by it is in the notes. ``overrides``: texts of the form ``PATH=VALUE``. ``flags``: value
    or ``Given`` by dotted path. ``environ``: environment variables; None: those of the process. ``run``: values that were
    chosen for the run that is resumed. ``folder_file``: the file of a folder, perhaps somebody else's, that holds the values of
    ``path`` and ``flags``; code that they name is refused.

    Raises: ``SpecError`` that lists every mistake of every source, one line each.
    """
    imported: Sequence[str] = ()
    if isinstance(path, Files):
        file, source, files = folder_file or FilePath.cwd() / IN_CODE, path.laid[0].name, path
    elif isinstance(path, Mapping):
        file, source = folder_file or FilePath.cwd() / IN_CODE, "a spec written in Python"
        files = Files.written_in_code(path, file)
    else:
        file, source = _locate(path)
        files = Files.read(file)
        if not isinstance(path, RunSpec) and not is_shipped(file) and files.seem_foreign():
            from mtrain.spec.importers import translation  # a spec has no need of it

            taken = translation.take(file, overrides, is_script=isinstance(path, ScriptSpec))
            if taken is not None:
                files, overrides, imported = taken.files, taken.overrides, taken.imported.summary()
    inputs = _Inputs(files, os.environ if environ is None else environ, run, overrides, flags or {})
    # Merged twice: which keys are known depends on the task, which
    # model and data set tell, whose names are in the values.
    first = inputs.merge(Spec)
    is_spec_of_run = isinstance(path, RunSpec) or is_of_a_run(file)
    if is_spec_of_run:
        check_whole(files, file)
    is_any = folder_file is not None and not isinstance(path, Files)
    is_of_run = partial(_is_of_run, is_spec_of_run=is_spec_of_run, is_any=is_any)
    # A run folder may come from somebody else, and naming code in it would be running that code.
    if untrusted := refuse_code_of_a_run(first.layers, file, is_of_run):  # before anything that it names is read
        raise SpecError(untrusted)
    policy, policy_file, policy_problems = _policy(first.layers, file)
    registry = Registry(policy)
    tasks = Tasks(registry)
    schema, schema_problem = _schema(first.layers, registry)
    sources = inputs.merge(schema, tasks)
    sources.problems.extend(policy_problems)
    layers = sources.layers
    if policy_file is not None:
        # Written into the spec, so that ranks in other folders read the same policy.
        layers.assign(("plugins",), policy_file, Origin("plugins", file=policy_file), sources.defaults)
    # The demo must run with whichever framework is installed; a spec of the user means the backend that it names.
    notes = settle_backend(layers, registry, sources.defaults) if path is None and is_shipped(file) else []
    sources.problems.extend(settle_references(layers, schema, is_of_run=is_of_run))
    settle_lengths(layers)
    notes += settle_options(layers, registry=registry)
    if schema_problem is None:
        notes += settle_task(layers, schema, tasks=tasks)
    # After all sources, because only they say which plugins are used.
    _add_plugin_defaults(sources, policy)
    spec = validate(sources, tasks, schema_problem)
    return Loaded(
        spec=spec,
        source=source,
        path=None if isinstance(path, Mapping | Files) else file,
        name=file.stem,
        provenance={dot(key): origin for key, origin in layers.origins.items()},
        values=spec.model_dump(mode="json"),
        history={dot(key): tuple(entries) for key, entries in layers.history.items()},
        registry=registry,
        notes=(*imported, *notes),
    )


def with_values(loaded: Loaded, values: Mapping[str, tuple[Any, Origin]], *, notes: Sequence[str] = ()) -> Loaded:
    """Return ``loaded`` with values that were found after reading: dotted path -> (value, where it comes from).

    Raises: ``SpecError`` if a value is not valid.
    """
    # Validated anew, so that a value that was found is held to the same rules as one that was given.
    plain = loaded.spec.model_dump(mode="json")
    provenance, history = dict(loaded.provenance), dict(loaded.history)
    for path, (value, origin) in values.items():
        *sections, key = path.split(".")
        section = plain
        for name in sections:
            section = section[name]
        if path in provenance:
            history[path] = (*history.get(path, ()), (section[key], provenance[path]))
        section[key] = value
        children = range(len(value)) if isinstance(value, list) else ()
        provenance |= {path: origin, **{f"{path}.{index}": origin for index in children}}
    origins = ", ".join(dict.fromkeys(str(origin) for _, origin in values.values()))
    spec = from_json(json.dumps(plain), name=f"{origins}:")
    return replace(
        loaded,
        spec=spec,
        values=spec.model_dump(mode="json"),
        provenance=provenance,
        history=history,
        notes=(*loaded.notes, *notes),
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All sources of a spec, which are merged twice: to find the job's schema, and with it."""

    files: Files
    environ: Mapping[str, str]
    run: RunValues | None
    overrides: Sequence[str]
    flags: Mapping[str, Any]

    def merge(self, schema: type[Spec], tasks: Tasks | None = None) -> Sources:
        """Merge the sources. Without ``tasks``, variables of the environment are not checked."""
        sources = Sources(schema, is_known=lambda path: tasks is None or bool(tasks.owners(path)))
        sources.add_files(self.files)
        sources.add_environment(self.environ)
        if self.run is not None:
            sources.add_run(self.run.values, self.run.file)
        sources.add_command_line(self.overrides, self.flags)
        return sources


def _schema(layers: Layers, registry: Registry) -> tuple[type[Spec], Problem | None]:
    """Return the schema of the job; the core's, and the problem, if its task cannot be found."""
    try:
        return schema_of(task_of(layers.values, registry=registry), registry=registry), None
    except PluginError as error:
        return Spec, Problem(MODEL if layers.get(DATA) is None else DATA, str(error), "plugin")


def _is_of_run(origin: Origin, *, is_spec_of_run: bool, is_any: bool) -> bool:
    """Return whether nothing but a folder says so: its spec, or what it says was chosen for the run; ``is_any``: all is of one."""
    return is_any or origin.kind == "run" or (is_spec_of_run and origin.file is not None)


def resolved_json(spec: Spec) -> str:
    """Return the spec as JSON text, with every default written out."""
    return spec.model_dump_json(indent=2) + "\n"


def from_json(text: str, *, name: str = "spec") -> Spec:
    """Return the spec that ``resolved_json`` wrote as ``text``.

    Raises: ``SpecError`` if the text is not valid, ``PluginError`` if the task of the spec cannot be found.
    """
    try:
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            return Spec.model_validate(values)
        named_file = values.get("plugins")
        registry = Registry.read(named_file if isinstance(named_file, str) else None)
        schema = schema_of(task_of(values, registry=registry), registry=registry)
        return schema.model_validate(values)
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise SpecError(f"{name}: not valid JSON: {error}") from None
        lines = [f"{name} {dot(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False)]
        raise SpecError(lines) from None


def dump(spec: Spec, path: str | FilePath) -> None:
    """Write a spec into a file, for the ranks of a job to read."""
    outputs.write_text(FilePath(path), resolved_json(spec))


def read(path: str | FilePath) -> Spec:
    """Read a spec that ``dump`` wrote. Raises: ``SpecError`` if the file is missing or holds no valid spec."""
    try:
        text = read_text(FilePath(path), limit=MAX_OWN_BYTES)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from error
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
        return _shipped_file(DEMO), f"the embedded demo {DEMO!r} (no -c was given and there is no {HERE} here)"
    file = find_config(path)
    if file is not None:
        return file, f"the shipped config {display(file)}" if is_shipped(file) else display(file)
    if os.path.isdir(path):
        raise SpecError(f"{path}: is a folder; give a YAML file in it, or the name of a shipped config")
    parent = FilePath(path).parent
    entries = [*parent.glob("*.yml"), *parent.glob("*.yaml")] if os.path.isdir(parent) else []
    near = [str(parent / entry.name) for entry in entries]
    suggestion = hint(path, [*shipped_names(), *near])
    raise SpecError(f"{shorten(path)}: no such file, and no shipped config of that name{suggestion}")


def _shipped_file(name: str) -> FilePath:
    file = find_config(f"{name}.yml", beside=FilePath("/nonexistent"))
    if file is None:
        raise SpecError(f"the shipped config {name!r} is missing: the installation of mtrain is incomplete")
    return file


def _policy(layers: Layers, file: FilePath) -> tuple[plugins.Policy, str | None, list[str]]:
    """Read the plugin policy: the file that the spec names, else one beside the spec, else one in the current folder.

    Returns: the policy, its file where the spec does not name it, so that it can be written into the spec and every rank
    reads the same one, and what is wrong with it.
    """
    named_file = layers.get(("plugins",))
    folder = next((near for near in (file.parent, FilePath()) if (near / plugins.POLICY_FILE).is_file()), None)
    try:
        if isinstance(named_file, str):
            return plugins.read_policy(named_file), None, []
        if folder is not None and not is_shipped(file):
            chosen = str((folder / plugins.POLICY_FILE).resolve())
            return plugins.read_policy(chosen), chosen, []
        return plugins.read_policy(), None, []
    except PluginError as error:
        return plugins.Policy(), None, str(error).splitlines()


def _add_plugin_defaults(sources: Sources, policy: plugins.Policy) -> None:
    """Set the default options of ``plugins.toml`` that no source has set."""
    for selector in SELECTORS:
        name = given_or_default(sources, selector.path)
        defaults = policy.of(selector.kind, name).options if isinstance(name, str) else {}
        for option, value in defaults.items():
            options = sources.layers.get(selector.options)
            is_free = options is None or (isinstance(options, dict) and option not in options)
            path: Path = (*selector.options, option)
            if is_free:
                origin = Origin("plugins", text=f"{plugins.POLICY_FILE} [{selector.kind}.{name}]")
                sources.layers.assign(path, value, origin, sources.defaults)


BACKEND: Path = ("backend", "name")
PYTHON: Path = ("backend", "python")
_OF_THE_USER = ("environment", "override", "flag")


def settle_backend(layers: Layers, registry: Registry, defaults: Mapping[str, Any]) -> list[str]:
    """Choose the first backend whose library is installed, if the user chose none and that of the demo's spec is not.

    Return a note on the choice, or nothing.
    """
    if layers.is_set(PYTHON) or (layers.is_set(BACKEND) and layers.origins[BACKEND].kind in _OF_THE_USER):
        return []
    default = layers.get(BACKEND)
    entries = {entry.name: entry for entry in registry.usable("backends")}
    first = next((entry for entry in entries.values() if entry.is_installed), None)
    # Where no library is installed the spec's stays, and a later check refuses it with the command that installs it.
    if first is None or default not in entries or entries[default].is_installed:
        return []
    reason = (
        f"the demo trains on {first.name}, because {entries[default].needs} is not installed, which {default} needs"
    )
    layers.assign(
        BACKEND, first.name, Origin("plugins", text=f"chosen for the demo: no {entries[default].needs} here"), defaults
    )
    return [reason]
