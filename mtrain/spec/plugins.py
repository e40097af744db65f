"""Find and load plugins of all kinds by name, as far as the plugin policy allows it.

Names are listed from package metadata without importing a plugin. ``plugins.toml`` (the shipped one, then the user's)
may disable names, pin the distribution that provides one, set default options, and declare local plugins::

    [backends]
    disabled = ["horovod"]            # or enabled = [...]: only these

    [backends.mine]
    module = "my_package.backend:Mine"    # a local plugin, no packaging; searched beside this file first
    options = { timeout_s = 60 }          # defaults; values in the spec replace them

    [backends.ddp]
    distribution = "mtrain"               # only this distribution may provide the name
"""

import importlib
import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.errors import MtrainError, PluginError, SpecError
from mtrain.spec import references, remedies
from mtrain.spec.plugin_kinds import DECLARED, KINDS, SINGULAR
from mtrain.spec.schema import Problem, describe, dotted, problems_of
from mtrain.spec.suggest import hint
from mtrain.spec.yaml_reader import flow, read_text

POLICY_FILE = "plugins.toml"


class PluginPolicy(BaseModel):
    """The section of ``plugins.toml`` on one plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    distribution: str | None = Field(default=None, description="the only distribution that may provide the name")
    module: str | None = Field(default=None, description="a local plugin, `package.module:Class`")
    options: dict[str, Any] = Field(default_factory=dict, description="defaults of the plugin's options")
    summary: str = Field(default="", description="one line for `mtrain plugins list`")
    task: str | None = Field(
        default=None, description="the task of a model or data set; absent: its class says, which must then be imported"
    )
    needs: str | None = Field(default=None, description="the module that must be installed for it to run")
    libraries: list[str] = Field(default_factory=list, description="modules that must be installed beside it")
    extra: str | None = Field(default=None, description="the extra of mtrain that installs it")
    install: str | None = Field(
        default=None, description="how to get the library where pip cannot; {python} stands for the interpreter"
    )


class KindPolicy(BaseModel):
    """The section of ``plugins.toml`` on one kind of plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: list[str] | None = Field(default=None, description="only these may load; absent: all")
    disabled: list[str] = Field(default_factory=list, description="these may not load")
    names: dict[str, PluginPolicy] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """The policies of all kinds, and the folders in which local plugins are searched."""

    kinds: Mapping[str, KindPolicy] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()

    def of(self, kind: str, name: str) -> PluginPolicy:
        """Return the policy on one plugin; an empty one if ``plugins.toml`` does not mention it."""
        return self.kinds.get(kind, KindPolicy()).names.get(name, PluginPolicy())

    def allows(self, kind: str, name: str) -> bool:
        """Return whether the plugin may load."""
        rules = self.kinds.get(kind, KindPolicy())
        return name not in rules.disabled and (rules.enabled is None or name in rules.enabled)


@dataclass(frozen=True, slots=True)
class Entry:
    """One plugin, described from package metadata and the policy. The plugin itself is not imported."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str = ""
    enabled: bool = True
    summary: str = ""
    needs: str | None = None
    libraries: tuple[str, ...] = ()
    extra: str | None = None
    install: str | None = None
    rivals: tuple[str, ...] = ()
    """Other distributions that provide the same name: loading it is refused."""

    @property
    def installed(self) -> bool:
        """True if the modules that the plugin needs are installed. They are looked up without being imported."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Return the modules that the plugin needs and that are not installed."""
        modules = [*([self.needs] if self.needs is not None else []), *self.libraries]
        return [name for name in modules if find_spec(name) is None]

    def remedy(self, python: str) -> str:
        """Return an instruction for installing the plugin's library for the interpreter ``python``, or nothing."""
        if self.install is not None:
            return self.install.replace("{python}", python)
        return f"install it with: {remedies.install(self.extra, python=python)}" if self.extra else ""


def read_policy(file: str | Path | None = None) -> Policy:
    """Read the shipped policy and merge the user's over it.

    The user's policy is ``file``; without it ``plugins.toml`` in the current folder, if there is one.

    Raises: ``PluginError`` for a file that is missing or not valid, one line per mistake.
    """
    policy = _lay_over(Policy(), Path(__file__).parents[1] / POLICY_FILE)
    if file is not None:
        return _lay_over(policy, Path(file))
    here = Path(POLICY_FILE)
    return _lay_over(policy, here) if here.is_file() else policy


def names(kind: str, *, policy: Policy | None = None) -> list[Entry]:
    """Return every plugin of a kind, including disabled ones, sorted by name. No plugin is imported."""
    policy = policy or read_policy()
    entries_by_name: dict[str, list[Entry]] = {}
    for name, target, distribution, version, summary in _installed(tuple(sys.path)).get(kind, ()):
        entry = Entry(kind, name, target, distribution, version, summary=summary)
        pinned = policy.of(kind, name).distribution
        if (pinned is None or pinned == distribution) and entry not in entries_by_name.get(name, []):
            entries_by_name.setdefault(name, []).append(entry)
    for name, plugin in policy.kinds.get(kind, KindPolicy()).names.items():
        if plugin.module is not None:
            entries_by_name.setdefault(name, []).append(Entry(kind, name, plugin.module, POLICY_FILE))
    return [_described(entries, policy) for _, entries in sorted(entries_by_name.items())]


def find(kind: str, name: str, *, policy: Policy | None = None) -> Entry:
    """Return the entry of the plugin ``name``, which may load.

    Raises: ``PluginError`` for a name that is unknown, disabled, or provided twice.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        reference = references.parsed(name)
        try:
            return replace(find(kind, references.PLUGIN, policy=policy), target=reference.text)
        except PluginError as error:
            raise PluginError(f"{name}: code of your own needs the {SINGULAR[kind]} plugin: {error}") from error
    entries = {entry.name: entry for entry in names(kind, policy=policy)}
    what = SINGULAR.get(kind, kind)
    if name not in entries:
        pinned = policy.of(kind, name).distribution
        if pinned is not None:
            raise PluginError(f"no {what} {name!r} from the distribution {pinned!r} to which {POLICY_FILE} pins it")
        if name in _shipped_names(kind):
            raise PluginError(
                f"no {what} {name!r}: mtrain ships one, but its installation is older than its sources and does not "
                f"list it; install again with: {remedies.install('')}"
            )
        usable = [other for other, entry in entries.items() if entry.enabled and other != references.PLUGIN]
        listed = f" (known: {', '.join(usable)})" if usable else ""
        raise PluginError(f"no {what} {name!r}{listed}{_meant(name, usable)}")
    entry = entries[name]
    if not entry.enabled:
        raise PluginError(f"the {what} {name!r} is disabled by {POLICY_FILE}")
    if entry.rivals:
        rivals = ", ".join((_provider(entry), *entry.rivals))
        raise PluginError(
            f"the {what} {name!r} is provided by {rivals}; uninstall all but one, "
            f'or pin one in {POLICY_FILE}: [{kind}.{name}] distribution = "..."'
        )
    return entry


def _shipped_names(kind: str) -> set[str]:
    """Return the plugins of a kind that mtrain's own ``plugins.toml`` describes."""
    shipped = _lay_over(Policy(), Path(__file__).parents[1] / POLICY_FILE)
    return set(shipped.kinds.get(kind, KindPolicy()).names)


def load(kind: str, name: str, *, policy: Policy | None = None) -> type[Any]:
    """Import and return the class of the plugin ``name``.

    Raises: ``PluginError`` for a name that ``find`` refuses, and for a class that cannot be imported, has no
    ``Options``, or lacks a member that plugins of its kind declare.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        find(kind, name, policy=policy)
        referring: type[Any] = load(kind, references.PLUGIN, policy=policy).referring(references.parsed(name))
        return referring
    entry = find(kind, name, policy=policy)
    what = f"the {SINGULAR.get(kind, kind)} {name!r} ({entry.target} of {_provider(entry)})"
    try:
        target = _import(entry, policy)
    except Exception as error:  # A foreign module may raise any exception when it is imported.
        remedy = f"; install it with: {remedies.install(entry.extra)}" if entry.extra and not entry.installed else ""
        raise PluginError(f"{what} cannot be imported: {type(error).__name__}: {error}{remedy}") from error
    options_class = getattr(target, "Options", None)
    if not (isinstance(options_class, type) and issubclass(options_class, BaseModel)):
        raise PluginError(f"{what} has no `Options`: expected a class with a nested pydantic model of that name")
    base, members = DECLARED.get(kind, ("", ()))
    absent = [member for member in members if not hasattr(target, member)]
    if absent:
        raise PluginError(f"{what} has no `{absent[0]}`: derive the class from {base}, which declares it")
    loaded: type[Any] = target
    return loaded


def task_of(kind: str, name: str, *, policy: Policy | None = None) -> str:
    """Return the task that a model or a data set names as its ``kind``.

    For the plugins of mtrain and of a ``plugins.toml`` that file can say it, so that a spec is read without importing
    them: they need numpy, which takes longer to import than everything else that a spec needs.

    Raises: ``PluginError`` like ``load``.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        find(kind, name, policy=policy)
        return task_of(kind, references.PLUGIN, policy=policy)
    declared = policy.of(kind, name).task
    if declared is not None and find(kind, name, policy=policy).distribution in ("mtrain", POLICY_FILE):
        return declared
    task: str = load(kind, name, policy=policy).kind
    return task


def _refers(kind: str, name: str) -> bool:
    """Return whether a name stands for a class of the user's own, in place of a plugin."""
    return kind in references.KINDS and references.is_reference(name)


def made(kind: str, name: str, options: BaseModel, *, policy: Policy | None = None) -> Any:
    """Construct the plugin ``name`` with validated options.

    Raises: ``PluginError`` like ``load`` and ``construct``.
    """
    return construct(kind, name, load(kind, name, policy=policy), options)


def construct(kind: str, name: str, target: type[Any], options: BaseModel) -> Any:
    """Construct the plugin ``name`` of class ``target`` with validated options.

    Raises: ``PluginError`` if the constructor raises an exception that is not one of mtrain's.
    """
    try:
        return target(options)
    except MtrainError:
        raise
    except (Exception, SystemExit) as error:  # Foreign code may raise any exception, or call sys.exit.
        what = f"the {SINGULAR.get(kind, kind)} {name!r} ({target.__module__}:{target.__qualname__})"
        raise PluginError(f"{what} cannot be made from its options: {type(error).__name__}: {error}") from error


def options(
    kind: str, name: str, raw_options: Mapping[str, Any], *, path: str, policy: Policy | None = None
) -> BaseModel:
    """Return the validated options of a plugin. ``raw_options`` replace the defaults of ``plugins.toml``.

    Raises: ``SpecError`` with ``path`` and the key of each option that the plugin refuses; ``PluginError`` like
    ``load``.
    """
    policy = policy or read_policy()
    target = load(kind, name, policy=policy)
    return validated_options(target, policy.of(kind, name).options, raw_options, path=path)


def validated_options(
    target: type[Any], defaults: Mapping[str, Any], raw_options: Mapping[str, Any], *, path: str
) -> BaseModel:
    """Return the options of the plugin class ``target``; ``raw_options`` replace ``defaults``.

    Raises: ``SpecError`` with ``path`` and the key of each option that the plugin refuses.
    """
    model = target.Options
    values = {**defaults, **raw_options}
    try:
        validated: BaseModel = model.model_validate(values)
    except ValidationError as error:
        problems = problems_of(error, model, values)
        raise SpecError([f"{_join(path, dotted(problem.path))}: {problem.message}" for problem in problems]) from None
    return validated


def option_lines(kind: str, name: str, *, policy: Policy | None = None) -> list[str]:
    """Describe the options of a plugin, one line each: name, type, default and meaning.

    Raises: ``PluginError`` like ``load``.
    """
    model = load(kind, name, policy=policy).Options
    lines = []
    for key, option in model.model_fields.items():
        default = (
            "required" if option.is_required() else f"default {flow(option.get_default(call_default_factory=True))}"
        )
        meaning = f": {option.description}" if option.description else ""
        lines.append(f"{key} ({describe(option.annotation, option.metadata)}, {default}){meaning}")
    return lines or ["none"]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if key else path


def _provider(entry: Entry) -> str:
    return f"{entry.distribution} {entry.version}".strip()


def _meant(name: str, usable: list[str]) -> str:
    answer = hint(name, usable)
    return answer if "did you mean" in answer else ""


def _described(entries: list[Entry], policy: Policy) -> Entry:
    """Return the first of the ``entries`` of one name, with the policy's facts on it and the others as its rivals."""
    first, *others = entries
    plugin = policy.of(first.kind, first.name)
    return replace(
        first,
        enabled=policy.allows(first.kind, first.name),
        summary=plugin.summary or first.summary,
        needs=plugin.needs,
        libraries=tuple(plugin.libraries),
        extra=plugin.extra,
        install=plugin.install,
        rivals=tuple(_provider(entry) for entry in others),
    )


@lru_cache(maxsize=4)
def _installed(_search_path: tuple[str, ...]) -> dict[str, tuple[tuple[str, str, str, str, str], ...]]:
    """Return (name, target, distribution, version, summary of the distribution) of every entry point, by kind.

    mtrain's own plugins have their summaries in its ``plugins.toml``.

    ``_search_path`` is ``sys.path``; it is the key under which the result is cached.
    """
    by_kind: dict[str, list[tuple[str, str, str, str, str]]] = {kind: [] for kind in KINDS}
    distribution_names: set[str] = set()
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group.startswith("mtrain.")]
        # A distribution that lies in several folders of the path counts where Python would import it: in the first.
        if not points or distribution.name in distribution_names:
            continue
        distribution_names.add(distribution.name)
        about = (
            distribution.name,
            distribution.version,
            "" if distribution.name == "mtrain" else _summary(distribution),
        )
        for point in points:
            kind = point.group.partition(".")[2]
            by_kind.setdefault(kind, []).append((point.name, point.value, *about))
    return {kind: tuple(entries) for kind, entries in by_kind.items()}


def _summary(distribution: importlib.metadata.Distribution) -> str:
    """Return the one line in which a distribution describes itself; empty where it does not."""
    text = distribution.metadata.get("Summary") or ""  # type: ignore[attr-defined]  # absent from the type's protocol
    return "" if text == "UNKNOWN" else str(text)


def _import(entry: Entry, policy: Policy) -> Any:
    if entry.distribution == POLICY_FILE:
        for folder in policy.folders:
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
    return importlib.metadata.EntryPoint(entry.name, entry.target, f"mtrain.{entry.kind}").load()


def _lay_over(policy: Policy, file: Path) -> Policy:
    """Return ``policy`` with the settings of ``file`` merged over it.

    Raises: ``PluginError`` with a line for each mistake in the file.
    """
    try:
        text = read_text(file)
    except ValueError as error:
        raise PluginError(f"{file}: {error}") from error
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise PluginError(f"{file}: not valid TOML: nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise PluginError(f"{file}: not valid TOML: {error}") from error
    kinds = dict(policy.kinds)
    problems: list[str] = []
    for kind, table in values.items():
        if kind not in KINDS:
            problems.append(f"{file} {kind}: unknown kind{hint(kind, KINDS)}")
        elif not isinstance(table, dict):
            problems.append(f"{file} {kind}: given {table!r}, expected a table")
        else:
            kinds[kind] = _kind_over(kinds.get(kind, KindPolicy()), table, file, kind, problems)
    if problems:
        raise PluginError("\n".join(problems))
    return Policy(kinds, (file.resolve().parent, *policy.folders))


def _message(problem: Problem, kind: str) -> str:
    """Return the message for a mistake in ``plugins.toml``.

    ``enabled`` or ``disabled`` in the section of one plugin is a common mistake; the message then shows the right
    place.
    """
    *_, name, key = ("", *problem.path)
    if key not in ("enabled", "disabled") or len(problem.path) < 3:
        return problem.message
    return f'unknown key; a list in [{kind}] says which plugins may be used: {key} = ["{name}"]'


def _kind_over(weaker: KindPolicy, table: Mapping[str, Any], file: Path, kind: str, problems: list[str]) -> KindPolicy:
    """Return ``weaker`` with the settings of ``table`` merged over it. Mistakes are added to ``problems``."""
    settings = ("enabled", "disabled")
    named = {name: section for name, section in table.items() if name not in settings}
    merged: dict[str, Any] = {name: plugin.model_dump(exclude_unset=True) for name, plugin in weaker.names.items()}
    for name, section in named.items():
        merged[name] = {**merged.get(name, {}), **section} if isinstance(section, dict) else section
    values = {
        "enabled": table.get("enabled", weaker.enabled),
        "disabled": table.get("disabled", weaker.disabled),
        "names": merged,
    }
    try:
        return KindPolicy.model_validate(values)
    except ValidationError as error:
        for problem in problems_of(error, KindPolicy, values):
            key = dotted(problem.path[1:] if problem.path[0] == "names" else problem.path)
            problems.append(f"{file} {kind}.{key}: {_message(problem, kind)}")
        return weaker
