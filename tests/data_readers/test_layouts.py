"""Data sets as tools leave them are read as they are: folders per split, exports, no lists, odd suffixes, lost images."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.errors import DataError
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.section import DetectionDataSpec

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
NAMES = ["RBC", "WBC", "Platelets"]
SPLITS = ("train", "val")


def ids(split: str) -> list[str]:
    return (SMALL / "voc" / "ImageSets" / "Main" / f"{split}.txt").read_text().split()


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def xml_and_images(root: Path, *, xml: str, image: str) -> None:
    """The VOC files of both splits; ``xml`` and ``image`` are places with {split} and {id}."""
    for split in SPLITS:
        for name in ids(split):
            copy(SMALL / "voc" / "Annotations" / f"{name}.xml", root / xml.format(split=split, id=name))
            copy(SMALL / "voc" / "JPEGImages" / f"{name}.jpg", root / image.format(split=split, id=name))


def labels_and_images(root: Path, *, label: str, image: str) -> None:
    """The YOLO files of both splits, placed alike."""
    for split in SPLITS:
        for path in (SMALL / "yolo" / "images" / split).iterdir():
            copy(path, root / image.format(split=split, id=path.stem))
            copy(SMALL / "yolo" / "labels" / split / f"{path.stem}.txt", root / label.format(split=split, id=path.stem))


def coco_files(root: Path, *, file: str, image: str) -> None:
    for split in SPLITS:
        source = SMALL / "annotations" / f"instances_{split}.json"
        copy(source, root / file.format(split=split))
        for entry in json.loads(source.read_text())["images"]:
            name = entry["file_name"]
            copy(SMALL / "images" / name, root / image.format(split=split, id=Path(name).stem))


def read(root: Path, kind: str, **data: Any) -> tuple[Annotations, Annotations]:
    """Both splits, as a job gets them."""
    opened = open_data(DetectionDataSpec(format=kind, root=str(root), **data))
    return opened.train, opened.val


def assert_boxes_of_bccd(result: tuple[Annotations, Annotations], *, places_px: float = 0.0) -> None:
    """The images and boxes of both splits are those that the reference files have."""
    for split, annotations in zip(SPLITS, result, strict=True):
        truth = open_data(DetectionDataSpec(format="coco", root=str(SMALL)))
        expected = {sample.path.stem: sample for sample in getattr(truth, split).samples}
        assert {sample.path.stem for sample in annotations.samples} == set(expected)
        assert sorted(annotations.class_names) == sorted(NAMES)
        for sample in annotations.samples:
            other = expected[sample.path.stem]
            assert sample.path.is_file()
            np.testing.assert_allclose(sample.boxes, other.boxes, atol=places_px)
            names = [annotations.class_names[label] for label in sample.labels]
            assert names == [NAMES[label] for label in other.labels]


# ----------------------------------------------------------------------------------------------------------- Pascal VOC
@pytest.mark.parametrize(
    ("xml", "image"),
    [
        ("{split}/{id}.xml", "{split}/{id}.jpg"),  # LabelImg: beside the image
        ("{split}/{id}.XML", "{split}/{id}.JPG"),
        ("{split}/Annotations/{id}.xml", "{split}/JPEGImages/{id}.jpg"),
        ("{split}/annotations/{id}.xml", "{split}/images/{id}.JPEG"),
        ("Annotations/{split}/{id}.xml", "JPEGImages/{split}/{id}.jpg"),
        ("Annotations/{split}/{id}.xml", "images/{id}.jpg"),
    ],
)
def test_voc_with_a_folder_per_split_needs_no_lists(tmp_path: Path, xml: str, image: str) -> None:
    xml_and_images(tmp_path, xml=xml, image=image)
    assert_boxes_of_bccd(read(tmp_path, "voc"))
    folders = {split: xml.format(split=split, id="").rpartition("/")[0] for split in SPLITS}
    assert_boxes_of_bccd(read(tmp_path, "voc", **folders))


def test_a_roboflow_export_in_voc_form_has_its_evaluation_split_in_valid(tmp_path: Path) -> None:
    xml_and_images(tmp_path, xml="{split}/{id}.xml", image="{split}/{id}.jpg")
    (tmp_path / "val").rename(tmp_path / "valid")
    assert_boxes_of_bccd(read(tmp_path, "voc"))


def test_voc_file_names_inside_the_xml_may_be_wrong_and_suffixes_upper_case(tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(SMALL / "voc", root)
    for path in (root / "Annotations").iterdir():
        text = re.sub("<filename>.*</filename>", r"<filename>C:\\shots\\IMG_1.png</filename>", path.read_text())
        path.write_text(text.replace("<folder>", "<path>/nowhere/x.jpg</path><folder>"))
        path.rename(path.with_suffix(".XML"))
    for path in (root / "JPEGImages").iterdir():
        path.rename(path.with_suffix(".JPG"))
    assert_boxes_of_bccd(read(root, "voc"))


def test_numbered_xml_files_find_the_image_that_they_name(tmp_path: Path) -> None:
    for split in SPLITS:
        for number, name in enumerate(ids(split)):
            copy(SMALL / "voc" / "Annotations" / f"{name}.xml", tmp_path / split / f"{number:04}.xml")
            copy(SMALL / "voc" / "JPEGImages" / f"{name}.jpg", tmp_path / split / f"{name}.jpg")
    assert_boxes_of_bccd(read(tmp_path, "voc"))


@pytest.mark.parametrize("line", ["{}", "{}.jpg", "JPEGImages/{}.jpg", "{} 1", "JPEGImages\\{}.jpg"])
def test_voc_lists_may_hold_ids_file_names_or_paths(tmp_path: Path, line: str) -> None:
    root = tmp_path / "voc"
    shutil.copytree(SMALL / "voc", root)
    for split in SPLITS:
        (root / f"{split}.txt").write_text("".join(line.format(name) + "\r\n" for name in ids(split)))
    assert_boxes_of_bccd(read(root, "voc", train="train.txt", val="val.txt"))


@pytest.mark.parametrize("place", ["", "VOCdevkit/VOC 2007/"])
def test_lists_of_paddledetection_name_images_and_xml_files_and_its_label_list_the_order(
    tmp_path: Path, place: str
) -> None:
    root = tmp_path / "voc"
    shutil.copytree(SMALL / "voc" / "Annotations", root / place / "marks")
    shutil.copytree(SMALL / "voc" / "JPEGImages", root / place / "pictures")
    for split in SPLITS:
        lines = [f"./{place}pictures/{name}.jpg\t./{place}marks/{name}.xml\n" for name in ids(split)]
        (root / f"{split}_pairs.txt").write_text("".join(lines))
    lists = {"train": "train_pairs.txt", "val": "val_pairs.txt"}
    assert_boxes_of_bccd(read(root, "voc", **lists))
    plain = read(root, "voc", **lists)[0]
    # A class without an object counts too: weights of this set have an output for it.
    order = ["WBC", "Parasite", "RBC", "Platelets"]
    (root / "label_list.txt").write_text("\n".join(order) + "\n")
    for options in ({}, {"label_list": "label_list.txt"}):
        train, val = read(root, "voc", **lists, options=options)
        assert list(train.class_names) == list(val.class_names) == order
        renumbered = [order[label] for image in train.images for label in image.labels]
        assert renumbered == [plain.class_names[label] for image in plain.images for label in image.labels]


def test_a_label_list_that_lacks_a_class_or_repeats_one_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(SMALL / "voc", root)
    (root / "label_list.txt").write_text("WBC\nRBC\n")
    with pytest.raises(DataError, match="unknown class 'Platelets'"):
        read(root, "voc")
    (root / "label_list.txt").write_text("WBC\nRBC\nWBC\n")
    with pytest.raises(DataError, match=r"label_list\.txt: class names must be unique"):
        read(root, "voc")


def test_images_without_an_xml_file_are_left_out_and_counted(tmp_path: Path) -> None:
    xml_and_images(tmp_path, xml="{split}/{id}.xml", image="{split}/{id}.jpg")
    copy(SMALL / "images" / "BloodImage_00000.jpg", tmp_path / "train" / "unlabelled.jpg")
    train, _ = read(tmp_path, "voc")
    assert len(train) == len(ids("train"))
    assert train.report()[-1] == "1 images without an XML file (left out): unlabelled.jpg"


def test_a_folder_without_annotations_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"data\.train: no annotation files in .*train; expected XML files"):
        read(tmp_path, "voc", train="train")


# ----------------------------------------------------------------------------------------------------------------- YOLO
def roboflow(root: Path, train: str, val: str, names: str) -> None:
    labels_and_images(root, label="{split}/labels/{id}.txt", image="{split}/images/{id}.jpg")
    (root / "val").rename(root / "valid")
    (root / "data.yaml").write_text(
        f"train: {train}\nval: {val}\ntest: ../test/images\n\nnc: 3\nnames: {names}\n\nroboflow:\n  version: 1\n"
    )


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("../train/images", "../valid/images"),
        ("train/images", "valid/images"),
        (r"C:\Users\me\cells\train\images", r"C:\Users\me\cells\valid\images"),
        (r"..\train\images", r"..\valid\images"),
        ("/home/me/cells/train/images", "/home/me/cells/valid/images"),
    ],
)
@pytest.mark.parametrize("names", ["['RBC', 'WBC', 'Platelets']", "{0: RBC, 1: WBC, 2: Platelets}"])
def test_a_roboflow_export_in_yolo_form_is_read_as_it_is(tmp_path: Path, train: str, val: str, names: str) -> None:
    roboflow(tmp_path, train, val, names)
    assert_boxes_of_bccd(read(tmp_path, "yolo"), places_px=4e-4)


def test_an_export_beside_another_one_reads_its_own_images(tmp_path: Path) -> None:
    roboflow(tmp_path / "mine", "../train/images", "../valid/images", str(NAMES))
    copy(SMALL / "images" / "BloodImage_00000.jpg", tmp_path / "train" / "images" / "other.jpg")
    assert_boxes_of_bccd(read(tmp_path / "mine", "yolo"), places_px=4e-4)


@pytest.mark.parametrize(
    ("label", "image"),
    [
        ("labels/{split}/{id}.txt", "images/{split}/{id}.JPG"),
        ("{split}/labels/{id}.txt", "{split}/images/{id}.jpg"),
        ("{split}/{id}.txt", "{split}/{id}.jpg"),  # beside the image
    ],
)
def test_yolo_needs_no_yaml_where_classes_are_listed(tmp_path: Path, label: str, image: str) -> None:
    labels_and_images(tmp_path, label=label, image=image)
    assert_boxes_of_bccd(read(tmp_path, "yolo", names=NAMES), places_px=4e-4)
    (tmp_path / "classes.txt").write_text("\n".join(NAMES) + "\n")  # as LabelImg leaves it
    assert_boxes_of_bccd(read(tmp_path, "yolo"), places_px=4e-4)


def test_yolo_names_are_found_beside_the_labels_of_the_training_split(tmp_path: Path) -> None:
    labels_and_images(tmp_path, label="{split}/{id}.txt", image="{split}/{id}.jpg")
    (tmp_path / "train" / "classes.txt").write_text("\n".join(NAMES) + "\n")  # where LabelImg saves it
    assert_boxes_of_bccd(read(tmp_path, "yolo"), places_px=4e-4)


def test_a_data_set_of_another_format_is_recognised_where_yolo_finds_no_names(tmp_path: Path) -> None:
    xml_and_images(tmp_path, xml="{id}.xml", image="{id}.jpg")
    with pytest.raises(
        DataError, match=r"neither data\.yaml nor classes\.txt in .*; it holds \.xml files: is it data\.format voc\?"
    ):
        read(tmp_path, "yolo")


# ----------------------------------------------------------------------------------------------------------------- COCO
@pytest.mark.parametrize(
    ("file", "image"),
    [
        ("annotations/instances_{split}2017.json", "{split}2017/{id}.jpg"),
        ("{split}/_annotations.coco.json", "{split}/{id}.jpg"),  # Roboflow
        ("annotations/{split}.json", "images/{id}.jpg"),
        ("{split}.json", "{split}/{id}.jpg"),
    ],
)
def test_coco_files_are_found_where_tools_leave_them(tmp_path: Path, file: str, image: str) -> None:
    coco_files(tmp_path, file=file, image=image)
    assert_boxes_of_bccd(read(tmp_path, "coco"))


def test_a_folder_given_for_a_coco_split_stands_for_the_only_file_in_it(tmp_path: Path) -> None:
    coco_files(tmp_path, file="{split}/labels.json", image="{split}/{id}.jpg")
    assert_boxes_of_bccd(read(tmp_path, "coco", train="train", val="val"))
    (tmp_path / "train" / "more.json").write_text("{}")
    with pytest.raises(DataError, match=r"train holds 2 JSON files \(labels\.json, more\.json\); name one"):
        read(tmp_path, "coco", train="train", val="val")


def test_roboflows_file_is_read_beside_another_json(tmp_path: Path) -> None:
    coco_files(tmp_path, file="{split}/_annotations.coco.json", image="{split}/{id}.jpg")
    for split in SPLITS:
        (tmp_path / split / "statistics.json").write_text("{}")
    assert_boxes_of_bccd(read(tmp_path, "coco"))
    assert_boxes_of_bccd(read(tmp_path, "coco", train="train", val="val"))


def test_a_training_split_alone_is_divided_and_one_beside_an_evaluation_split_is_not(tmp_path: Path) -> None:
    coco_files(tmp_path, file="{split}/_annotations.coco.json", image="{split}/{id}.jpg")
    with pytest.raises(DataError, match=r"has one, .*val/_annotations.coco.json; leave data.split out"):
        read(tmp_path, "coco", split=0.4)
    given = names_of(read(tmp_path, "coco")[0])
    shutil.rmtree(tmp_path / "val")
    train, val = read(tmp_path, "coco", split=0.4)
    assert sorted([*names_of(train), *names_of(val)]) == sorted(given)
    assert len(val) > 0


# ------------------------------------------------------------------------------------------------- without split lists
def voc_in_one_folder(root: Path) -> None:
    xml_and_images(root, xml="{id}.xml", image="{id}.jpg")


def yolo_in_one_folder(root: Path) -> None:
    labels_and_images(root, label="labels/{id}.txt", image="images/{id}.jpg")
    (root / "classes.txt").write_text("\n".join(NAMES))


def coco_in_one_file(root: Path) -> None:
    both = [json.loads((SMALL / "annotations" / f"instances_{split}.json").read_text()) for split in SPLITS]
    shift = 1000
    for key in ("images", "annotations"):
        for entry in both[1][key]:
            entry["id"] += shift
            if key == "annotations":
                entry["image_id"] += shift
    (root / "cells.json").write_text(
        json.dumps({**both[0], **{key: both[0][key] + both[1][key] for key in ("images", "annotations")}})
    )
    shutil.copytree(SMALL / "images", root / "images")


def names_of(annotations: Annotations) -> list[str]:
    return [sample.path.name for sample in annotations.samples]


@pytest.mark.parametrize(
    ("kind", "make"), [("voc", voc_in_one_folder), ("yolo", yolo_in_one_folder), ("coco", coco_in_one_file)]
)
def test_a_share_of_all_images_becomes_the_evaluation_split(
    tmp_path: Path, kind: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    train, val = read(tmp_path, kind, split=0.3)
    assert (len(train), len(val)) == (5, 2)
    assert not set(names_of(train)) & set(names_of(val))
    assert train.class_names == val.class_names
    others = {tuple(names_of(read(tmp_path, kind, split=0.3, split_seed=seed)[1])) for seed in range(6)}
    assert len(others) > 2

    walk = os.walk  # another host lists its files in another order, and keeps them elsewhere

    def backwards(*given: Any, **named: Any) -> Any:
        for parent, folders, names in walk(*given, **named):
            folders.reverse()
            yield parent, folders, names[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    again = read(moved, kind, split=0.3)
    assert (names_of(again[0]), names_of(again[1])) == (names_of(train), names_of(val))


def test_most_images_stay_in_their_part_when_others_are_added(tmp_path: Path) -> None:
    yolo_in_one_folder(tmp_path)
    image = next((tmp_path / "images").iterdir())
    for number in range(93):
        os.link(image, tmp_path / "images" / f"x{number:03}.jpg")
    before = set(names_of(read(tmp_path, "yolo", split=0.2)[1]))
    for number in range(10):
        os.link(image, tmp_path / "images" / f"a{number:03}.jpg")
    assert len(before) == 20
    assert len(before & set(names_of(read(tmp_path, "yolo", split=0.2)[1]))) >= 17


def test_a_share_and_an_evaluation_split_are_not_given_together(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"split \(0\.2\) takes the evaluation split from the training images, but val"
    ):
        DetectionDataSpec(format="voc", root=str(tmp_path), split=0.2, val="val.txt")


def test_without_an_evaluation_split_a_share_is_named_as_remedy(tmp_path: Path) -> None:
    voc_in_one_folder(tmp_path)
    with pytest.raises(DataError, match=r"data\.split \(0\.2\)"):
        read(tmp_path, "voc")


# ----------------------------------------------------------------------------------------------------- missing images
@pytest.mark.parametrize(("kind", "root"), [("coco", ""), ("voc", "voc"), ("yolo", "yolo")])
def test_missing_images_are_skipped_and_counted_where_that_is_asked_for(tmp_path: Path, kind: str, root: str) -> None:
    shutil.copytree(SMALL, tmp_path / "set")
    folder = tmp_path / "set" / root
    if kind == "yolo":  # in a folder nothing can be missing, in a list it can
        for split in SPLITS:
            names = [f"images/{split}/{path.name}" for path in sorted((folder / "images" / split).iterdir())]
            (folder / f"{split}.txt").write_text("\n".join(names))
    for path in folder.rglob(f"{ids('train')[0]}.jpg"):
        path.unlink()
    lists = {"train": "train.txt", "val": "val.txt"} if kind == "yolo" else {}
    train, _ = read(folder, kind, skip_missing=True, **lists)
    assert len(train) == len(ids("train")) - 1
    assert f"1 of 4 images are missing and were skipped: {ids('train')[0]}.jpg" in train.report()
    known_names = {image["file_name"] for image in train.ground_truth["images"]}
    assert f"{ids('train')[0]}.jpg" not in known_names


def test_missing_images_without_a_known_size_are_named_together_with_the_remedy(tmp_path: Path) -> None:
    xml_and_images(tmp_path, xml="{split}/{id}.xml", image="{split}/{id}.jpg")
    for path in (tmp_path / "train").glob("*.xml"):
        path.write_text(re.sub("(?s)<size>.*</size>", "", path.read_text()))
        path.with_suffix(".jpg").unlink()
    with pytest.raises(DataError, match=r"4 of 4 images are missing.*data\.skip_missing=true") as caught:
        read(tmp_path, "voc")
    assert str(caught.value).count(": no such file") == 4
