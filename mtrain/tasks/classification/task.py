"""Classification as a kind of task: connect a job to data sets with one class per picture. The work is done in other
modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, HostBatch, Remark, Table, Task, Variation
from mtrain.core.program import ProgramInput
from mtrain.spec.section import Section
from mtrain.tasks.base import TaskBase
from mtrain.tasks.classification.section import ClassificationDataSpec, data_of
from mtrain.tasks.description import describe_task

if TYPE_CHECKING:
    from mtrain.core.details import Detail
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.spec.model import Spec
    from mtrain.tasks.classification.evaluator import ClassEvaluator
    from mtrain.tasks.classification.labels import LabelledPictures
    from mtrain.tasks.classification.live import LiveClassification
    from mtrain.tasks.classification.prediction import ClassPictures
    from mtrain.tasks.datasets import OpenData


class ClassificationTask(TaskBase):
    """The classification side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a
    ``TaskKind``."""

    sections: ClassVar[Mapping[str, type[Section]]] = {"data": ClassificationDataSpec}

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        self._spec = spec
        self._section = data_of(spec)
        self._data = data
        self._training = training
        self._scored = spec.evaluate.enabled or not training

    @classmethod
    def divided(cls, data: Any, read_all: "Callable[[], LabelledPictures]") -> Any:
        """Divide all pictures where ``data.split`` says so."""
        from mtrain.tasks.classification.labels import divided

        section: ClassificationDataSpec = data
        if section.split is None:
            return None
        parts = divided(read_all(), section.split, seed=section.split_seed)
        return tuple(cls.prepared(section, part) for part in parts)

    @classmethod
    def prepared(cls, data: Any, content: "LabelledPictures") -> "LabelledPictures":
        """Let the split refuse pictures of more than ``data.max_pixels``."""
        from mtrain.tasks.classification.pictures import limited

        section: ClassificationDataSpec = data
        return limited(content, max_pixels=section.max_pixels)

    @classmethod
    def unreadable(cls, spec: "Spec", files: Sequence[Path]) -> dict[Path, str]:
        """Return the pictures that cannot be decoded, or have more pixels than ``data.max_pixels``."""
        from mtrain.data.images.readable import unreadable

        return unreadable(files, max_pixels=data_of(spec).max_pixels)

    @classmethod
    def inputs(cls, spec: "Spec") -> Sequence[ProgramInput]:
        """Return the pictures: uint8 RGB, square."""
        side = data_of(spec).image_size
        return [ProgramInput(key="images", shape=(side, side, 3))]

    @classmethod
    def varied(cls, batch: HostBatch, *, step: int) -> Sequence[tuple[HostBatch, Variation]]:
        """See ``TaskKind.varied``: the pictures, and mirrored copies of them."""
        from mtrain.data.images.varied import varied

        kinds = ((False, 1.0), (True, 1.0))
        copies = varied(batch["images"], kinds, step=step)
        return [({**batch, "images": images}, variation) for images, variation in copies]

    @classmethod
    def preprocessing(cls, spec: "Spec") -> dict[str, Any]:
        """Return how a picture is fitted into the square input, as the keys of section ``data`` are called."""
        return {"resize": data_of(spec).resize, "crop_share": data_of(spec).crop_share}

    @classmethod
    def pictures(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> "ClassPictures":
        """See ``TaskKind.pictures``."""
        from mtrain.tasks.classification.prediction import ClassPictures, unlabelled

        return ClassPictures(spec, unlabelled(files, data_of(spec), class_names=labels["class_names"]))

    @classmethod
    def live(cls, spec: "Spec", labels: Mapping[str, Any]) -> "LiveClassification":
        """See ``TaskKind.live``."""
        from mtrain.tasks.classification.live import LiveClassification

        return LiveClassification(spec, labels["class_names"])

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task("classification", self._spec, self._data.class_names)

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the sources: ``train`` (augmented; only for training) and ``val`` (only for evaluation)."""
        from mtrain.tasks.classification.source import ClassificationSource

        data, seed = self._section, self._spec.train.seed
        fit: Any = {"side": data.image_size, "resize": data.resize, "crop_share": data.crop_share}
        sources = {}
        if self._training:
            sources["train"] = ClassificationSource(self._data.train, **fit, augment=data.augment, seed=seed)
        if self._scored:
            sources["val"] = ClassificationSource(self._data.val, **fit)
        return sources

    def verify(self) -> str:
        """Check every picture: see ``pictures.verify``."""
        from mtrain.tasks.classification.pictures import verify

        return f"{verify(*self._splits().values())} pictures, all read"

    def length(self, split: str) -> int:
        """Return the number of samples of ``train`` or ``val``; 0 if a split is not used."""
        splits = self._splits()
        return len(splits[split]) if split in splits else 0

    def statistics(self) -> Mapping[str, Any]:
        """Return ``class_count`` and ``pictures`` of the training split."""
        return {"class_count": len(self._data.class_names), "pictures": len(self._data.train)}

    def evaluator(self) -> "ClassEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.classification.evaluator import ClassEvaluator

        return ClassEvaluator(self._data.val)

    def labels(self) -> dict[str, Any]:
        """Return the class names for the checkpoint."""
        return {"class_names": list(self._data.class_names)}

    def report(self) -> list[str]:
        """Return a sentence for each split that has classes without a picture."""
        return [f"data.{name}: {line}" for name, split in self._splits().items() for line in split.report()]

    def describe(self) -> list[Table | Remark]:
        """Tabulate the pictures per split and class."""
        from mtrain.tasks.classification.pictures import sizes
        from mtrain.tasks.tables import class_table

        splits, side = self._splits(), self._section.image_size
        totals = Table(columns=("", *splits), rows=[("pictures", *(str(len(split)) for split in splits.values()))])
        parts: list[Table | Remark] = [totals]
        parts.append(class_table({name: split.histogram() for name, split in splits.items()}, unit="pictures"))
        for name, split in splits.items():
            text = f"{name} pictures: {sizes(split)}, given to the network as {side} x {side}"
            parts.append(Remark(text=text))
            problems = split.report()
            parts += [Remark(text=f"{name}: {line}", good=not problems) for line in problems or ["every class occurs"]]
        return parts

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of the splits with their classes, and of augmented training pictures."""
        from mtrain.tasks.classification.drawing import inputs_grid, labelled_grid

        for name, split in self._splits().items():
            yield name, f"{name} pictures with their classes", labelled_grid(split, limit=limit)
        inputs = inputs_grid(self.sources()["train"], self._data.train, limit=limit)
        yield "augmented", "train pictures as the network is given them", inputs

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Draw pictures with their true and predicted class, mistakes first."""
        from mtrain.data.images.drawing import save_picture
        from mtrain.tasks.classification.drawing import comparison

        save_picture(comparison(self._data.val, partial), path)

    def details(self, evaluator: "ClassEvaluator") -> "Sequence[Detail]":
        """See ``TaskData.details``."""
        return evaluator.details()

    def _splits(self) -> "dict[str, LabelledPictures]":
        if not self._training:
            return {"val": self._data.val}
        if not self._scored:
            return {"train": self._data.train}
        return dict(zip(("train", "val"), self._data.both(), strict=True))
