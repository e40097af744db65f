"""The model adapter for a user's own class: it builds the native module once per rank, and names no framework."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, Task
from mtrain.data import trees
from mtrain.data.objects import is_module
from mtrain.errors import DataError, PluginError, SpecError
from mtrain.spec import references
from mtrain.spec.references import Reference
from mtrain.tasks.own import calls, layout, network
from mtrain.tasks.own.dataset import AnyOptions

FRAMEWORKS = ("torch", "paddle")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFacts(Task):
    """The facts from which a user's model is built."""

    scored: bool = False
    """Whether the job asks for predictions."""
    seed: int = 0


class OwnModel(Model):
    """Stands for a user's own model: ``referring`` makes the class for one reference."""

    Options: ClassVar[type[BaseModel]] = AnyOptions
    kind = "own"
    native = True
    reference: ClassVar[Reference | None] = None

    def __init__(self, options: AnyOptions) -> None:
        self._options = dict(options.model_extra or {})

    @classmethod
    def referring(cls, reference: Reference) -> "type[OwnModel]":
        """Return the plugin class for what ``reference`` names."""
        return type(
            cls.__name__, (cls,), {"reference": reference, "__module__": cls.__module__, "__doc__": cls.__doc__}
        )

    def check_framework(self, framework: str) -> None:
        """Refuse a class of another framework, as far as its bases tell; the module that is built tells for certain."""
        target = references.import_object(self._reference_of())
        bases = target.__mro__ if isinstance(target, type) else ()
        self._check_framework(bases, framework)

    def _check_framework(self, bases: tuple[type, ...], framework: str) -> None:
        other = next(
            (name for base in bases for name in FRAMEWORKS if base.__module__.partition(".")[0] == name), framework
        )
        if other != framework:
            raise SpecError(
                f"model.name: {self._reference_of().words} is a model of {other}, and the backend is on {framework}; choose a backend on "
                f"{other}, and write model.framework: {other} so that the plan says so"
            )

    def _reference_of(self) -> Reference:
        if self.reference is None:
            raise PluginError("model.name: 'own' stands for a class of yours; write PATH.py:Name in its place")
        return self.reference

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Return ``task`` unchanged: a user's model is built from its options alone."""
        return task

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the module with the options of the spec. The session has seeded the framework just before.

        Raises:
            SpecError: what the reference names does not take the options, or is of another framework.
            PluginError: it returns no module.
        """
        from mtrain.core.binding import bound

        reference, seed = self._reference_of(), getattr(task, "seed", 0)
        module = calls.make(reference, self._options, {}, path="model.options", seed=seed)
        if not is_module(module):
            raise PluginError(
                f"model.name: {reference.words} gave a {type(module).__name__}; expected a torch.nn.Module or a paddle.nn.Layer, "
                "or a function that returns one"
            )
        source = bound() or ""
        framework = next((name for name in FRAMEWORKS if f"_{name}" in source), "")
        if framework:
            self._check_framework(type(module).__mro__, framework)
        if getattr(task, "scored", False) and not callable(getattr(module, "predict", None)):
            raise SpecError(network.no_predict(type(module).__name__))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return network.adapt(module, name=type(module).__name__)

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Not used: a native module keeps its own start values."""
        raise PluginError("a model of your own has its own start values, which only its ranks know")

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Any]:
        """Return (prediction, target) of each sample, with arrays as leaves.

        Raises:
            DataError: there is not one row for each sample.
        """
        return rows(layout.unpack(output), len(batch["index"]), name=self._reference_of().name)


def rows(outcome: Any, count: int, *, name: str) -> list[Any]:
    """Divide (predictions, targets) of a batch into its samples.

    Raises:
        DataError: an array has another length than the batch.
    """

    def of_row(row: int) -> Any:
        def leaf(path: str, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            if len(value) != count:
                part = network.PARTS[int(path.partition(".")[0])]
                raise DataError(
                    f"{name}.predict(batch) returned {part} with {len(value)} rows for a batch of {count} samples; expected one "
                    "row for each"
                )
            return value[row]

        return trees.map_leaves(outcome, leaf)

    return [of_row(row) for row in range(count)]
