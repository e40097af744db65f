"""Describe a job's data to its model, for any kind of task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtrain.core.interfaces import Task

if TYPE_CHECKING:
    from mtrain.spec.model import Spec


def describe_task(kind: str, spec: "Spec", class_names: Sequence[str]) -> Task:
    """Return the facts that a model needs before it is built, except those that ``Model.prepare_task`` adds from
    statistics."""
    return Task(
        kind=kind,
        class_names=class_names,
        image_size=spec.data.input_side,
        global_batch=spec.train.batch_size,
    )
