"""Find and load plugins of all kinds by name, as far as the plugin policy allows it.

Stevedore lists and loads them; nothing is imported until it is used. ``plugins.toml`` (the shipped one, then the user's)
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
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from stevedore import DriverManager, ExtensionManager, NamedExtensionManager
from stevedore.extension import Extension

from mtrain.errors import PluginError, SpecError
from mtrain.spec import packages, references, remedies
from mtrain.spec.plugin_kinds import DECLARED, KINDS, SINGULAR
from mtrain.spec.schema import Problem, dot, problems_of
from mtrain.spec.suggest import hint
from mtrain.spec.yaml_reader import read_text

POLICY_FILE = packages.POLICY_FILE


class PluginPolicy(BaseModel):
    """The section of ``plugins.toml`` on one plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    distribution: str | None = Field(default=None, description="the only distribution that may provide the name")
    module: str | None = Field(default=None, description="a local plugin, `package.module:Class`")
    options: dict[str, Any] = Field(default_factory=dict, description="defaults of the plugin's options")
    summary: str = Field(
        default="", description="one line for `mtrain plugins list`, and of a command for `mtrain --help`"
    )
    heading: str = Field(default="", description="heading of a command in `mtrain --help`")
    task: str | None = Field(
        default=None, description="the task of a model or data set; absent: its class says, which must then be imported"
    )
    needs: str | None = Field(default=None, description="the module that must be installed for it to run")
    oldest: str | None = Field(default=None, description="the oldest version of that module with which it works")
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


class Provider(NamedTuple):
    """The distribution that brings a plugin."""

    distribution: str
    version: str = ""
    summary: str = ""
    """The line in which it describes itself; empty for mtrain, which describes each plugin in its ``plugins.toml``."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class PluginEntry:
    """One plugin, described from its entry point and the policy. The plugin itself is not imported."""

    kind: str
    name: str
    target: str
    is_local: bool = False
    """Whether a ``plugins.toml`` declares it."""
    pinned: str | None = None
    """The distribution that alone may provide it."""
    enabled: bool = True
    summary: str = ""
    needs: str | None = None
    oldest: str | None = None
    libraries: tuple[str, ...] = ()
    extra: str | None = None
    install: str | None = None
    rivals: tuple["PluginEntry", ...] = ()
    """Those of other distributions that have the same name: loading it is refused."""

    @cached_property
    def provider(self) -> Provider:
        """Return the distribution that brings it."""
        if self.is_local:
            return Provider(POLICY_FILE)
        found = _providers(tuple(sys.path)).get((f"mtrain.{self.kind}", self.name, self.target), {})
        return found.get(self.pinned or next(iter(found), ""), Provider("an unknown package"))

    @property
    def is_own(self) -> bool:
        """Return whether it is mtrain's: code of nobody else lies where it is loaded from."""
        return packages.is_own(self.target) and not self.is_local

    @property
    def about(self) -> str:
        """Return what a ``plugins.toml`` says of it, else its distribution of itself; empty if both are silent."""
        return self.summary or self.provider.summary

    @property
    def is_installed(self) -> bool:
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
    """Read the shipped policy, what each distribution says of its own plugins, and merge the user's over them.

    The user's policy is ``file``; without it ``plugins.toml`` in the current folder, if there is one. A distribution's is in the package
    that its entry points name; what it says of plugins of others, and of what may load, does not count.

    Raises: ``PluginError`` for a file that is missing or not valid, one line per mistake.
    """
    policy = _read_shipped(tuple(sys.path))
    if file is not None:
        return _lay_over(policy, Path(file))
    here = Path(POLICY_FILE)
    return _lay_over(policy, here) if here.is_file() else policy


def names(kind: str, *, policy: Policy | None = None) -> list[PluginEntry]:
    """Return every plugin of a kind, including disabled ones, sorted by name. No plugin is imported."""
    policy = policy or read_policy()
    entries_by_name: dict[str, list[PluginEntry]] = {}
    for name, target in _list_points(kind):
        entry = PluginEntry(kind, name, target, pinned=policy.of(kind, name).distribution)
        if entry.pinned is None or entry.pinned == entry.provider.distribution:
            entries_by_name.setdefault(name, []).append(entry)
    for name, plugin in policy.kinds.get(kind, KindPolicy()).names.items():
        if plugin.module is not None:
            entries_by_name.setdefault(name, []).append(PluginEntry(kind, name, plugin.module, is_local=True))
    return [_describe(entries, policy) for _, entries in sorted(entries_by_name.items())]


def find(kind: str, name: str, *, policy: Policy | None = None) -> PluginEntry:
    """Return the entry of the plugin ``name``, which may load.

    Raises: ``PluginError`` for a name that is unknown, disabled, or provided twice.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        reference = references.parse(name)
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
        if package := packages.bringing(kind, name):
            raise PluginError(packages.absent(package, f"the {what} {name!r} is"))
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
        rivals = ", ".join(sorted(str(each.provider) for each in (entry, *entry.rivals)))
        raise PluginError(
            f"the {what} {name!r} is provided by {rivals}; uninstall all but one, "
            f'or pin one in {POLICY_FILE}: [{kind}.{name}] distribution = "..."'
        )
    return entry


def _shipped_names(kind: str) -> set[str]:
    """Return the plugins of a kind that mtrain's own ``plugins.toml`` describes."""
    shipped = _lay_over(Policy(), Path(__file__).parents[1] / POLICY_FILE)
    return set(shipped.kinds.get(kind, KindPolicy()).names)


@lru_cache(maxsize=1)
def _read_shipped(search_path: tuple[str, ...]) -> Policy:
    """Return what mtrain's ``plugins.toml`` says, and those of the distributions that bring plugins, each of its own ones."""
    # Read from beside the code and not from entry points: an installation may be older than its sources.
    policy = _lay_over(Policy(), Path(__file__).parents[1] / POLICY_FILE)
    brought: dict[str, set[tuple[str, str]]] = {}
    for group, name, target in _providers(search_path):
        brought.setdefault(packages.module_of(target), set()).add((group.removeprefix("mtrain."), name))
    count = Counter(plugin for names in brought.values() for plugin in names)
    # Of mtrain's packages first: a rival does not speak for their plugins, nor one stranger for another.
    for module, names in sorted(brought.items(), key=lambda item: (item[0] not in packages.MODULES, item[0])):
        if module != "mtrain" and (file := packages.find_policy_file(module, search_path)).is_file():
            is_ours = module in packages.MODULES
            policy = _with_descriptions(policy, file, {each for each in names if is_ours or count[each] == 1})
    return policy


def _with_descriptions(policy: Policy, file: Path, names: Collection[tuple[str, str]]) -> Policy:
    """Return ``policy`` with what a distribution's file says of the plugins ``names``; a file that is not valid says nothing."""
    try:
        described = _lay_over(Policy(), file).kinds
    except PluginError:
        return policy
    kinds = dict(policy.kinds)
    for kind, rules in described.items():
        mine = {
            name: plugin.model_copy(update={"module": None, "distribution": None})
            for name, plugin in rules.names.items()
            if (kind, name) in names
        }
        known = kinds.get(kind, KindPolicy())
        kinds[kind] = known.model_copy(update={"names": {**mine, **known.names}})
    return Policy(kinds, policy.folders)


def load_object(kind: str, name: str, *, policy: Policy | None = None) -> Any:
    """Import and return what the entry point of the plugin ``name`` names.

    Raises: ``PluginError`` for a name that ``find`` refuses, and for what cannot be imported.
    """
    policy = policy or read_policy()
    entry = find(kind, name, policy=policy)
    try:
        packages.check_version(entry.target)
        return _import(entry, policy)
    except PluginError:
        raise
    except Exception as error:  # A foreign module may raise any exception when it is imported.
        remedy = f"; install it with: {remedies.install(entry.extra)}" if entry.extra and not entry.is_installed else ""
        raise PluginError(
            f"{_name_entry(entry)} cannot be imported: {type(error).__name__}: {error}{remedy}"
        ) from error


def load(kind: str, name: str, *, policy: Policy | None = None) -> type[Any]:
    """Import and return the class of the plugin ``name``.

    Raises: ``PluginError`` for a name that ``find`` refuses, and for a class that cannot be imported, has no
    ``Options``, or lacks a member that plugins of its kind declare.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        find(kind, name, policy=policy)
        referring: type[Any] = load(kind, references.PLUGIN, policy=policy).referring(references.parse(name))
        return referring
    target, entry = load_object(kind, name, policy=policy), find(kind, name, policy=policy)
    options_class = getattr(target, "Options", None)
    if not (isinstance(options_class, type) and issubclass(options_class, BaseModel)):
        raise PluginError(
            f"{_name_entry(entry)} has no `Options`: expected a class with a nested pydantic model of that name"
        )
    base, members = DECLARED.get(kind, ("", ()))
    absent = [member for member in members if not hasattr(target, member)]
    if absent:
        raise PluginError(f"{_name_entry(entry)} has no `{absent[0]}`: derive the class from {base}, which declares it")
    loaded: type[Any] = target
    return loaded


def task_of(kind: str, name: str, *, policy: Policy | None = None) -> str:
    """Return the task that a model or a data set names as its ``kind``.

    Raises: ``PluginError`` like ``load``.
    """
    policy = policy or read_policy()
    if _refers(kind, name):
        find(kind, name, policy=policy)
        return task_of(kind, references.PLUGIN, policy=policy)
    # A ``plugins.toml`` can say it, so that a spec is read without importing the class:
    # that needs numpy, which takes longer to import than everything else that a spec needs.
    declared = policy.of(kind, name).task
    if declared is not None and ((entry := find(kind, name, policy=policy)).is_local or entry.is_own):
        return declared
    task: str = load(kind, name, policy=policy).kind
    return task


def _refers(kind: str, name: str) -> bool:
    """Return whether a name stands for a class of the user's own, in place of a plugin."""
    return kind in references.KINDS and references.is_reference(name)


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
        raise SpecError([f"{dot((path, *problem.path))}: {problem.message}" for problem in problems]) from None
    return validated


def _name_entry(entry: PluginEntry) -> str:
    return f"the {SINGULAR.get(entry.kind, entry.kind)} {entry.name!r} ({entry.target} of {entry.provider})"


def _meant(name: str, usable: list[str]) -> str:
    answer = hint(name, usable)
    return answer if "did you mean" in answer else ""


def _describe(entries: list[PluginEntry], policy: Policy) -> PluginEntry:
    """Return the first of the ``entries`` of one name, with the policy's facts on it and the others as its rivals."""
    first, *others = entries
    plugin = policy.of(first.kind, first.name)
    return replace(
        first,
        enabled=policy.allows(first.kind, first.name),
        summary=plugin.summary,
        needs=plugin.needs,
        oldest=plugin.oldest,
        libraries=tuple(plugin.libraries),
        extra=plugin.extra,
        install=plugin.install,
        rivals=tuple(others),
    )


_listed_path: list[str] = []
"""``sys.path`` for which stevedore has the groups: its own key is the group alone."""


def _list_points(kind: str) -> list[tuple[str, str]]:
    """Return name and target of each entry point of a kind."""
    # Stevedore is given what one scan has found. What it would find itself it keeps in a file for
    # each state of every folder of the path, the current one among them: each job would leave one
    # of 40 KB in the user's home, and what was installed within two minutes would be missing.
    if _listed_path != sys.path:
        _listed_path[:] = sys.path
        points = [
            importlib.metadata.EntryPoint(name, target, group) for group, name, target in _providers(tuple(sys.path))
        ]
        for known in KINDS:
            group = f"mtrain.{known}"
            ExtensionManager.ENTRY_POINT_CACHE[group] = [point for point in points if point.group == group]
    return [
        (point.name, point.value) for point in NamedExtensionManager(f"mtrain.{kind}", names=[]).list_entry_points()
    ]


@lru_cache(maxsize=4)
def _providers(_search_path: tuple[str, ...]) -> dict[tuple[str, str, str], dict[str, Provider]]:
    """Return what brings each entry point: (group, name, target) -> name of each distribution -> what it says of itself."""
    providers: dict[tuple[str, str, str], dict[str, Provider]] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group.startswith("mtrain.")]
        # A distribution that lies in several folders of the path counts in the first, where Python would import it: building leaves an
        # older list of its entry points beside the sources.
        if points and distribution.name not in seen:
            seen.add(distribution.name)
            summary = "" if distribution.name == "mtrain" else _summary(distribution)
            provider = Provider(distribution.name, distribution.version, summary)
            for point in points:
                providers.setdefault((point.group, point.name, point.value), {})[provider.distribution] = provider
    return providers


def _summary(distribution: importlib.metadata.Distribution) -> str:
    """Return the one line in which a distribution describes itself; empty where it does not."""
    text = distribution.metadata.get("Summary") or ""  # type: ignore[attr-defined]  # absent from the type's protocol
    return "" if text == "UNKNOWN" else str(text)


def _import(entry: PluginEntry, policy: Policy) -> Any:
    group = f"mtrain.{entry.kind}"
    targets = [target for name, target in _list_points(entry.kind) if name == entry.name]
    if targets == [entry.target] and not entry.is_local:
        return DriverManager(group, entry.name, on_load_failure_callback=_raise).driver
    if entry.is_local:
        for folder in policy.folders:
            # Only where a local plugin is loaded: otherwise a folder would hide installed modules of its names.
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
    point = importlib.metadata.EntryPoint(entry.name, entry.target, group)
    return DriverManager.make_test_instance(Extension(entry.name, point, point.load(), None), namespace=group).driver


def _raise(_manager: object, _point: object, error: BaseException) -> None:
    raise error


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
            key = dot(problem.path[1:] if problem.path[0] == "names" else problem.path)
            problems.append(f"{file} {kind}.{key}: {_message(problem, kind)}")
        return weaker
