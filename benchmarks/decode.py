"""Measure the CPU time of inputs for evaluation with ``data.decode: exact`` and ``fast``, in turns.

The images are those of a data set in COCO's form, enlarged to the widths that are named and stored with quality 90.

    python benchmarks/decode.py COCO_FOLDER [--widths 1280 1920 2560] [--sides 640 320] [--rounds 15]
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtrain.core.interfaces import SplitRequest
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.readers.coco import Coco
from mtrain.tasks.detection.source import DetectionSource

IMAGES = 6


def enlarged(annotations: Annotations, width: int, folder: Path) -> Annotations:
    """Return the first images at another width, without boxes."""
    found, empty = [], (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, bool), np.zeros(0))
    for i, sample in enumerate(annotations.samples[:IMAGES]):
        path, height = folder / f"{width}-{i}.jpg", sample.height * width // sample.width
        image = cv2.resize(cv2.imread(str(sample.path)), (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        found.append(AnnotatedImage(path, path.name, i, width, height, *empty))
    return assemble(found, class_names=("a",), category_ids=(1,))


def spent(source: DetectionSource, side: int) -> float:
    """Return the CPU seconds per image."""
    out, start = np.empty((side, side, 3), np.uint8), time.process_time_ns()
    for index in range(len(source)):
        source.fill(0, index, out)
    return (time.process_time_ns() - start) / len(source) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coco", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[1280, 1920, 2560])
    parser.add_argument("--sides", type=int, nargs="+", default=[640, 320])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    cv2.setNumThreads(0)
    annotations = Coco(Coco.Options()).read(SplitRequest(root=options.coco, split="train"))
    with tempfile.TemporaryDirectory() as folder:
        for width in options.widths:
            images = enlarged(annotations, width, Path(folder))
            for side in options.sides:
                exact, fast = (DetectionSource(images, image_size=side, decode=way) for way in ("exact", "fast"))
                pairs = [(spent(exact, side), spent(fast, side)) for _ in range(options.rounds)]
                ratios = sorted(a / b for a, b in pairs)
                times = [statistics.median(values) * 1000 for values in zip(*pairs, strict=True)]
                print(
                    f"{width} px to {side}: exact {times[0]:.1f} ms, fast {times[1]:.1f} ms, ratio "
                    f"{statistics.median(ratios):.2f} (middle half {ratios[len(ratios) // 4]:.2f} to "
                    f"{ratios[-len(ratios) // 4]:.2f})",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
