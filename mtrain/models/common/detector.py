"""What plugins of detectors share: checks of the task. Needs no framework."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtrain.core.interfaces import Model, Task
from mtrain.errors import SpecError


class Detector(Model):
    """A model that finds boxes in square images whose side is a multiple of ``size_step``."""

    kind: ClassVar[str] = "detection"
    imitates: ClassVar[Sequence[str]] = ("outputs", "features")
    size_step: int = 32
    design: ClassVar[str]
    """Name of the design, for messages."""

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Check that the task fits, and return it unchanged: nothing in these models depends on the data.

        Args:
            task: Image size and class names.
            statistics: Facts about the data; of these, the optional ``class_count`` is read.

        Raises:
            SpecError: The image size or the class names do not fit.
        """
        problems, step = [], self.size_step
        if task.image_size < step or task.image_size % step:
            nearest = max(round(task.image_size / step), 1) * step
            problems.append(
                f"data.image_size: {task.image_size} is not a multiple of {step} as {self.design} needs; use {nearest}"
            )
        if len(task.class_names) == 0:
            problems.append("data: no class names; a detector needs at least one class")
        class_count = statistics.get("class_count")
        if class_count is not None and class_count != len(task.class_names):
            problems.append(
                f"data: {len(task.class_names)} class names ({', '.join(task.class_names)}), {class_count} classes in the "
                "annotations; name each class of the annotations once"
            )
        if problems:
            raise SpecError(problems)
        return task
