"""The data set `labelme_groups`: boxes of every kind of shape, classes, damaged files; and mtrain's own checks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtrain_labelme.dataset import LabelMe
from mtrain_labelme.shapes import Shape, box_of, objects_of, read_file

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError

TRIANGLE = [[10, 10], [30, 10], [10, 40]]


def read(root: Path, split: Any = "train", **options: Any) -> Any:
    return LabelMe(LabelMe.Options(**options)).read(SplitRequest(root=root, split=split))


def add(root: Path, *shapes: Any, **more: Any) -> None:
    """Replace the shapes of the first training image."""
    file = root / "train" / "000.json"
    defaults = {"group_id": None, "flags": {}}
    values = {**json.loads(file.read_text()), "shapes": [defaults | shape for shape in shapes], **more}
    file.write_text(json.dumps(values))


def test_both_splits_are_read_with_the_classes_of_training(export: Path) -> None:
    train, val = read(export), read(export, "val")
    assert (len(train), len(val), train.class_names) == (8, 4, ("disc", "square"))
    assert [sample.path.name for sample in train.samples[:2]] == ["000.png", "001.png"]
    assert train.report() == []


@pytest.mark.parametrize(
    ("kind", "points", "box", "area"),
    [
        ("rectangle", [[30, 40], [10, 10]], [10, 10, 20, 30], 600),
        ("polygon", TRIANGLE, [10, 10, 20, 30], 300),
        ("circle", [[20, 20], [23, 24]], [15, 15, 10, 10], 25 * np.pi),
        ("linestrip", TRIANGLE, [10, 10, 20, 30], 600),
    ],
)
def test_a_shape_has_its_box_and_its_area(kind: str, points: Any, box: list[float], area: float) -> None:
    shape = Shape(label="a", points=points, shape_type=kind)
    assert box_of([shape]).tolist() == box
    assert shape.area() == pytest.approx(area)


def test_parts_of_one_group_are_one_object_and_labels_are_kept_apart() -> None:
    shapes = [
        Shape(label=label, points=[(x, 0), (x + 5, 5)], shape_type="rectangle", group_id=group)
        for label, x, group in [("cup", 0, 1), ("cup", 20, 1), ("cup", 40, None), ("hand", 60, 1), ("cup", 70, None)]
    ]
    assert [box_of(parts).tolist()[0::2] for parts in objects_of(shapes)] == [[0, 25], [40, 5], [60, 5], [70, 5]]


def test_kinds_of_shapes_and_labels_can_be_left_out_and_flags_mark_crowds(export: Path) -> None:
    add(
        export,
        {"label": "disc", "points": [[1, 1], [9, 9]], "shape_type": "rectangle", "flags": {"crowd": True}},
        {"label": "__ignore__", "points": [[1, 1], [9, 9]], "shape_type": "rectangle"},
        {"label": "disc", "points": [[1, 1], [9, 9]], "shape_type": "line"},
    )
    split = read(export)
    assert split.samples[0].crowd.tolist() == [True]
    assert split.report() == ["1 shapes of the kind line are left out (data.options.shapes)"]
    assert len(read(export, shapes=["line"]).samples[0].boxes) == 1


def test_images_are_found_beside_their_file_when_its_path_is_of_another_machine(export: Path) -> None:
    add(export, imagePath="C:\\Users\\me\\images\\000.png", imageWidth=None)
    sample = read(export).samples[0]
    assert (sample.path, sample.width) == (export / "train" / "000.png", 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no file of LabelMe: Invalid JSON"),
        ("[]", "no file of LabelMe: Input should be an object"),
        ('{"imagePath": "a.png"}', "no file of LabelMe: shapes: Field required"),
        (
            '{"imagePath": "a.png", "shapes": [{"label": "a", "points": [[1, 1e400]]}]}',
            "no file of LabelMe: shapes.0.points.0.1: Input",
        ),
        ("[" * 100_000, "no file of LabelMe: Invalid JSON: recursion limit exceeded"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(export: Path, text: str, message: str) -> None:
    (export / "train" / "003.json").write_text(text)
    with pytest.raises(DataError) as error:
        read(export)
    assert f"003.json: {message}" in str(error.value)
    with pytest.raises(DataError):
        read_file(export / "train" / "nosuch.json")


def test_a_class_that_only_the_evaluation_split_has_is_refused(export: Path) -> None:
    file = export / "val" / "000.json"
    file.write_text(file.read_text().replace('"disc"', '"ball"'))
    with pytest.raises(DataError, match="unknown class 'ball'"):
        LabelMe(LabelMe.Options()).read(SplitRequest(root=export, names=["disc", "square"], split="val"))


def test_it_passes_the_checks_of_mtrain(export: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mtrain", "plugins", "test", "labelme_groups", "--kind", "datasets"]
    result = subprocess.run(
        [*line, "-o", f"data.root={export}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
