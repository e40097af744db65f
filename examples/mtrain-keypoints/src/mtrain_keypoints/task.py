"""The task plugin `keypoints`: connects a job to people in images. The work is done in other modules.

Every reading of a spec loads the class, so everything that needs images is imported when it is asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, Remark, Table, Task
from mtrain.spec.section import Section
from mtrain.tasks.base import TaskBase
from mtrain.tasks.description import describe_task
from mtrain_keypoints.section import KeypointDataSpec, KeypointEvaluateSpec, data_of, evaluation_of

if TYPE_CHECKING:
    from mtrain_keypoints.evaluator import PointEvaluator
    from mtrain_keypoints.people import People
    from mtrain_keypoints.prediction import UnlabelledImages
    from mtrain_keypoints.source import KeypointSource


class KeypointTask(TaskBase):
    """Find the points of a person in its box. The class is a `TaskKind`; its objects are `TaskData`."""

    sections: ClassVar[Mapping[str, type[Section]]] = {"data": KeypointDataSpec, "evaluate": KeypointEvaluateSpec}

    def __init__(self, spec: Any, data: Any, *, training: bool = True) -> None:
        self._spec, self._data, self._training = spec, data, training
        self._section = data_of(spec)
        self._scored = spec.evaluate.enabled or not training

    @classmethod
    def divided(cls, data: Any, read_all: "Callable[[], People]") -> "tuple[People, People] | None":
        """Divide all people where `data.split` says so."""
        from mtrain_keypoints.people import divided

        if data.split is None:
            return None
        train, val = divided(read_all(), data.split, seed=data.split_seed)
        return cls.prepared(data, train), cls.prepared(data, val)

    @classmethod
    def prepared(cls, data: Any, content: "People") -> "People":
        """Let the split refuse images of more than `data.max_pixels`."""
        return replace(content, max_pixels=data.max_pixels)

    @classmethod
    def unreadable(cls, spec: Any, files: Sequence[Path]) -> dict[Path, str]:
        """Return the images that cannot be decoded, or have more pixels than `data.max_pixels`."""
        from mtrain.data.images.readable import unreadable

        return unreadable(files, max_pixels=data_of(spec).max_pixels)

    @classmethod
    def images(cls, spec: Any, files: Sequence[Path], labels: Mapping[str, Any]) -> "UnlabelledImages":
        """Return images to predict on."""
        from mtrain_keypoints.prediction import UnlabelledImages, unlabelled

        limit = data_of(spec).max_pixels
        return UnlabelledImages(spec, unlabelled(files, names=labels["class_names"], max_pixels=limit))

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task("keypoints", self._spec, self._data.class_names)

    def sources(self) -> "dict[str, KeypointSource]":
        """Return the sources: `train` (augmented; only for training) and `val` (only for evaluation)."""
        from mtrain_keypoints.source import KeypointSource

        section, sources = self._section, {}
        if self._training:
            seed = self._spec.train.seed
            sources["train"] = KeypointSource(self._data.train, section, augment=section.augment, seed=seed)
        if self._scored:
            sources["val"] = KeypointSource(self._data.val, section)
        return sources

    def length(self, split: str) -> int:
        """Return the number of people of `train` or `val`; 0 if a split is not used."""
        splits = self._splits()
        return len(splits[split]) if split in splits else 0

    def statistics(self) -> dict[str, Any]:
        """Return no statistics: no network needs any."""
        return {}

    def evaluator(self) -> "PointEvaluator":
        """Return a new evaluator for the evaluation split."""
        from mtrain_keypoints.evaluator import PointEvaluator

        return PointEvaluator(self._data.val, near=evaluation_of(self._spec).near)

    def verify(self) -> str:
        """Check every image file.

        Raises:
            DataError: some cannot be read; the first ones are named.
        """
        from mtrain.data.images.readable import unreadable
        from mtrain.data.reading import listed
        from mtrain.errors import DataError

        splits = self._splits().values()
        files = sorted({path for split in splits for path in split.images if isinstance(path, Path)})
        problems = unreadable(files, max_pixels=self._section.max_pixels)
        if problems:
            lines = [f"{path}: {reason}" for path, reason in problems.items()]
            raise DataError(f"{len(lines)} of {len(files)} images cannot be used:\n{listed(lines)}")
        return f"{sum(map(len, splits))} people, {len(files)} image files, all whole"

    def labels(self) -> dict[str, Any]:
        """Return the names of the points for the checkpoint."""
        return {"class_names": list(self._data.class_names)}

    def report(self) -> list[str]:
        """Say where no point is known."""
        splits = self._splits().items()
        return [f"data.{name}: no point is known" for name, split in splits if not split.points[..., 2].any()]

    def describe(self) -> Sequence[Table | Remark]:
        """Tabulate how often each point is known."""
        splits = self._splits()
        rows = [
            (name, *(f"{split.points[:, number, 2].mean():.0%}" for split in splits.values()))
            for number, name in enumerate(self._data.class_names)
        ]
        totals = ("people", *(str(len(split)) for split in splits.values()))
        return [Table(columns=("known in", *splits), rows=[totals, None, *rows])]

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield drawings of the splits with their points, and of augmented training windows."""
        from mtrain_keypoints.drawing import inputs_grid, people_grid

        for name, split in self._splits().items():
            yield name, f"{name} images with their points", people_grid(split, limit=limit)
        if self._training:
            yield "augmented", "windows as the network is given them", inputs_grid(self.sources()["train"], limit=limit)

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Draw known points beside predicted ones."""
        from mtrain.data.images.drawing import save_image
        from mtrain_keypoints.drawing import comparison

        save_image(comparison(self._data.val, partial), path)

    def _splits(self) -> "dict[str, People]":
        if not self._training:
            return {"val": self._data.val}
        if not self._scored:
            return {"train": self._data.train}
        return dict(zip(("train", "val"), self._data.both(), strict=True))
