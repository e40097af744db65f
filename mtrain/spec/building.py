"""Build the schema of a job: the core's, with the sections that the job's task adds.

A spec is read in two passes. The first merges all sources as plain data and finds the task, which the model and the
data set name as their ``kind``. The second validates the data with the schema that is built here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from mtrain.errors import PluginError
from mtrain.spec.model import Spec
from mtrain.spec.provenance import lookup
from mtrain.spec.registry import Registry
from mtrain.spec.schema import field_at, model_of
from mtrain.spec.section import Section
from mtrain.spec.yaml_reader import Path

MODEL: Path = ("model", "name")
DATA: Path = ("data", "format")
_GROUPS = {MODEL: "models", DATA: "datasets"}


def task_of(values: Mapping[str, Any], *, registry: Registry) -> str:
    """Return the task of a spec given as plain data, defaults left out.

    The data set decides, or the model where the spec names only a model.

    Raises:
        PluginError: the plugin that decides is unknown or cannot be loaded.
    """
    # Whether both are of one task is checked when the data are opened.
    first, second = (MODEL, DATA) if lookup(values, DATA) is None else (DATA, MODEL)
    try:
        return _kind(values, first, registry)
    except PluginError:
        # A misspelled name is reported later, with all other mistakes, if the other one tells the task.
        if lookup(values, second) is None:
            raise
        return _kind(values, second, registry)


def _kind(values: Mapping[str, Any], path: Path, registry: Registry) -> str:
    name = lookup(values, path)
    if name is None:
        name = default_at(path)
    if not isinstance(name, str):
        raise PluginError(f"given {name!r}, expected the name of a plugin")
    return registry.task_of(_GROUPS[path], name)


def default_at(path: Path) -> Any:
    """Return the default of a key of the core; None where there is no such key."""
    key_field = field_at(Spec, path)
    return None if key_field is None else key_field.default


def schema_of(task: str, *, registry: Registry) -> type[Spec]:
    """Return the schema of the jobs of a task.

    Raises:
        PluginError: there is no such task, or its sections cannot be part of a spec.
    """
    sections: Mapping[str, type[Section]] = registry.load("tasks", task).sections
    for name, section in sections.items():
        _check(task, name, section)
    return _build(task, tuple(sections.items()))


def _check(task: str, name: str, section: Any) -> None:
    """Refuse a section of a task that cannot be part of a spec."""
    what = f"the task {task!r}: its section {name!r}"
    core = Spec.model_fields[name].annotation if name in Spec.model_fields else Section
    if not (isinstance(core, type) and issubclass(core, Section)):
        raise PluginError(f"{what} has the name of a value of every spec; give it another name")
    if not (isinstance(section, type) and issubclass(section, core)):
        raise PluginError(f"{what} is no subclass of {core.__module__}.{core.__qualname__}; derive it from that")
    try:
        # Defaults must be complete, because a spec need not name the section at all.
        section()
    except ValidationError as error:
        keys = ", ".join(str(item["loc"][0]) for item in error.errors() if item["loc"])
        raise PluginError(f"{what} is not valid without values ({keys}); give every key a default") from error


# Each reading of a spec, and each rank's, asks for the same models, and pydantic compiles a validator for each.
@lru_cache(maxsize=64)
def _build(task: str, sections: tuple[tuple[str, type[Section]], ...]) -> type[Spec]:
    fields: dict[str, Any] = {}
    for name, section in sections:
        core = Spec.model_fields.get(name)
        text = core.description if core else (section.__doc__ or "").partition("\n")[0]
        fields[name] = (section, Field(default=section(), description=text))
    built: type[Spec] = create_model("Spec", __base__=Spec, __module__=__name__, __doc__=Spec.__doc__, **fields)
    built.task = task
    return built


def _keys(section: FieldInfo) -> set[str]:
    """Return the keys of a section, those of sections in it aside; none for a single value."""
    model = model_of(section.annotation)
    return set() if model is None else set(model.model_fields)


@dataclass(frozen=True)
class Tasks:
    """Every installed task, and the keys that each adds to a spec. Their classes are loaded when they are first needed."""

    registry: Registry = field(default_factory=Registry.read)

    @cached_property
    def schemas(self) -> Mapping[str, type[Spec]]:
        """The schema of the jobs of each task, by its name; tasks that cannot be loaded are left out."""
        schemas = {}
        for entry in self.registry.names("tasks"):
            try:
                # A broken plugin of somebody else must not stop a job that does not use it.
                schemas[entry.name] = schema_of(entry.name, registry=self.registry)
            except PluginError:
                continue
        return schemas

    @cached_property
    def extended_sections(self) -> frozenset[str]:
        """The names of the core's sections to which some task adds keys."""
        return frozenset(
            name
            for schema in self.schemas.values()
            for name, core in Spec.model_fields.items()
            if _keys(schema.model_fields[name]) - _keys(core)
        )

    def owners(self, path: Path) -> dict[str, FieldInfo]:
        """Return the key at ``path`` of each task that has one which the core does not have, by the task's name."""
        if field_at(Spec, path) is not None:
            return {}
        keys = {task: field_at(schema, path) for task, schema in self.schemas.items()}
        return {task: key_field for task, key_field in keys.items() if key_field is not None}
