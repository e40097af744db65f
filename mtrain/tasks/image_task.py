"""What tasks on data sets of images have in common."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Task
from mtrain.core.interfaces.program import ProgramInput
from mtrain.core.overriding import override
from mtrain.spec.section import narrowed
from mtrain.tasks.base import TaskBase
from mtrain.tasks.description import describe_task

if TYPE_CHECKING:
    from mtrain.core.interfaces.details import Detail
    from mtrain.spec.model import Spec
    from mtrain.tasks.datasets import OpenData


class PredictionImages:
    """Base class of images to predict on, of any task: a part of ``ImageData`` of ``core.interfaces``."""

    kind: ClassVar[str]
    """Name of the task plugin."""

    def __init__(self, spec: "Spec", images: Any) -> None:
        self._spec = spec
        self._images = images

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task(self.kind, self._spec, self._images.class_names)

    def length(self, split: str) -> int:
        """Return the number of images."""
        return len(self._images)

    def statistics(self) -> Mapping[str, Any]:
        """Return no statistics: the images have no labels."""
        return {}


class ImageTask(TaskBase):
    """Base class of tasks whose samples are images. Implements a part of ``TaskData``; the class is a ``TaskKind``."""

    kind: ClassVar[str]
    """Name of the task plugin."""
    input_key: ClassVar[str] = "images"
    """Name of the array of a batch that holds the images; exported programs always call it ``images``."""

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        self._spec = spec
        self._section: Any = narrowed(spec.data, self._data_section(), where="data")
        self._data = data
        self._training = training
        self._scored = spec.evaluate.enabled or not training

    @classmethod
    def _data_section(cls) -> Any:
        return cls.sections["data"]

    @classmethod
    @override
    def divided(cls, data: Any, read_all: Callable[[], Any]) -> tuple[Any, Any] | None:
        return None if data.split is None else read_all().divide(data.split, seed=data.split_seed)

    @classmethod
    @override
    def unreadable(cls, spec: "Spec", files: Sequence[Path]) -> dict[Path, str]:
        """Return the images that cannot be decoded, or have more pixels than ``data.max_pixels``."""
        from mtrain.data.images.readable import unreadable

        return unreadable(files, max_pixels=narrowed(spec.data, cls._data_section(), where="data").max_pixels)

    @classmethod
    @override
    def inputs(cls, spec: "Spec") -> Sequence[ProgramInput]:
        """Return the images: uint8 RGB, square."""
        side = spec.data.input_side
        return [ProgramInput(key=cls.input_key, name="images", shape=(side, side, 3))]

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task(self.kind, self._spec, self._data.class_names)

    def length(self, split: str) -> int:
        """Return the number of samples of ``train`` or ``val``; 0 if a split is not used."""
        splits = self._splits()
        return len(splits[split]) if split in splits else 0

    def statistics(self) -> Mapping[str, Any]:
        """Return ``class_count`` and ``images`` of the training split."""
        return {"class_count": len(self._data.class_names), "images": len(self._data.train)}

    def labels(self) -> dict[str, Any]:
        """Return the class names for the checkpoint."""
        return {"class_names": list(self._data.class_names)}

    def report(self) -> list[str]:
        """Return a sentence for each kind of problem that a split reports."""
        return [f"data.{name}: {line}" for name, split in self._splits().items() for line in split.report()]

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Save a drawing of the predictions ``partial``, by sample index, beside the truth."""
        from mtrain.data.images.drawing import save_image

        save_image(self._comparison(partial), path)

    def details(self, evaluator: Any) -> "Sequence[Detail]":
        """See ``TaskData.details``."""
        found: Sequence[Detail] = evaluator.details()
        return found

    @abstractmethod
    def _comparison(self, partial: Mapping[int, Any]) -> Any:
        """Return the drawing that ``draw`` saves."""

    def _splits(self) -> dict[str, Any]:
        """Read and return the splits that this job uses."""
        if not self._training:
            return {"val": self._data.val}
        if not self._scored:
            return {"train": self._data.train}
        return dict(zip(("train", "val"), self._data.both(), strict=True))
