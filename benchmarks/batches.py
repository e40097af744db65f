"""Whether mtrain's augmented images and boxes have the distribution of an original's own: no training, only samples.

    PYTHON benchmarks/batches.py CHECKOUT DATA.yaml [--size 160] [--epochs 100]
    PYTHON benchmarks/batches.py CHECKOUT FOLDER --paddledetection [--size 128] [--epochs 10] [-o PATH=VALUE ...]

PYTHON is an interpreter that has what the original imports and what mtrain needs. YOLOv5 and mtrain read the same split of YOLO's
form with hyp.scratch-low; PaddleDetection and mtrain read the same folder in COCO form with the transforms of
``ppyoloe_crn_s_300e_coco.yml``, where the samples of a batch of 8 share their interpolation. Each line is a figure of a sample (an
image with its boxes): the mean of both sides, and the difference in standard errors. Samples are independent but for the images
that they share, so 3 or more is a difference.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

Sample = tuple[NDArray[np.uint8], NDArray[np.float64]]
"""Pixels (S, S, 3), RGB, and rows (N, 5): class, centre and sides in shares of the image."""


def main() -> int:
    """Draw samples of both sides, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("data", type=Path, help="data.yaml with an absolute path, or the folder in COCO form")
    parser.add_argument("--paddledetection", action="store_true", help="the checkout is PaddleDetection's")
    parser.add_argument("-o", dest="values", nargs="+", default=[], metavar="PATH=VALUE", help="of mtrain's spec")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()
    draws = (paddledetection, ours_of_paddledetection) if arguments.paddledetection else (original, ours)
    sides = [[figures(*sample, size=arguments.size) for sample in draw(arguments)] for draw in draws]
    print(
        f"{'figure':<16} {'original':>10} {'mtrain':>10} {'difference':>11}   ({len(sides[0])} and {len(sides[1])} samples)"
    )
    for name in sides[0][0]:
        theirs, own = (np.array([sample[name] for sample in side]) for side in sides)
        theirs, own = theirs[np.isfinite(theirs)], own[np.isfinite(own)]
        error = np.sqrt(theirs.var() / len(theirs) + own.var() / len(own))
        print(f"{name:<16} {theirs.mean():>10.4f} {own.mean():>10.4f} {(own.mean() - theirs.mean()) / error:>+11.2f}")
    return 0


def original(arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield the original's samples."""
    from benchmarks.peers.yolov5_train import named_operator

    # None makes the import fail, as where the package is not installed.
    sys.modules["albumentations"] = None  # type: ignore[assignment]
    library = named_operator()  # kept while samples are drawn
    sys.path.insert(0, str(arguments.checkout))
    from utils.dataloaders import LoadImagesAndLabels

    settings = yaml.safe_load((arguments.checkout / "data" / "hyps" / "hyp.scratch-low.yaml").read_text())
    described = yaml.safe_load(arguments.data.read_text())
    random.seed(7)
    np.random.seed(7)
    folder = str(Path(described["path"]) / described["train"])
    data: Any = LoadImagesAndLabels(folder, arguments.size, 8, augment=True, hyp=settings, cache_images="ram")
    for _ in range(arguments.epochs):
        for number in range(len(data)):
            pixels, labels, *_rest = data[number]
            yield pixels.numpy().transpose(1, 2, 0), labels[:, 1:].numpy().astype(np.float64)
    del library


def ours(arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield mtrain's samples."""
    from mtrain.spec import config
    from mtrain.tasks.datasets import open_data

    root = yaml.safe_load(arguments.data.read_text())["path"]
    values = ["data.format=yolo", f"data.root={root}", "data.cache=ram", f"data.image_size={arguments.size}"]
    values.append(f"train.epochs={arguments.epochs}")  # mosaics end with the job
    loaded = config.load("yolov5n_bccd_reference", overrides=[*values, "data.names=null"])
    opened = open_data(loaded.spec.data, registry=loaded.job.registry)
    source = loaded.job.task_named("detection")(loaded.spec, opened).sources()["train"]
    for epoch in range(arguments.epochs):
        for number in range(len(source)):
            sample = source.sample(epoch, number)
            yield sample.image, sample.targets.astype(np.float64)


def paddledetection(arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield PaddleDetection's samples, as its reader hands them to the network."""
    import tempfile

    from benchmarks.peers.ppyoloe_record import MEAN, STD, Finder
    from benchmarks.peers.ppyoloe_train import CONFIG

    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    sys.path.insert(0, str(arguments.checkout.resolve()))
    from ppdet.core.workspace import create, load_config

    values = {"rate": 0.01, "epochs": 1, "horizon": 1, "static": 1, "batch": 8, "classes": 3, "side": arguments.size}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yml")
        places = {"checkout": arguments.checkout.resolve(), "data": arguments.data.resolve(), "folder": folder}
        config.write_text(CONFIG.format(**values, **places))
        load_config(str(config))
    random.seed(7)
    np.random.seed(7)
    dataset = create("TrainDataset")()
    for _ in range(arguments.epochs):
        for batch in create("TrainReader")(dataset, 0):
            pixels = batch["image"].numpy().transpose(0, 2, 3, 1) * STD + MEAN
            there = batch["pad_gt_mask"].numpy()[..., 0] > 0
            for number, image in enumerate(np.rint(pixels * 255).clip(0, 255).astype(np.uint8)):
                corners = batch["gt_bbox"].numpy()[number][there[number]] / arguments.size
                labels = batch["gt_class"].numpy()[number][there[number]]
                halves = corners[:, :2] + corners[:, 2:], corners[:, 2:] - corners[:, :2]
                yield image, np.concatenate((labels, halves[0] / 2, halves[1]), axis=1).astype(np.float64)


def ours_of_paddledetection(arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield mtrain's samples under the spec of the study of seeds."""
    from mtrain.spec import config
    from mtrain.tasks.datasets import open_data

    spec = Path(__file__).parent / "pairs" / "specs" / "ppyoloe_s_bccd.yml"
    values = [f"data.root={arguments.data}", f"data.image_size={arguments.size}", *arguments.values]
    loaded = config.load(str(spec), overrides=values)
    opened = open_data(loaded.spec.data, registry=loaded.job.registry)
    source = loaded.job.task_named("detection")(loaded.spec, opened).sources()["train"]
    for epoch in range(arguments.epochs):
        for number in range(len(source) // 8 * 8):
            sample = source.sample(epoch, number, update=epoch * (len(source) // 8) + number // 8)
            yield sample.image, sample.targets.astype(np.float64)


def figures(pixels: NDArray[np.uint8], rows: NDArray[np.float64], *, size: int) -> dict[str, float]:
    """Return the figures of one sample; those of boxes that it does not have are not finite."""
    low, high = rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2
    cut = ((low < 1e-4) | (high > 1 - 1e-4)).any(axis=1)
    sides = rows[:, 3:5] * size
    wide = (sides.max(axis=1) > 3 * sides.min(axis=1)) if len(rows) else cut
    found = {"boxes": len(rows), "boxes cut": cut.sum(), "boxes 3:1": wide.sum(), "sides < 4 px": (sides < 4).sum()}
    found |= {f"boxes of {label}": (rows[:, 0] == label).sum() for label in range(3)}
    found |= {
        "mean width": sides[:, 0].mean() if len(rows) else np.nan,
        "mean height": sides[:, 1].mean() if len(rows) else np.nan,
    }
    found |= {f"mean {name}": pixels[..., i].mean() for i, name in enumerate(("red", "green", "blue"))}
    found |= {f"spread {name}": pixels[..., i].std() for i, name in enumerate(("red", "green", "blue"))}
    found["grey of 114"] = (pixels == 114).all(axis=2).mean()
    found["step of pixels"] = np.abs(np.diff(pixels.astype(np.int16), axis=1)).mean()
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    raise SystemExit(main())
