"""What a model must know of data and job, whatever the kind of task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtrain.core.interfaces import Task

if TYPE_CHECKING:
    from mtrain.spec.model import Spec


def describe_task(kind: str, spec: "Spec", class_names: Sequence[str]) -> Task:
    """What a model must know before it is built, but for what ``Model.prepare_task`` finds out from statistics."""
    return Task(
        kind=kind,
        class_names=class_names,
        image_size=spec.data.image_size,
        global_batch=spec.train.batch_size,
    )
