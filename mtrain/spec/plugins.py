"""Backends, models, data sets and launchers by name, and the policy that says which may load.

Names are listed from package metadata without importing a plugin. ``plugins.toml`` (the shipped one, then the user's)
may disable names, pin the distribution that provides one, give default options, and declare local plugins::

    [backends]
    disabled = ["horovod"]            # or enabled = [...]: only these

    [backends.mine]
    module = "my_package.backend:Mine"    # a local plugin, no packaging; searched beside this file first
    options = { timeout_s = 60 }          # defaults, below what the spec says

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
from mtrain.spec import remedies
from mtrain.spec.schema import Problem, describe, dotted, problems_of
from mtrain.spec.suggest import hint
from mtrain.spec.yaml_reader import flow, read_text

KINDS = ("backends", "models", "datasets", "tasks", "launchers")
SINGULAR = {"backends": "backend", "models": "model", "datasets": "data set", "tasks": "task", "launchers": "launcher"}
POLICY_FILE = "plugins.toml"


class PluginPolicy(BaseModel):
    """What ``plugins.toml`` says about one name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    distribution: str | None = Field(default=None, description="the only distribution that may provide the name")
    module: str | None = Field(default=None, description="a local plugin, `package.module:Class`")
    options: dict[str, Any] = Field(default_factory=dict, description="defaults of the plugin's options")
    summary: str = Field(default="", description="one line for `mtrain plugins list`")
    needs: str | None = Field(default=None, description="the module that must be installed for it to run")
    library: str | None = Field(default=None, description="a module that must be installed beside it")
    extra: str | None = Field(default=None, description="the extra of mtrain that installs it")
    install: str | None = Field(
        default=None, description="how to get the library where pip cannot; {python} stands for the interpreter"
    )


class KindPolicy(BaseModel):
    """What ``plugins.toml`` says about one kind."""

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
        """What is said about one name."""
        return self.kinds.get(kind, KindPolicy()).names.get(name, PluginPolicy())

    def allows(self, kind: str, name: str) -> bool:
        """Whether the name may load."""
        rules = self.kinds.get(kind, KindPolicy())
        return name not in rules.disabled and (rules.enabled is None or name in rules.enabled)


@dataclass(frozen=True, slots=True)
class Entry:
    """One plugin as metadata tells it; nothing of it is imported."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str = ""
    enabled: bool = True
    summary: str = ""
    needs: str | None = None
    library: str | None = None
    extra: str | None = None
    install: str | None = None
    rivals: tuple[str, ...] = ()
    """Other distributions that provide the same name: loading it is refused."""

    @property
    def installed(self) -> bool:
        """Whether what it needs can be found; looks, imports nothing."""
        return all(find_spec(name) is not None for name in (self.needs, self.library) if name is not None)

    def remedy(self, python: str) -> str:
        """How ``python`` comes by the library; empty where nobody said."""
        if self.install is not None:
            return self.install.replace("{python}", python)
        return f"install it with: {remedies.install(self.extra, python=python)}" if self.extra else ""


def read_policy(file: str | Path | None = None) -> Policy:
    """The shipped policy with the user's laid over it: ``file``, else ``plugins.toml`` in the current folder if any.

    Raises: ``PluginError`` for a file that is missing or not valid, one line per mistake.
    """
    policy = _lay_over(Policy(), Path(__file__).parents[1] / POLICY_FILE)
    if file is not None:
        return _lay_over(policy, Path(file))
    here = Path(POLICY_FILE)
    return _lay_over(policy, here) if here.is_file() else policy


def names(kind: str, *, policy: Policy | None = None) -> list[Entry]:
    """Every plugin of a kind, disabled ones included, by name. Imports no plugin."""
    policy = policy or read_policy()
    found: dict[str, list[Entry]] = {}
    for name, target, distribution, version in _installed(tuple(sys.path)).get(kind, ()):
        entry = Entry(kind, name, target, distribution, version)
        pinned = policy.of(kind, name).distribution
        if (pinned is None or pinned == distribution) and entry not in found.get(name, []):
            found.setdefault(name, []).append(entry)
    for name, said in policy.kinds.get(kind, KindPolicy()).names.items():
        if said.module is not None:
            found.setdefault(name, []).append(Entry(kind, name, said.module, POLICY_FILE))
    return [_described(entries, policy) for _, entries in sorted(found.items())]


def find(kind: str, name: str, *, policy: Policy | None = None) -> Entry:
    """The one entry of a name that may load.

    Raises: ``PluginError`` for a name that is unknown, disabled, or provided twice.
    """
    policy = policy or read_policy()
    entries = {entry.name: entry for entry in names(kind, policy=policy)}
    what = SINGULAR.get(kind, kind)
    if name not in entries:
        pinned = policy.of(kind, name).distribution
        if pinned is not None:
            raise PluginError(f"no {what} {name!r} from the distribution {pinned!r} to which {POLICY_FILE} pins it")
        usable = [known for known, entry in entries.items() if entry.enabled]
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


MOVED = {
    "mtrain.core.errors": "mtrain.errors",
    "mtrain.core.host_memory": "mtrain.system.memory",
    "mtrain.core.matching": "mtrain.core.state_checks",
    "mtrain.core.optimizer": "mtrain.core.recipe",
    "mtrain.core.placement": "mtrain.system.placement",
    "mtrain.core.processes": "mtrain.system.processes",
    "mtrain.core.quoting": "mtrain.system.quoting",
}
"""Former name of a module that plugins import -> its name now."""


def load(kind: str, name: str, *, policy: Policy | None = None) -> type[Any]:
    """The class that a name stands for, imported now.

    Raises: ``PluginError`` for a name that ``find`` refuses, and for a class that cannot be imported or has no
    ``Options``.
    """
    policy = policy or read_policy()
    entry = find(kind, name, policy=policy)
    what = f"the {SINGULAR.get(kind, kind)} {name!r} ({entry.target} of {_provider(entry)})"
    try:
        target = _import(entry, policy)
    except Exception as error:  # a stranger's module may fail in any way when it is imported
        remedy = f"; install it with: {remedies.install(entry.extra)}" if entry.extra and not entry.installed else ""
        if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
            remedy = f"; that module is now {MOVED[error.name]}: correct the plugin's import"
        raise PluginError(f"{what} cannot be imported: {type(error).__name__}: {error}{remedy}") from error
    options_class = getattr(target, "Options", None)
    if not (isinstance(options_class, type) and issubclass(options_class, BaseModel)):
        raise PluginError(f"{what} has no `Options`: expected a class with a nested pydantic model of that name")
    loaded: type[Any] = target
    return loaded


def made(kind: str, name: str, options: BaseModel, *, policy: Policy | None = None) -> Any:
    """The plugin itself, constructed with validated options.

    Raises: ``PluginError`` as ``load``, and where its constructor fails otherwise than with an error of mtrain's.
    """
    target = load(kind, name, policy=policy)
    try:
        return target(options)
    except MtrainError:
        raise
    except (Exception, SystemExit) as error:  # a stranger's code may fail in any way
        what = f"the {SINGULAR.get(kind, kind)} {name!r} ({target.__module__}:{target.__qualname__})"
        raise PluginError(f"{what} cannot be made from its options: {type(error).__name__}: {error}") from error


def options(kind: str, name: str, given: Mapping[str, Any], *, path: str, policy: Policy | None = None) -> BaseModel:
    """The validated options of a plugin: ``given`` over the defaults of ``plugins.toml``.

    Raises: ``SpecError`` naming ``path`` and the key of each option that the plugin refuses; ``PluginError`` as
    ``load``.
    """
    policy = policy or read_policy()
    model = load(kind, name, policy=policy).Options
    values = {**policy.of(kind, name).options, **given}
    try:
        validated: BaseModel = model.model_validate(values)
    except ValidationError as error:
        found = problems_of(error, model, values)
        raise SpecError([f"{_join(path, dotted(problem.path))}: {problem.message}" for problem in found]) from None
    return validated


def option_lines(kind: str, name: str, *, policy: Policy | None = None) -> list[str]:
    """The options of a plugin, one line each: name, type, default and meaning.

    Raises: ``PluginError`` as ``load``.
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
    first, *others = entries
    said = policy.of(first.kind, first.name)
    return replace(
        first,
        enabled=policy.allows(first.kind, first.name),
        summary=said.summary,
        needs=said.needs,
        library=said.library,
        extra=said.extra,
        install=said.install,
        rivals=tuple(_provider(entry) for entry in others),
    )


@lru_cache(maxsize=4)
def _installed(_search_path: tuple[str, ...]) -> dict[str, tuple[tuple[str, str, str, str], ...]]:
    """(name, target, distribution, version) of every entry point, by kind; read once for a search path."""
    found: dict[str, list[tuple[str, str, str, str]]] = {kind: [] for kind in KINDS}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group.startswith("mtrain.")]
        if not points or distribution.name in seen:
            continue
        seen.add(distribution.name)
        for point in points:
            kind = point.group.partition(".")[2]
            found.setdefault(kind, []).append((point.name, point.value, distribution.name, distribution.version))
    return {kind: tuple(entries) for kind, entries in found.items()}


def _import(entry: Entry, policy: Policy) -> Any:
    if entry.distribution == POLICY_FILE:
        for folder in policy.folders:
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
    # stevedore is imported only here: listing names must not pay for it.
    from stevedore.driver import DriverManager

    point = importlib.metadata.EntryPoint(entry.name, entry.target, f"mtrain.{entry.kind}")

    class Chosen(DriverManager):  # type: ignore[type-arg]  # generic at run time in newer versions only
        """Sees the one entry point that the policy chose: stevedore's own cache of them can be stale."""

        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [point]

    return Chosen(point.group, entry.name, invoke_on_load=False).driver


def _lay_over(policy: Policy, file: Path) -> Policy:
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
            kinds[kind] = _kind_over(kinds.get(kind, KindPolicy()), table, f"{file} {kind}", problems)
    if problems:
        raise PluginError("\n".join(problems))
    return Policy(kinds, (file.resolve().parent, *policy.folders))


def _message(problem: Problem, kind: str) -> str:
    """What is wrong; a plugin that is enabled or disabled in its own section is told where that is said."""
    *_, name, key = ("", *problem.path)
    if key not in ("enabled", "disabled") or len(problem.path) < 3:
        return problem.message
    return f'unknown key; a list in [{kind}] says which plugins may be used: {key} = ["{name}"]'


def _kind_over(weaker: KindPolicy, table: Mapping[str, Any], where: str, problems: list[str]) -> KindPolicy:
    settings = ("enabled", "disabled")
    named = {name: said for name, said in table.items() if name not in settings}
    merged: dict[str, Any] = {name: said.model_dump(exclude_unset=True) for name, said in weaker.names.items()}
    for name, said in named.items():
        merged[name] = {**merged.get(name, {}), **said} if isinstance(said, dict) else said
    values = {
        "enabled": table.get("enabled", weaker.enabled),
        "disabled": table.get("disabled", weaker.disabled),
        "names": merged,
    }
    try:
        return KindPolicy.model_validate(values)
    except ValidationError as error:
        for problem in problems_of(error, KindPolicy, values):
            key = dotted(problem.path).removeprefix("names.")
            problems.append(f"{where}.{key}: {_message(problem, where.rpartition(' ')[2])}")
        return weaker
