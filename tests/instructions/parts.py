"""The parts of mtrain whose instructions are counted. This program runs under callgrind: see ``__main__.py``.

usage: parts.py PROGRAM LIBRARY FOLDER
"""

import contextlib
import ctypes
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
SIDE = 64
"""Side of the images of an update, in pixels."""
IMAGES, IMAGE_PX = 8, (240, 320)
"""How many images the loader has, and their height and width."""
MOSAICS = 4
WARMING, UPDATES = 10, 20
"""Updates of a session before those that are counted, and how many are."""
SCORED = 16
"""Images whose detections are scored."""


class Marks:
    """Tells callgrind when a part begins and ends."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def begin(self) -> None:
        """Begin to count."""
        self._library.begin()

    def end(self, name: str) -> None:
        """End it; what was counted is the part ``name``."""
        self._library.end(name.encode())

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside, as ``name``."""
        self.begin()
        try:
            yield
        finally:
            self.end(name)


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
    """Mosaics of four JPEGs each, with all variations, as the loader's processes make them; then random windows of as many."""
    import cv2
    import numpy as np

    from mtrain.tasks.classification.images import EncodedImages
    from mtrain.tasks.classification.labels import LabelledImages
    from mtrain.tasks.classification.section import ClassificationAugmentSpec
    from mtrain.tasks.classification.source import ClassificationSource
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
    paths = [str(image.path) for image in images]
    split = LabelledImages(EncodedImages(paths), np.zeros(IMAGES, int), ("a",), paths)
    windows = ClassificationSource(split, side=112, resize="crop", augment=ClassificationAugmentSpec())
    windows.sample(0, 0)
    with marks.part("windows"):
        windows.collate([windows.sample(0, number) for number in range(1, 1 + MOSAICS)])


def session(marks: Marks, folder: Path) -> None:
    """Updates of a tiny network in a script's session, with reading, agreement and records, and the same ones of a plain loop."""
    # What is done every few seconds would be counted oftener on a busy machine.
    time.monotonic = time.perf_counter = time.time = lambda: 0.0
    import torch

    import mtrain

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    points = torch.utils.data.TensorDataset(*(torch.randn(1024, size, generator=generator) for size in (8, 1)))

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(inputs), targets)

    plain = build()
    native = torch.optim.SGD(plain.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(points, batch_size=8)
    for number, (inputs, targets) in enumerate(loader):
        if number == WARMING:
            marks.begin()
        native.zero_grad()
        loss_of(plain, inputs, targets).backward()
        native.step()
        if number == WARMING + UPDATES - 1:
            marks.end("plain_loop")
            break
    os.chdir(folder)
    with mtrain.session() as script:
        model, optimizer = script.prepare(build, optimizer=mtrain.SGD(learning_rate=0.01))
        for number, (inputs, targets) in enumerate(
            script.batches(points, global_batch=8, updates=2 * WARMING + UPDATES)
        ):
            if number == WARMING:
                marks.begin()
            optimizer.update(loss_of(model, inputs, targets))
            if number == WARMING + UPDATES - 1:
                marks.end("session")


def scoring(marks: Marks, folder: Path) -> None:
    """The twelve metrics of COCO of detections that are there already."""
    import numpy as np

    from benchmarks import evaluation
    from mtrain.models.common.nms import Selection, detections
    from mtrain.tasks.detection.annotations import AnnotatedImage, assemble
    from mtrain.tasks.detection.evaluator import CocoEvaluator

    made = evaluation.made(SCORED, 300)
    limits = {"confidence": evaluation.CONFIDENCE, "iou_threshold": evaluation.IOU, "max_detections": evaluation.KEPT}
    selection = Selection(**limits, multi_label=True, class_agnostic=False)
    found = [detections(rows, selection) for rows in made["outputs"]]
    images = []
    for number, rows in enumerate(made["objects"]):
        boxes = np.concatenate((rows[:, 1:3], rows[:, 3:] - rows[:, 1:3]), axis=1)
        place, crowd = Path(f"{number:03}.jpg"), np.zeros(len(rows), bool)
        images.append(
            AnnotatedImage(
                place, place.name, number, 320, 320, boxes, rows[:, 0].astype(int), crowd, boxes[:, 2:].prod(1)
            )
        )
    annotations = assemble(images, class_names="0123456789", category_ids=range(10))
    batch = {"index": np.arange(SCORED), "scale_pad": np.tile(np.array([1, 1, 0, 0], np.float32), (SCORED, 1))}
    for counted in (False, True):
        evaluator = CocoEvaluator(annotations)
        with marks.part("scoring") if counted else contextlib.nullcontext():
            evaluator.add(batch, found)
            evaluator.result([evaluator.partial()])


PROGRAMS = {function.__name__: function for function in (plan, rank, loader, session, scoring)}

if __name__ == "__main__":
    program, library, place = sys.argv[1:]
    PROGRAMS[program](Marks(library), Path(place))
