"""The parts of mtrain whose instructions are counted. This program runs under callgrind: see ``__main__.py``.

usage: parts.py PROGRAM LIBRARY FOLDER
"""

import contextlib
import ctypes
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
SIDE = 64
"""Side of the images of an update, in pixels."""
IMAGES, IMAGE_PX = 8, (240, 320)
"""How many images the loader has, and their height and width."""
MOSAICS = 4


class Marks:
    """Tells callgrind when a part begins and ends."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside, as ``name``."""
        self._library.begin()
        try:
            yield
        finally:
            self._library.end(name.encode())


def plan(marks: Marks, folder: Path) -> None:
    """``mtrain plan`` of a shipped spec, from the import of mtrain to the printed plan."""
    sys.argv = ["mtrain", "plan", "-c", "digits", "-o", f"report.dir={folder}"]
    with marks.part("plan"), contextlib.suppress(SystemExit):
        runpy.run_module("mtrain", run_name="__main__")


def rank(marks: Marks, folder: Path) -> None:
    """YOLOv5n in one process: its session and model from the import of the framework on, then its third update."""
    import torch

    from benchmarks import job, turns
    from mtrain.spec import plugins

    torch.set_num_threads(1)
    job.SIDE = SIDE
    loaded = plugins.load("backends", "solo")
    with marks.part("startup"):
        backend = loaded(loaded.Options(device="cpu"))
        session = backend.__enter__()
        job.bind(backend.framework)
        ours = turns.Ours(session, channels_last=True)
    ours.updates(2)
    with marks.part("update"):
        ours.updates(1)
    backend.__exit__(None, None, None)


def loader(marks: Marks, folder: Path) -> None:
    """Mosaics of four JPEGs each, with all variations, as the loader's processes make them."""
    import cv2
    import numpy as np

    from mtrain.tasks.detection.annotations import AnnotatedImage, assemble
    from mtrain.tasks.detection.section import AugmentSpec
    from mtrain.tasks.detection.source import DetectionSource

    cv2.setNumThreads(0)
    generator = np.random.default_rng(0)
    height, width = IMAGE_PX
    images = []
    for number in range(IMAGES):
        path = folder / f"{number}.jpg"
        coarse = generator.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        cv2.imwrite(str(path), cv2.resize(coarse, (width, height)))
        boxes = np.concatenate([generator.uniform(0, 150, (6, 2)), generator.uniform(20, 60, (6, 2))], axis=1)
        crowd = np.zeros(6, dtype=bool)
        images.append(
            AnnotatedImage(path, path.name, number, width, height, boxes, np.zeros(6, int), crowd, boxes[:, 2:].prod(1))
        )
    source = DetectionSource(
        assemble(images, class_names="a", category_ids=(1,)), image_size=320, augment=AugmentSpec()
    )
    source.sample(0, 0)
    with marks.part("loader"):
        source.collate([source.sample(0, number) for number in range(1, 1 + MOSAICS)])


PROGRAMS = {function.__name__: function for function in (plan, rank, loader)}

if __name__ == "__main__":
    program, library, place = sys.argv[1:]
    PROGRAMS[program](Marks(library), Path(place))
