"""Find the points in images without annotations, and write them to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Task
from mtrain.core.record_files import write_json
from mtrain.data.images.drawing import save_image
from mtrain.data.images.header import probe
from mtrain.data.images.readable import unreadable
from mtrain.data.reading import listed, unique_stems
from mtrain.errors import DataError
from mtrain.tasks.description import describe_task
from mtrain_keypoints.drawing import marked
from mtrain_keypoints.evaluator import PointCollector
from mtrain_keypoints.people import People
from mtrain_keypoints.section import data_of
from mtrain_keypoints.source import KeypointSource


class UnlabelledImages:
    """Images to predict on, each with one person that fills it. Implements `ImageData`."""

    def __init__(self, spec: Any, people: People) -> None:
        self._spec, self._people = spec, people

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        return describe_task("keypoints", self._spec, self._people.class_names)

    def sources(self) -> dict[str, KeypointSource]:
        """Return the images as the source `val`."""
        section = data_of(self._spec).model_copy(update={"padding": 1.0})
        return {"val": KeypointSource(self._people, section)}

    def length(self, split: str) -> int:
        """Return the number of images."""
        return len(self._people)

    def statistics(self) -> dict[str, Any]:
        """Return no statistics."""
        return {}

    def evaluator(self) -> PointCollector:
        """Return an evaluator that only collects points."""
        return PointCollector()

    def write(
        self,
        partial: Mapping[int, NDArray[np.float64]],
        out: Path,
        *,
        confidence: float,
        draw: bool,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """Write `predictions.json`: an entry for each point of at least `confidence`, with `x` and `y` in pixels."""
        files = [Path(path) for path in self._people.images]
        rows = [
            {"file_name": (names or {}).get(files[i], str(files[i])), "class": name, "score": score, "x": x, "y": y}
            for i, points in sorted(partial.items())
            for name, (x, y, score) in zip(self._people.class_names, points.tolist(), strict=True)
            if score >= confidence
        ]
        write_json(out / "predictions.json", rows)
        if draw:
            for i, stem in enumerate(unique_stems(files)):
                chosen = partial[i] * (partial[i][:, 2:] >= confidence)
                save_image(marked(self._people.image(i), chosen), out / f"{stem}.jpg")


def unlabelled(files: Sequence[Path], *, names: Sequence[str], max_pixels: int) -> People:
    """Return images in the order of their names, as people without points.

    Raises:
        DataError: some cannot be read; all of them are named.
    """
    files = sorted(files)
    problems = [f"{file}: {reason}" for file, reason in unreadable(files, max_pixels=max_pixels).items()]
    if problems:
        raise DataError(f"{len(problems)} of {len(files)} images cannot be read:\n{listed(problems)}")
    sizes = np.array([probe(file) for file in files], dtype=np.float64).reshape(-1, 2)
    return People(
        images=files,
        boxes=np.concatenate([np.zeros_like(sizes), sizes], axis=1),
        points=np.zeros((len(files), len(names), 3)),
        class_names=tuple(names),
        keys=[str(file) for file in files],
        max_pixels=max_pixels,
    )
