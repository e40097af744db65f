"""Segmentation as a kind of task: connect a job to data sets of images with masks. The work is done in other modules."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, Remark, Table
from mtrain.core.overriding import override
from mtrain.spec.section import Section
from mtrain.tasks.image_task import ImageTask
from mtrain.tasks.segmentation.section import SegmentationDataSpec, data_of

if TYPE_CHECKING:
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.spec.model import Spec
    from mtrain.tasks.segmentation.evaluator import MaskEvaluator
    from mtrain.tasks.segmentation.live import LiveSegmentation
    from mtrain.tasks.segmentation.masks import MaskedImages
    from mtrain.tasks.segmentation.prediction import SegmentationImages


class SegmentationTask(ImageTask):
    """The segmentation side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a
    ``TaskKind``."""

    # Every reading of a spec imports this module for its sections, so methods import what needs an image library.
    kind = "segmentation"
    input_key = "pixels"
    sections: ClassVar[Mapping[str, type[Section]]] = {"data": SegmentationDataSpec}

    @classmethod
    def prepared(cls, data: Any, content: "MaskedImages") -> "MaskedImages":
        """Let the split refuse images and masks of more than ``data.max_pixels``."""
        from dataclasses import replace

        section: SegmentationDataSpec = data
        return replace(content, max_pixels=section.max_pixels)

    @classmethod
    def preprocessing(cls, spec: "Spec") -> dict[str, Any]:
        """Return how an image is fitted into the square input, as the keys of section ``data`` are called."""
        return {"resize": data_of(spec).resize}

    @classmethod
    def images(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> "SegmentationImages":
        """See ``TaskKind.images``."""
        from mtrain.tasks.segmentation.prediction import SegmentationImages, without_labels

        limit = data_of(spec).max_pixels
        return SegmentationImages(spec, without_labels(files, class_names=labels["class_names"], max_pixels=limit))

    @classmethod
    def live(cls, spec: "Spec", labels: Mapping[str, Any]) -> "LiveSegmentation":
        """See ``TaskKind.live``."""
        from mtrain.tasks.segmentation.live import LiveSegmentation

        return LiveSegmentation(spec, labels["class_names"])

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the sources: ``train`` (augmented; only for training) and ``val`` (only for evaluation)."""
        from mtrain.tasks.segmentation.source import SegmentationSource

        data, seed = self._section, self._spec.train.seed
        fit: Any = {"side": data.image_size, "resize": data.resize}
        sources = {}
        if self._training:
            sources["train"] = SegmentationSource(self._data.train, **fit, augment=data.augment, seed=seed)
        if self._scored:
            sources["val"] = SegmentationSource(self._data.val, **fit)
        return sources

    def verify(self) -> str:
        """Check every image and every mask: see ``masks.count_pixels``."""
        from mtrain.tasks.segmentation.masks import count_pixels

        splits = self._splits()
        for split in splits.values():
            count_pixels(split)
        return f"{sum(map(len, splits.values()))} images with their masks, all read"

    def evaluator(self) -> "MaskEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.segmentation.evaluator import MaskEvaluator

        return MaskEvaluator(self._data.val, resize=self._section.resize)

    def describe(self) -> list[Table | Remark]:
        """Tabulate the images per split and the share of pixels per class."""
        from mtrain.tasks.segmentation.masks import count_pixels

        splits = self._splits()
        totals = Table(columns=("", *splits), rows=[("images", *(str(len(split)) for split in splits.values()))])
        counts = {name: count_pixels(split) for name, split in splits.items()}
        names = (*self._data.class_names, "no class")
        rows = [
            (str(label), name, *(f"{count[label] / max(count.sum(), 1):.2%}" for count in counts.values()))
            for label, name in enumerate(names)
        ]
        parts: list[Table | Remark] = [totals]
        parts.append(Table(columns=("label", "class", *(f"{name} pixels" for name in splits)), rows=rows))
        parts += [Remark(text=f"{name}: {line}") for name, split in splits.items() for line in split.report()]
        for name, count in counts.items():
            missing = [label for label, pixels in zip(names[:-1], count, strict=False) if not pixels]
            text = f"classes without a pixel: {', '.join(missing[:20])}" if missing else "every class occurs"
            parts.append(Remark(text=f"{name}: {text}", good=not missing))
        return parts

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of the splits with their masks, and of augmented training images."""
        from mtrain.tasks.segmentation.drawing import inputs_grid, masks_grid

        for name, split in self._splits().items():
            yield name, f"{name} images with their masks", masks_grid(split, limit=limit)
        inputs = inputs_grid(self.sources()["train"], self._data.train, limit=limit)
        yield "augmented", "train images as the network is given them", inputs

    @override
    def _comparison(self, partial: Mapping[int, Any]) -> Array:
        """Draw some images with their mask and their predicted classes."""
        from mtrain.tasks.segmentation.drawing import comparison

        return comparison(self._data.val, partial)
