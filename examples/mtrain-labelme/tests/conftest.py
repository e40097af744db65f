"""A small data set in LabelMe's form: coloured discs and squares, drawn from a seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

SIDE = 64


def draw(folder: Path, *, count: int, seed: int) -> None:
    """Write `count` PNG files of 64 x 64 pixels into `folder`, each with its JSON file."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        image = Image.new("RGB", (SIDE, SIDE), (200, 200, 200))
        brush, shapes = ImageDraw.Draw(image), []
        for label in ("disc", "square"):
            radius = int(rng.integers(6, 12))
            x, y = (int(value) for value in rng.integers(radius, SIDE - radius, 2))
            box = (x - radius, y - radius, x + radius, y + radius)
            if label == "disc":
                brush.ellipse(box, fill=(200, 40, 40))
                shapes.append(shape(label, [(x, y), (x + radius, y)], "circle"))
            else:
                brush.rectangle(box, fill=(40, 40, 200))
                shapes.append(shape(label, [box[:2], box[2:]], "rectangle"))
        image.save(folder / f"{number:03}.png")
        (folder / f"{number:03}.json").write_text(json.dumps(content(f"{number:03}.png", shapes)))


def shape(label: str, points: Any, kind: str, **more: Any) -> dict[str, Any]:
    """One shape as LabelMe writes it."""
    return {"label": label, "points": points, "shape_type": kind, "group_id": None, "flags": {}, **more}


def content(image: str, shapes: list[Any], **more: Any) -> dict[str, Any]:
    """The content of a file as LabelMe writes it."""
    return {
        "version": "5.5.0",
        "flags": {},
        "shapes": shapes,
        "imagePath": image,
        "imageData": None,
        "imageHeight": SIDE,
        "imageWidth": SIDE,
        **more,
    }


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """The folder of a data set with both splits."""
    draw(tmp_path / "set" / "train", count=8, seed=1)
    draw(tmp_path / "set" / "val", count=4, seed=2)
    return tmp_path / "set"
