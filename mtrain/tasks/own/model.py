"""The model adapter for a user's own class: it builds the native module once per rank, and names no framework."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, Task
from mtrain.core.update.losses import problem_of
from mtrain.data import trees
from mtrain.data.objects import is_module
from mtrain.errors import DataError, PluginError, SpecError
from mtrain.spec import references
from mtrain.tasks.own import calls, layout
from mtrain.tasks.own.dataset import AnyOptions, Referring

FRAMEWORKS = ("torch", "paddle")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFacts(Task):
    """The facts from which a user's model is built."""

    scored: bool = False
    """Whether the job asks for predictions."""
    seed: int = 0


class OwnModel(Referring, Model):
    """Stands for a user's own model."""

    section = "model.name"

    Options: ClassVar[type[BaseModel]] = AnyOptions
    kind = "own"
    native = True

    def __init__(self, options: AnyOptions) -> None:
        self._options = dict(options.model_extra or {})

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
            raise SpecError(no_predict(type(module).__name__))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return adapt(module, name=type(module).__name__)

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
                part = PARTS[int(path.partition(".")[0])]
                raise DataError(
                    f"{name}.predict(batch) returned {part} with {len(value)} rows for a batch of {count} samples; expected one "
                    "row for each"
                )
            return value[row]

        return trees.map_leaves(outcome, leaf)

    return [of_row(row) for row in range(count)]


PARTS = ("predictions", "targets")


def adapt(module: Any, *, name: str) -> Any:
    """Replace the ``forward`` of a module, in place, by one that also takes the flat batches of a loader.

    With such a batch the module returns its losses in training mode, and its predictions in evaluation mode. Called in
    any other way, also by itself, it does what it did before. Names of parameters stay as they are.
    """
    own_forward = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if keywords or len(arguments) != 1 or not layout.is_packed(arguments[0]):
            return own_forward(*arguments, **keywords)
        batch = layout.unpack(arguments[0])
        return (
            losses(own_forward(batch), name=name) if module.training else flatten_predictions(module, batch, name=name)
        )

    module.forward = forward
    return module


def losses(result: Any, *, name: str) -> dict[str, Any]:
    """Return what a user's ``forward`` returned as losses by name, of which ``total`` carries the gradient.

    Raises:
        DataError: it is neither a loss, nor a dict with ``total``, nor an object with ``loss``.
    """
    own_loss = getattr(result, "loss", None)
    if own_loss is not None and not hasattr(result, "backward"):
        return {"total": _loss(own_loss, f"{name}.forward(batch).loss")}
    if isinstance(result, Mapping):
        if "total" not in result:
            raise DataError(
                f"{name}.forward(batch) returned a dict with {', '.join(map(str, result)) or 'nothing'}; expected the loss to "
                "minimise under 'total'"
            )
        total = _loss(result["total"], f"{name}.forward(batch)['total']")
        others = {str(key): _report(key, value, total, name) for key, value in result.items() if key != "total"}
        return {"total": total, **others}
    return {"total": _loss(result, f"{name}.forward(batch)")}


def _loss(value: Any, what: str) -> Any:
    if problem := problem_of(value):
        hint = "" if hasattr(value, "backward") else ", or a dict of such with 'total'"
        hint += " (with Hugging Face models, the batch needs `labels`)" if value is None else ""
        raise DataError(f"{what} {problem}{hint}")
    return value if len(value.shape) == 0 else value.reshape([])


def _report(key: Any, value: Any, total: Any, name: str) -> Any:
    """Return a further loss as a tensor without gradient."""
    if isinstance(value, int | float):
        return total.detach() * 0 + value
    if hasattr(value, "detach") and math.prod(value.shape) == 1:
        return value.detach().reshape([])
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise DataError(
        f"{name}.forward(batch)[{key!r}] is a {type(value).__name__}{shape}; expected a single number to report: return the "
        "losses alone, and predictions from predict(batch)"
    )


def flatten_predictions(module: Any, batch: Any, *, name: str) -> dict[str, Any]:
    """Return the predictions and targets of a batch as a flat mapping of tensors.

    Raises:
        DataError: ``predict`` is missing, or returns something else than a pair with a row for each sample.
    """
    if not callable(getattr(module, "predict", None)):
        raise DataError(no_predict(name))
    result = module.predict(batch)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise DataError(
            f"{name}.predict(batch) returned a {type(result).__name__}; expected the pair (predictions, targets)"
        )

    def leaf(path: str, value: Any) -> Any:
        if not hasattr(value, "detach"):
            return None
        if len(value.shape) == 0:
            part = PARTS[int(path.partition(".")[0])]
            raise DataError(
                f"{name}.predict(batch) returned {part} with a single number for a batch; expected one row for each sample, "
                "with the batch as the first axis"
            )
        return value

    return layout.pack(result, leaf, where=f"{name}.predict(batch)")


def no_predict(name: str) -> str:
    """Return the sentence on a model without ``predict`` in a job with evaluation."""
    return (
        f"{name} has no method predict(batch), and evaluate.metrics asks for predictions; add one that returns the pair "
        "(predictions, targets), or set evaluate.enabled: false"
    )
