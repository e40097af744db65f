"""Classification as a kind of task: connect a job to data sets with one class per image. The work is done in other
modules."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, HostBatch, Remark, Table, Variation
from mtrain.core.overriding import override
from mtrain.spec.section import Section
from mtrain.tasks.classification.section import ClassificationDataSpec, data_of
from mtrain.tasks.image_task import ImageTask

if TYPE_CHECKING:
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.spec.model import Spec
    from mtrain.tasks.classification.evaluator import ClassEvaluator
    from mtrain.tasks.classification.labels import LabelledImages
    from mtrain.tasks.classification.live import LiveClassification
    from mtrain.tasks.classification.prediction import ClassImages


class ClassificationTask(ImageTask):
    """The classification side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a
    ``TaskKind``."""

    # Every reading of a spec imports this module for its sections, so methods import what needs an image library.
    kind = "classification"
    sections: ClassVar[Mapping[str, type[Section]]] = {"data": ClassificationDataSpec}

    @classmethod
    def prepared(cls, data: Any, content: "LabelledImages") -> "LabelledImages":
        """Let the split refuse images of more than ``data.max_pixels``."""
        from mtrain.tasks.classification.images import limit_pixels

        section: ClassificationDataSpec = data
        return limit_pixels(content, max_pixels=section.max_pixels)

    @classmethod
    def varied(cls, batch: HostBatch, *, step: int) -> Sequence[tuple[HostBatch, Variation]]:
        """See ``TaskKind.varied``: the images, and mirrored copies of them."""
        from mtrain.data.images.varied import vary_images

        # (mirrored, scale) of each copy.
        kinds = ((False, 1.0), (True, 1.0))
        copies = vary_images(batch["images"], kinds, step=step)
        return [({**batch, "images": images}, variation) for images, variation in copies]

    @classmethod
    def preprocessing(cls, spec: "Spec") -> dict[str, Any]:
        """Return how an image is fitted into the square input, as the keys of section ``data`` are called."""
        return {"resize": data_of(spec).resize, "crop_share": data_of(spec).crop_share}

    @classmethod
    def images(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> "ClassImages":
        """See ``TaskKind.images``."""
        from mtrain.tasks.classification.prediction import ClassImages, without_labels

        return ClassImages(spec, without_labels(files, data_of(spec), class_names=labels["class_names"]))

    @classmethod
    def live(cls, spec: "Spec", labels: Mapping[str, Any]) -> "LiveClassification":
        """See ``TaskKind.live``."""
        from mtrain.tasks.classification.live import LiveClassification

        return LiveClassification(spec, labels["class_names"])

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
        """Check every image: see ``images.verify``."""
        from mtrain.tasks.classification.images import verify

        return f"{verify(*self._splits().values())} images, all read"

    def evaluator(self) -> "ClassEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.classification.evaluator import ClassEvaluator

        return ClassEvaluator(self._data.val)

    def describe(self) -> list[Table | Remark]:
        """Tabulate the images per split and class."""
        from mtrain.tasks.classification.images import sizes
        from mtrain.tasks.tables import class_table

        splits, side = self._splits(), self._section.image_size
        totals = Table(columns=("", *splits), rows=[("images", *(str(len(split)) for split in splits.values()))])
        parts: list[Table | Remark] = [totals]
        parts.append(class_table({name: split.histogram() for name, split in splits.items()}, unit="images"))
        for name, split in splits.items():
            text = f"{name} images: {sizes(split)}, given to the network as {side} x {side}"
            parts.append(Remark(text=text))
            problems = split.report()
            parts += [Remark(text=f"{name}: {line}", good=not problems) for line in problems or ["every class occurs"]]
        return parts

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of the splits with their classes, and of augmented training images."""
        from mtrain.tasks.classification.drawing import inputs_grid, labelled_grid

        for name, split in self._splits().items():
            yield name, f"{name} images with their classes", labelled_grid(split, limit=limit)
        inputs = inputs_grid(self.sources()["train"], self._data.train, limit=limit)
        yield "augmented", "train images as the network is given them", inputs

    @override
    def _comparison(self, partial: Mapping[int, Any]) -> Array:
        """Draw images with their true and predicted class, mistakes first."""
        from mtrain.tasks.classification.drawing import comparison

        return comparison(self._data.val, partial)
