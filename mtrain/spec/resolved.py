"""The job as an object: a validated spec and the plugins that it names, each found, checked and made once.

Rooms receive a ``Resolved``; they look no plugin up by its name. Nothing is imported before it is asked for, so a plan
of a job costs no model.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mtrain.errors import SpecError
from mtrain.spec.model import Spec
from mtrain.spec.registry import Registry

if TYPE_CHECKING:
    from mtrain.core.interfaces import Backend, Cluster, Model, TaskKind

AUTO = "auto"
"""Value of ``cluster.name`` and ``launcher.name`` that leaves the choice to mtrain."""


@dataclass(frozen=True, eq=False)
class Resolved:
    """A validated spec with its task, model, backend and cluster, each made at its first use and once."""

    spec: Spec
    registry: Registry = field(repr=False)

    @classmethod
    def of(cls, spec: Spec) -> "Resolved":
        """Return the job of a spec that was read without its sources, as a rank reads it.

        Raises:
            PluginError: the ``plugins.toml`` that the spec names is missing or not valid.
        """
        return cls(spec, Registry.read(spec.plugins))

    def with_spec(self, spec: Spec) -> "Resolved":
        """Return the job with another spec; the classes that have been imported are kept."""
        return replace(self, spec=spec)

    @cached_property
    def backend(self) -> "Backend":
        """Return the backend, which is not entered."""
        name = self.spec.backend.name
        target = self.registry.load("backends", name)
        backend: Backend = self.registry.construct("backends", name, target, self.backend_options)
        return backend

    @cached_property
    def backend_options(self) -> BaseModel:
        """Return the validated options of the backend."""
        choice = self.spec.backend
        return self.registry.options("backends", choice.name, choice.options, path="backend.options")

    @cached_property
    def cluster(self) -> "Cluster | None":
        """Return the plugin that brings the job to its hosts; None: this host alone, or each is started by hand."""
        choice = self.spec.cluster
        if choice.name == AUTO:
            return None
        cluster: Cluster = self.registry.make("clusters", choice.name, choice.options, path="cluster.options")
        return cluster

    @cached_property
    def model_class(self) -> "type[Model]":
        """Return the class of the model plugin."""
        return self.registry.load("models", self.spec.model.name)

    @cached_property
    def model(self) -> "Model":
        """Return the model plugin; options that the spec does not set may follow from the sections of its task."""
        choice, model_class = self.spec.model, self.model_class
        defaults = {name: option.default for name, option in model_class.Options.model_fields.items()}
        # What the spec says itself stands above what follows from the sections of its task.
        options = {**self.task_named(model_class.kind).model_options(self.spec, defaults), **choice.options}
        model: Model = self.registry.make("models", choice.name, options, path="model.options")
        return model

    @cached_property
    def task(self) -> "TaskKind":
        """Return the task, which the data set and the model name as their ``kind``.

        Raises:
            SpecError: they name different ones.
        """
        # The data set decides, as where the schema is built: see ``building.task_of``.
        data_kind = self.registry.task_of("datasets", self.spec.data.format)
        self.check_kinds(data_kind)
        return self.task_named(data_kind)

    def task_named(self, kind: str) -> "TaskKind":
        """Return the task plugin of a data set or a model that has this ``kind``."""
        task: Any = self.registry.load("tasks", kind)
        named: TaskKind = task
        return named

    def check_kinds(self, data_kind: str) -> None:
        """Refuse a data set and a model of different tasks.

        Raises:
            SpecError: they are.
        """
        model_kind = self.registry.task_of("models", self.spec.model.name)
        if data_kind != model_kind:
            raise SpecError(
                f"data.format: {self.spec.data.format} is a data set for {data_kind}, but model.name: "
                f"{self.spec.model.name} is for {model_kind}; change one of them"
            )
