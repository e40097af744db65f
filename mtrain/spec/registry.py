"""The plugins that one policy allows: names are listed once, and each class is imported once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mtrain.errors import MtrainError, PluginError
from mtrain.spec import plugins
from mtrain.spec.plugin_kinds import SINGULAR
from mtrain.spec.plugins import PluginEntry, PluginPolicy, Policy
from mtrain.spec.schema import describe
from mtrain.spec.yaml_reader import flow


@dataclass(frozen=True, eq=False)
class Registry:
    """The plugins that one policy allows. Each is imported once."""

    policy: Policy = field(default_factory=Policy)
    _classes: dict[tuple[str, str], type[Any]] = field(default_factory=dict, repr=False)
    _names: dict[str, list[PluginEntry]] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, file: str | Path | None = None) -> "Registry":
        """Return the plugins that ``plugins.toml`` allows: ``file``, else that of the current folder, over mtrain's own.

        Raises:
            PluginError: the file is missing or not valid.
        """
        return cls(plugins.read_policy(file))

    def names(self, kind: str) -> list[PluginEntry]:
        """Return every plugin of a kind, disabled ones included, sorted by name; none is imported."""
        if kind not in self._names:
            self._names[kind] = plugins.names(kind, policy=self.policy)
        return self._names[kind]

    def usable(self, kind: str) -> list[PluginEntry]:
        """Return the plugins of a kind that may load, sorted by name; none is imported."""
        return [entry for entry in self.names(kind) if entry.enabled]

    def find(self, kind: str, name: str) -> PluginEntry:
        """Return the entry of a plugin that may load.

        Raises:
            PluginError: the name is unknown, disabled, or provided twice.
        """
        return plugins.find(kind, name, policy=self.policy)

    def load(self, kind: str, name: str) -> type[Any]:
        """Return the class of a plugin, imported at its first use.

        Raises:
            PluginError: as ``find``, or the class cannot be imported or lacks a member that its kind declares.
        """
        key = kind, name
        if key not in self._classes:
            self._classes[key] = plugins.load(kind, name, policy=self.policy)
        return self._classes[key]

    def task_of(self, kind: str, name: str) -> str:
        """Return the task that a model or a data set names as its ``kind``; where it can be, without importing it."""
        loaded = self._classes.get((kind, name))
        return plugins.task_of(kind, name, policy=self.policy) if loaded is None else str(loaded.kind)

    def defaults(self, kind: str, name: str) -> PluginPolicy:
        """Return what ``plugins.toml`` says of a plugin."""
        return self.policy.of(kind, name)

    def options(self, kind: str, name: str, raw_options: Mapping[str, Any], *, path: str) -> BaseModel:
        """Return the validated options of a plugin; ``raw_options`` replace the defaults of ``plugins.toml``.

        Raises:
            SpecError: the plugin refuses an option; the message begins with ``path`` and the option's key.
            PluginError: as ``load``.
        """
        return plugins.validated_options(
            self.load(kind, name), self.defaults(kind, name).options, raw_options, path=path
        )

    def option_lines(self, kind: str, name: str) -> list[str]:
        """Describe the options of a plugin, one line each: name, type, default and meaning."""
        lines = []
        for key, option in self.load(kind, name).Options.model_fields.items():
            default = (
                "required" if option.is_required() else f"default {flow(option.get_default(call_default_factory=True))}"
            )
            meaning = f": {option.description}" if option.description else ""
            lines.append(f"{key} ({describe(option.annotation, option.metadata)}, {default}){meaning}")
        return lines or ["none"]

    def make(self, kind: str, name: str, raw_options: Mapping[str, Any], *, path: str) -> Any:
        """Construct a plugin from its options.

        Raises:
            SpecError: as ``options``.
            PluginError: as ``load``, or the constructor raises an exception that is not one of mtrain's.
        """
        return self.construct(kind, name, self.load(kind, name), self.options(kind, name, raw_options, path=path))

    def construct(self, kind: str, name: str, target: type[Any], options: BaseModel) -> Any:
        """Construct the class ``target`` of a plugin from validated options.

        Raises:
            PluginError: the constructor raises an exception that is not one of mtrain's.
        """
        try:
            return target(options)
        except MtrainError:
            raise
        except (Exception, SystemExit) as error:  # Foreign code may raise any exception, or call sys.exit.
            what = f"the {SINGULAR.get(kind, kind)} {name!r} ({target.__module__}:{target.__qualname__})"
            raise PluginError(f"{what} cannot be made from its options: {type(error).__name__}: {error}") from error
