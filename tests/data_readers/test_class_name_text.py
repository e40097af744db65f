"""Class names that are not UTF-8 are refused by every reader, with the name and the data set."""

import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.commands import main
from mtrain.errors import DataError
from mtrain.spec import config
from mtrain.tasks.datasets import open_data

STRANGE = os.fsdecode(b"caf\xe9")


def images(folder: Path, count: int = 2) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        cv2.imwrite(str(folder.parent / f"{index}.png"), np.zeros((16, 16, 3), np.uint8))
        os.rename(folder.parent / f"{index}.png", folder / f"{index}.png")


def folders(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split / STRANGE)
        images(root / split / "dog")


def coco(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split)
        content = {
            "images": [{"id": 1, "file_name": "0.png", "width": 16, "height": 16}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 8, 8], "area": 64, "iscrowd": 0}],
            "categories": [{"id": 1, "name": STRANGE}, {"id": 2, "name": "dog"}],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def csv(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split)
        (root / f"{split}.csv").write_bytes(
            f"file,label\n{split}/0.png,caf".encode() + b"\xe9\n" + f"{split}/1.png,dog\n".encode()
        )


def yolo(root: Path) -> None:
    for split in ("train", "val"):
        images(root / "images" / split)
        (root / "labels" / split).mkdir(parents=True)
        (root / "labels" / split / "0.txt").write_text("0 .5 .5 .5 .5\n")
    (root / "data.yaml").write_bytes(b"train: images/train\nval: images/val\nnames: [caf\xe9, dog]\n")


def voc(root: Path, *, head: bytes = b"", name: bytes = b"caf\xe9") -> None:
    for split in ("train", "val"):
        images(root / "JPEGImages" / split)
        for number in range(2):
            os.rename(root / "JPEGImages" / split / f"{number}.png", root / "JPEGImages" / f"{split}{number}.png")
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "ImageSets/Main" / f"{split}.txt").write_text(f"{split}0\n")
        (root / "Annotations" / f"{split}0.xml").write_bytes(
            head
            + b"<annotation><filename>x.png</filename><size><width>16</width><height>16</height></size><object><name>"
            + name
            + b"</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"
        )


@pytest.mark.parametrize(
    ("form", "base", "make"),
    [
        ("voc", "digits", voc),
        ("image_folder", "vit_digits", folders),
        ("coco", "digits", coco),
        ("csv_labels", "vit_digits", csv),
        ("yolo", "digits", yolo),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_names_that_are_not_utf8_are_refused_with_the_data_set(tmp_path, form, base, make, capfd):
    root = tmp_path / "set"
    root.mkdir()
    make(root)
    values = [f"data.format={form}", f"data.root={root}", "data.options={}"]
    spec = config.load(base, overrides=values, environ={}).spec
    with pytest.raises(DataError, match=r"(?i)utf-?8|character encoding") as caught:
        open_data(spec.data).both()
    assert str(root) in str(caught.value)
    assert main(["data", "check", "-c", base, *(word for value in values for word in ("-o", value))]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_class_names_in_another_declared_encoding_are_read(tmp_path):
    voc(tmp_path / "set", head=b'<?xml version="1.0" encoding="iso-8859-1"?>')
    values = ["data.format=voc", f"data.root={tmp_path / 'set'}", "data.options={}"]
    spec = config.load("digits", overrides=values, environ={}).spec
    assert open_data(spec.data).train.class_names == ("caf\u00e9",)
