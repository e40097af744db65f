"""Detection as a kind of task: connect a job to data sets of images with boxes. The work is done in other modules."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, HostBatch, Remark, Table, Variation
from mtrain.core.overriding import override
from mtrain.spec.section import Section
from mtrain.tasks.detection.section import DetectionDataSpec, DetectionEvaluateSpec, data_of, evaluation_of
from mtrain.tasks.image_task import ImageTask

if TYPE_CHECKING:
    from mtrain.core.interfaces.details import Detail
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.spec.model import Spec
    from mtrain.tasks.datasets import OpenData
    from mtrain.tasks.detection.annotations import Annotations
    from mtrain.tasks.detection.evaluator import CocoEvaluator
    from mtrain.tasks.detection.image_weights import ImageWeights
    from mtrain.tasks.detection.live import LiveDetection
    from mtrain.tasks.detection.prediction import DetectionImages


class DetectionTask(ImageTask):
    """The detection side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a
    ``TaskKind``."""

    # Every reading of a spec imports this module for its sections, so methods import what needs an image library.
    kind = "detection"
    sections: ClassVar[Mapping[str, type[Section]]] = {"data": DetectionDataSpec, "evaluate": DetectionEvaluateSpec}

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        super().__init__(spec, data, training=training)
        self._limit = evaluation_of(spec).max_detections
        self._image_weights: ImageWeights | None = None

    @classmethod
    def prepared(cls, data: Any, content: "Annotations") -> "Annotations":
        """Leave out missing images if ``data.skip_missing`` is set, and check that all have a usable size."""
        from mtrain.tasks.detection.selection import need_bounded_images, need_sizes, without_missing

        section: DetectionDataSpec = data
        if section.skip_missing:
            content = without_missing(content)
        need_sizes(content)
        need_bounded_images(content, max_pixels=section.max_pixels)
        return content

    @classmethod
    def varied(cls, batch: HostBatch, *, step: int) -> Sequence[tuple[HostBatch, Variation]]:
        """See ``TaskKind.varied``: the images, and mirrored and smaller copies of them."""
        from mtrain.data.images.varied import vary_images

        # (mirrored, scale) of each copy. A smaller copy has sides of its own, which a model without a step cannot take.
        kinds = ((False, 1.0), (True, 0.83), (False, 0.67)) if step else ((False, 1.0), (True, 1.0))
        copies = vary_images(batch["images"], kinds, step=step)
        return [({**batch, "images": images}, variation) for images, variation in copies]

    @classmethod
    def preprocessing(cls, spec: "Spec") -> dict[str, Any]:
        """Return how an image is fitted into the square input, as the keys of section ``data`` are called."""
        return {"resize": data_of(spec).resize, "fill": 114, "interpolation": "linear"}

    @classmethod
    def model_options(cls, spec: "Spec", defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Let a model that limits its predictions per image predict as many as are scored."""
        limit = evaluation_of(spec).max_detections
        return {"max_detections": limit} if defaults.get("max_detections", limit) < limit else {}

    @classmethod
    def images(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> "DetectionImages":
        """See ``TaskKind.images``. ``category_ids`` of ``labels`` default to 1, 2, ..."""
        from mtrain.tasks.detection.prediction import DetectionImages, without_boxes
        from mtrain.tasks.detection.selection import need_bounded_images

        names = labels["class_names"]
        ids = labels.get("category_ids") or range(1, len(names) + 1)
        images = without_boxes(files, class_names=names, category_ids=list(ids))
        need_bounded_images(images, max_pixels=data_of(spec).max_pixels)
        return DetectionImages(spec, images)

    @classmethod
    def live(cls, spec: "Spec", labels: Mapping[str, Any]) -> "LiveDetection":
        """See ``TaskKind.live``. ``category_ids`` of ``labels`` default to 1, 2, ..."""
        from mtrain.tasks.detection.live import LiveDetection

        names = labels["class_names"]
        return LiveDetection(spec, names, list(labels.get("category_ids") or range(1, len(names) + 1)))

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the sources: ``train`` (augmented; only for training) and ``val`` (only for evaluation)."""
        from mtrain.tasks.detection.source import open_sources

        train = self._data.train if self._training else None
        val = self._data.val if self._scored else None
        epochs = self._epochs() if self._training else None
        sources = open_sources(self._section, train, val, seed=self._spec.train.seed, epochs=epochs)
        return {str(name): source for name, source in sources.items()}

    def verify(self) -> str:
        """Check every image file: see ``check.verify_images``."""
        from mtrain.tasks.detection.check import verify_images

        return f"{verify_images(*self._splits().values())} image files, all whole"

    def statistics(self) -> Mapping[str, Any]:
        """Return the statistics of the training split: see ``mtrain.tasks.detection.label_statistics.statistics``."""
        from mtrain.tasks.detection.label_statistics import statistics

        section = self._section
        return statistics(self._data.train, image_size=section.image_size, stretch=section.resize == "stretch")

    def sample_weights(self, metrics: Mapping[str, float]) -> Array | None:
        """See ``TaskData.sample_weights``: by the classes of each image's boxes, see ``image_weights``."""
        if not self._section.image_weights:
            return None
        if self._image_weights is None:
            from mtrain.tasks.detection.image_weights import ImageWeights

            self._image_weights = ImageWeights(self._data.train)
        return self._image_weights.at(metrics)

    def evaluator(self) -> "CocoEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.detection.evaluator import CocoEvaluator

        return CocoEvaluator(self._data.val, max_detections=self._limit)

    def labels(self) -> dict[str, Any]:
        """Return the class names, and their ids in the annotation file, for the checkpoint."""
        return {**super().labels(), "category_ids": list(self._data.train.category_ids)}

    def report(self) -> list[str]:
        """Return a sentence for each kind of bad box, and for each reason why evaluation metrics may mislead."""
        return super().report() + ([f"data.val: {line}" for line in self._evaluation_caveats()] if self._scored else [])

    def _evaluation_caveats(self) -> Iterator[str]:
        from mtrain.tasks.detection.evaluator import NO_BOXES, box_counts, warn_of_crowds

        if not box_counts(self._data.val).any():
            yield f"{NO_BOXES}, and the last checkpoint counts as best"
        limit = self._limit
        warning = warn_of_crowds(self._data.val, limit)
        if warning is not None:
            yield warning
        model_limit = self._spec.model.options.get("max_detections", limit)
        if model_limit < limit:
            yield (
                f"evaluate.max_detections is {limit}, but model.options.max_detections keeps {model_limit} boxes of a "
                "image"
            )

    def describe(self) -> list[Table | Remark]:
        """Describe the data set in tables and remarks: see ``description.describe``."""
        from mtrain.tasks.detection.description import describe

        return describe(self._splits(), max_detections=self._limit)

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of both splits with their boxes, and of augmented training images."""
        from mtrain.tasks.detection.drawing import annotations_grid, inputs_grid
        from mtrain.tasks.detection.source import open_sources

        for split, annotations in self._splits().items():
            yield split, f"{split} images with their boxes", annotations_grid(annotations, limit=limit)
        # A few drawings must not fill a cache of the whole split.
        settings = self._section.model_copy(update={"cache": "none"})
        source = open_sources(settings, self._data.train, None, seed=self._spec.train.seed)["train"]
        grid = inputs_grid(source, self._data.class_names, limit=limit)
        yield "augmented", "train images as the network is given them", grid

    @override
    def _comparison(self, partial: Mapping[int, Any]) -> Array:
        """Draw ground truth beside predictions for some images of ``partial`` (boxes in pixels by sample index)."""
        from mtrain.tasks.detection.drawing import comparison

        return comparison(self._data.val, partial)

    def details(self, evaluator: "CocoEvaluator") -> "Sequence[Detail]":
        """See ``TaskData.details``."""
        from mtrain.tasks.detection.details import details_of

        return [] if evaluator.last is None else details_of(evaluator.last, max_detections=self._limit)

    def _epochs(self) -> int:
        """Return the length of the job in epochs; the last one may be incomplete."""
        train = self._spec.train
        per_epoch = max(len(self._data.train) // train.batch_size, 1)
        return train.epochs or -(-(train.updates or 1) // per_epoch)
