"""What plugins of classifiers of images share: checks of the task and reading of predictions. Needs no framework."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mtrain.core.interfaces import Array, HostBatch, Model, Task, Variation
from mtrain.errors import SpecError


class Classifier(Model):
    """A model that gives each image ``probabilities`` of the classes."""

    kind: ClassVar[str] = "classification"

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Check that the task fits, and return it unchanged: nothing in these models depends on the data.

        Raises:
            SpecError: It does not; all reasons are given.
        """
        problems = self._problems_of_size(task)
        if len(task.class_names) < 2:
            problems.append(f"data: {len(task.class_names)} classes; a classifier needs at least two")
        if problems:
            raise SpecError(problems)
        return task

    def _problems_of_size(self, task: Task) -> list[str]:
        return []

    def joined(self, outputs: Sequence[tuple[Mapping[str, Array], Variation]]) -> Mapping[str, Array]:
        """Return the mean of the probabilities of all copies."""
        return {"probabilities": np.mean([output["probabilities"] for output, _ in outputs], axis=0)}

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        """Return the probability of each class for each image: float32 (C,)."""
        return [np.asarray(row_C, np.float32) for row_C in output["probabilities"]]
