"""Segmentation as a kind of task: connect a job to data sets of pictures with masks. The work is done in other modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, Remark, Table, Task
from mtrain.core.program import ProgramInput
from mtrain.spec.section import Section
from mtrain.tasks.base import TaskBase
from mtrain.tasks.description import describe_task
from mtrain.tasks.segmentation.section import SegmentationDataSpec, data_of

if TYPE_CHECKING:
    from mtrain.core.details import Detail
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.spec.model import Spec
    from mtrain.tasks.datasets import OpenData
    from mtrain.tasks.segmentation.evaluator import MaskEvaluator
    from mtrain.tasks.segmentation.live import LiveSegmentation
    from mtrain.tasks.segmentation.masks import MaskedPictures
    from mtrain.tasks.segmentation.prediction import SegmentationPictures


class SegmentationTask(TaskBase):
    """The segmentation side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a
    ``TaskKind``."""

    sections: ClassVar[Mapping[str, type[Section]]] = {"data": SegmentationDataSpec}

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        self._spec = spec
        self._section = data_of(spec)
        self._data = data
        self._training = training
        self._scored = spec.evaluate.enabled or not training

    @classmethod
    def divided(cls, data: Any, read_all: "Callable[[], MaskedPictures]") -> Any:
        """Divide all pictures where ``data.split`` says so."""
        from mtrain.tasks.segmentation.masks import divided

        section: SegmentationDataSpec = data
        if section.split is None:
            return None
        parts = divided(read_all(), section.split, seed=section.split_seed)
        return tuple(cls.prepared(section, part) for part in parts)

    @classmethod
    def prepared(cls, data: Any, content: "MaskedPictures") -> "MaskedPictures":
        """Let the split refuse pictures and masks of more than ``data.max_pixels``."""
        from dataclasses import replace

        section: SegmentationDataSpec = data
        return replace(content, max_pixels=section.max_pixels)

    @classmethod
    def unreadable(cls, spec: "Spec", files: Sequence[Path]) -> dict[Path, str]:
        """Return the pictures that cannot be decoded, or have more pixels than ``data.max_pixels``."""
        from mtrain.data.images.readable import unreadable

        return unreadable(files, max_pixels=data_of(spec).max_pixels)

    @classmethod
    def inputs(cls, spec: "Spec") -> Sequence[ProgramInput]:
        """Return the pictures: uint8 RGB, square."""
        side = data_of(spec).image_size
        return [ProgramInput(key="pixels", name="images", shape=(side, side, 3))]

    @classmethod
    def preprocessing(cls, spec: "Spec") -> dict[str, Any]:
        """Return how a picture is fitted into the square input, as the keys of section ``data`` are called."""
        return {"resize": data_of(spec).resize}

    @classmethod
    def pictures(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> "SegmentationPictures":
        """See ``TaskKind.pictures``."""
        from mtrain.tasks.segmentation.prediction import SegmentationPictures, unlabelled

        limit = data_of(spec).max_pixels
        return SegmentationPictures(spec, unlabelled(files, class_names=labels["class_names"], max_pixels=limit))

    @classmethod
    def live(cls, spec: "Spec", labels: Mapping[str, Any]) -> "LiveSegmentation":
        """See ``TaskKind.live``."""
        from mtrain.tasks.segmentation.live import LiveSegmentation

        return LiveSegmentation(spec, labels["class_names"])

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task("segmentation", self._spec, self._data.class_names)

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
        """Check every picture and every mask: see ``masks.counted``."""
        from mtrain.tasks.segmentation.masks import counted

        splits = self._splits()
        for split in splits.values():
            counted(split)
        return f"{sum(map(len, splits.values()))} pictures with their masks, all read"

    def length(self, split: str) -> int:
        """Return the number of samples of ``train`` or ``val``; 0 if a split is not used."""
        splits = self._splits()
        return len(splits[split]) if split in splits else 0

    def statistics(self) -> Mapping[str, Any]:
        """Return ``class_count`` and ``pictures`` of the training split."""
        return {"class_count": len(self._data.class_names), "pictures": len(self._data.train)}

    def evaluator(self) -> "MaskEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.segmentation.evaluator import MaskEvaluator

        return MaskEvaluator(self._data.val, resize=self._section.resize)

    def labels(self) -> dict[str, Any]:
        """Return the class names for the checkpoint."""
        return {"class_names": list(self._data.class_names)}

    def report(self) -> list[str]:
        """Return nothing: what is wrong with a picture or a mask is an error."""
        return []

    def describe(self) -> list[Table | Remark]:
        """Tabulate the pictures per split and the share of pixels per class."""
        from mtrain.tasks.segmentation.masks import counted

        splits = self._splits()
        totals = Table(columns=("", *splits), rows=[("pictures", *(str(len(split)) for split in splits.values()))])
        counts = {name: counted(split) for name, split in splits.items()}
        names = (*self._data.class_names, "no class")
        rows = [
            (str(label), name, *(f"{count[label] / max(count.sum(), 1):.2%}" for count in counts.values()))
            for label, name in enumerate(names)
        ]
        parts: list[Table | Remark] = [totals]
        parts.append(Table(columns=("label", "class", *(f"{name} pixels" for name in splits)), rows=rows))
        for name, count in counts.items():
            missing = [label for label, pixels in zip(names[:-1], count, strict=False) if not pixels]
            text = f"classes without a pixel: {', '.join(missing[:20])}" if missing else "every class occurs"
            parts.append(Remark(text=f"{name}: {text}", good=not missing))
        return parts

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of the splits with their masks, and of augmented training pictures."""
        from mtrain.tasks.segmentation.drawing import inputs_grid, masks_grid

        for name, split in self._splits().items():
            yield name, f"{name} pictures with their masks", masks_grid(split, limit=limit)
        inputs = inputs_grid(self.sources()["train"], self._data.train, limit=limit)
        yield "augmented", "train pictures as the network is given them", inputs

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Draw some pictures with their mask and their predicted classes."""
        from mtrain.data.images.drawing import save_picture
        from mtrain.tasks.segmentation.drawing import comparison

        save_picture(comparison(self._data.val, partial), path)

    def details(self, evaluator: "MaskEvaluator") -> "Sequence[Detail]":
        """See ``TaskData.details``."""
        return evaluator.details()

    def _splits(self) -> "dict[str, MaskedPictures]":
        if not self._training:
            return {"val": self._data.val}
        if not self._scored:
            return {"train": self._data.train}
        return dict(zip(("train", "val"), self._data.both(), strict=True))
