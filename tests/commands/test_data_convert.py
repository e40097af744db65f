"""``mtrain data convert``: a data set in another format has the same images, boxes and classes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mtrain.commands import main
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.section import DetectionDataSpec

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
NAMES = ["RBC", "WBC", "Platelets"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(kind: str, root: Path) -> list[Annotations]:
    actual: list[Annotations] = open_data(DetectionDataSpec(format=kind, root=str(root), names=NAMES)).both()
    return actual


def assert_same(result: list[Annotations], expected: list[Annotations], *, places_px: float) -> None:
    for one, other in zip(result, expected, strict=True):
        assert one.class_names == other.class_names
        assert one.problems == other.problems
        assert [p.path.name for p in one.images] == [p.path.name for p in other.images]
        for a, b in zip(one.images, other.images, strict=True):
            assert a.path.read_bytes() == b.path.read_bytes()
            assert (a.width, a.height) == (b.width, b.height)
            np.testing.assert_array_equal(a.labels, b.labels)
            np.testing.assert_allclose(a.boxes_xywh, b.boxes_xywh, rtol=0, atol=places_px)


@pytest.mark.parametrize("first", ["coco", "voc", "yolo"])
@pytest.mark.parametrize("second", ["coco", "voc", "yolo"])
def test_there_and_back_again_is_the_same_data_set(here: Path, first: str, second: str) -> None:
    start = SMALL if first == "coco" else SMALL / first
    names = "data.names=[RBC,WBC,Platelets]"
    there = ["data", "convert", "there", "--to", second, "--format", first, "--root", str(start), "-o", names]
    back = ["data", "convert", "back", "--to", first, "--format", second, "--root", "there", "-o", names]
    assert main(there) == 0
    assert main(back) == 0
    exact = 1e-9  # the last bit of a sum; what YOLO's six decimals have lost before is not lost again
    assert_same(read(second, here / "there"), read(first, start), places_px=exact)
    assert_same(read(first, here / "back"), read(first, start), places_px=exact)


def test_images_are_linked_or_copied_and_a_full_folder_is_refused(here: Path, capsys) -> None:
    arguments = ["--to", "yolo", "--format", "coco", "--root", str(SMALL)]
    assert main(["data", "convert", "copies", *arguments, "--images", "copy"]) == 0
    assert "4 train, 3 val images with" in capsys.readouterr().out
    image = next((here / "copies" / "images" / "train").iterdir())
    assert os.stat(image).st_nlink == 1
    moved = ["--to", "voc", "--format", "yolo", "--root", "copies"]
    assert main(["data", "convert", "links", *moved]) == 0
    assert os.stat(image).st_nlink == 2
    assert main(["data", "convert", "links", *moved]) == 2
    assert "links: is there and not empty; name a new folder" in capsys.readouterr().err


def coco_set(root: Path, rows: list[dict], files: list[str]) -> None:
    for name in files:
        target = root / "images" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((SMALL / "images" / "BloodImage_00000.jpg").read_bytes())
    images = [{"id": i, "file_name": name, "width": 640, "height": 480} for i, name in enumerate(files, start=1)]
    content = {
        "images": images,
        "annotations": rows,
        "categories": [{"id": 3, "name": "a"}, {"id": 9, "name": "b & <c>"}],
    }
    (root / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def test_what_a_format_cannot_hold_is_said(here: Path, capsys) -> None:
    rows = [
        {"id": 1, "image_id": 1, "category_id": 9, "bbox": [1.5, 2.25, 10.125, 20], "area": 7.0, "iscrowd": 1},
        {"id": 2, "image_id": 2, "category_id": 3, "bbox": [1, 2, 10, 20], "area": 200, "iscrowd": 0},
    ]
    coco_set(here / "set", rows, ["x/a.jpg", "y/a.jpg"])
    arguments = ["--format", "coco", "--root", "set"]
    assert main(["data", "convert", "v", "--to", "voc", *arguments]) == 0
    stdout = capsys.readouterr().out
    assert "note: 2 crowd boxes are marked difficult" in stdout
    assert "note: 2 areas that are not width x height are lost" in stdout
    voc = open_data(DetectionDataSpec(format="voc", root="v", options={"use_difficult": False})).train
    assert voc.class_names == ("a", "b & <c>")
    assert sorted(image.path.name for image in voc.images) == ["a-2.jpg", "a.jpg"]  # one folder holds both
    (crowd,) = (image for image in voc.images if image.crowd.any())
    assert crowd.boxes_xywh.tolist() == [[1.5, 2.25, 10.125, 20]]
    assert main(["data", "convert", "c", "--to", "coco", *arguments]) == 0
    saved = json.loads((here / "c" / "annotations" / "instances_train.json").read_text())
    assert [(a["area"], a["iscrowd"], a["category_id"]) for a in saved["annotations"]] == [(7.0, 1, 9), (200, 0, 3)]
