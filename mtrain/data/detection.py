"""Everything that a detection job asks of its data: sources, statistics, evaluator, pictures. It decides nothing itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mtrain.core.errors import DataError
from mtrain.core.interfaces import Task
from mtrain.data.sample import Annotations, Picture, assemble

if TYPE_CHECKING:
    from mtrain.core.spec import Spec
    from mtrain.data import DetectionData
    from mtrain.data.evaluation import CocoEvaluator
    from mtrain.data.loading import PooledSource


class DetectionTask:
    """The detection side of one job."""

    kind: ClassVar[str] = "detection"

    def __init__(self, spec: "Spec", data: "DetectionData", *, training: bool = True) -> None:
        self._spec = spec
        self._data = data
        self._training = training

    def task(self) -> Task:
        """What a model must know before it is built."""
        return _task(self._spec, self._data.class_names)

    def sources(self) -> "Mapping[str, PooledSource]":
        """``train`` (augmented; left out where nothing is trained) and ``val``."""
        from mtrain.data.source import open_sources

        train = self._data.train if self._training else None
        sources = open_sources(
            self._spec.data, train, self._data.val, seed=self._spec.train.seed, epochs=self._epochs()
        )
        return {str(name): source for name, source in sources.items()}

    def splits(self) -> list[Annotations]:
        """The splits that the job reads."""
        return self._data.both() if self._training else [self._data.val]

    def length(self, split: str) -> int:
        """Samples of ``train`` or ``val``."""
        return len(self._split(split))

    def statistics(self) -> Mapping[str, Any]:
        """Of the training split: see ``mtrain.data.statistics.statistics``."""
        from mtrain.data.statistics import statistics

        data = self._spec.data
        return statistics(self._data.train, image_size=data.image_size, stretch=data.resize == "stretch")

    def evaluator(self) -> "CocoEvaluator":
        """A fresh one over the evaluation split."""
        from mtrain.data.evaluation import CocoEvaluator

        return CocoEvaluator(self._data.val)

    def labels(self) -> dict[str, Any]:
        """What a checkpoint remembers of the classes: names, and ids as the annotation file has them."""
        return {"class_names": list(self._data.class_names), "category_ids": list(self._data.train.category_ids)}

    def report(self) -> list[str]:
        """One sentence per kind of bad box of the training and the evaluation split."""
        names = ("train", "val") if self._training else ("val",)
        return [f"data.{split}: {line}" for split in names for line in self._split(split).report()]

    def draw(self, found: Mapping[int, Any], path: Path) -> None:
        """Ground truth beside predictions for some pictures of ``found`` (boxes in pixels by sample index)."""
        from mtrain.data.draw import comparison, save_picture

        save_picture(comparison(self._data.val, found), path)

    def _split(self, split: str) -> Annotations:
        return self._data.train if split == "train" else self._data.val

    def _epochs(self) -> int:
        """Length of the job in epochs, the last one perhaps cut short."""
        train = self._spec.train
        per_epoch = max(len(self._data.train) // train.batch_size, 1)
        return train.epochs or -(-(train.updates or 1) // per_epoch)


class PictureTask:
    """Pictures without annotations, for prediction; the same members as ``DetectionTask``."""

    kind: ClassVar[str] = "detection"

    def __init__(self, spec: "Spec", pictures: Annotations) -> None:
        self._spec = spec
        self.pictures = pictures

    def task(self) -> Task:
        """What a model must know before it is built."""
        return _task(self._spec, self.pictures.class_names)

    def sources(self) -> "Mapping[str, PooledSource]":
        """``val``: the pictures."""
        from mtrain.data.source import open_sources

        return {
            str(name): source for name, source in open_sources(self._spec.data, None, self.pictures, seed=0).items()
        }

    def length(self, split: str) -> int:
        """Pictures."""
        return len(self.pictures)

    def statistics(self) -> Mapping[str, Any]:
        """Nothing is known of boxes."""
        return {}

    def evaluator(self) -> "CocoEvaluator":
        """Collects predictions; there is nothing to score them by."""
        from mtrain.data.evaluation import CocoEvaluator

        return CocoEvaluator(self.pictures)


def unannotated(files: Sequence[Path], *, class_names: Sequence[str], category_ids: Sequence[int]) -> Annotations:
    """Pictures without boxes, in the order of their names; ``image_id`` is their place in it, from 1.

    Raises:
        DataError: some cannot be read; all of them are named.
    """
    from mtrain.data.header import probe
    from mtrain.data.reading import listed

    pictures, problems = [], []
    for number, file in enumerate(sorted(files), start=1):
        try:
            width, height = probe(file)
        except DataError as error:
            problems.append(str(error))
            continue
        pictures.append(
            Picture(
                path=file,
                file_name=str(file),
                image_id=number,
                width=width,
                height=height,
                boxes_xywh=np.zeros((0, 4)),
                labels=np.zeros(0, np.int64),
                crowd=np.zeros(0, np.bool_),
                area=np.zeros(0),
            )
        )
    if problems:
        raise DataError(f"{len(problems)} of {len(files)} pictures cannot be read:\n{listed(problems)}")
    return assemble(pictures, class_names=class_names, category_ids=category_ids)


def _task(spec: "Spec", class_names: Sequence[str]) -> Task:
    return Task(
        kind="detection",
        class_names=class_names,
        image_size=spec.data.image_size,
        global_batch=spec.train.batch_size,
    )
