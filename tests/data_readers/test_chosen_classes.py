"""``data.classes`` chooses, orders, renames, merges and drops classes, for every reader and task alike."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.images.header import probe
from mtrain.data.images.indexed import IGNORED, write_indices
from mtrain.errors import DataError, UsageError
from mtrain.spec import config
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.datasets import OpenData, open_data
from mtrain.tasks.detection.convert import convert
from mtrain.tasks.detection.section import DetectionDataSpec
from mtrain.tasks.segmentation.section import SegmentationDataSpec
from tests.data_readers.class_images import folders

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
NAMES = ["RBC", "WBC", "Platelets"]
MERGED = {"WBC": "cell", "RBC": "cell", "Platelets": None}


def detection(form: str, **values: object) -> OpenData:
    place = {
        "coco": {"root": str(SMALL), "images": "images"},
        "voc": {"root": str(SMALL / "voc")},
        "yolo": {"root": str(SMALL / "yolo")},
    }[form]
    return open_data(DetectionDataSpec.model_validate({"format": form, **place, **values}))


def boxes_by_name(data: OpenData, split: str) -> dict[str, list[tuple[str, list[float]]]]:
    """Each class's boxes, in whole pixels, with the image that they are in."""
    content = getattr(data, split)
    found: dict[str, list[tuple[str, list[float]]]] = {name: [] for name in content.class_names}
    for image in content.images:
        for label, box in zip(image.labels.tolist(), image.boxes_xywh.round().tolist(), strict=True):
            found[content.class_names[label]].append((image.path.name, box))
    return {name: sorted(boxes) for name, boxes in found.items()}


@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_a_list_names_the_classes_to_learn_in_the_order_of_their_labels(form: str) -> None:
    whole, some = (detection(form, **values) for values in ({}, {"classes": ["Platelets", "RBC"]}))
    assert some.class_names == ("Platelets", "RBC")
    for split in ("train", "val"):
        every = boxes_by_name(whole, split)
        assert boxes_by_name(some, split) == {name: every[name] for name in ("Platelets", "RBC")}
        assert len(getattr(some, split)) == len(getattr(whole, split))  # images without a box stay
        assert [len(sample.labels) for sample in getattr(some, split).samples] != []


@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_a_mapping_renames_merges_and_drops(form: str) -> None:
    whole, merged = (detection(form, **values) for values in ({}, {"classes": MERGED}))
    assert merged.class_names == ("cell",)
    every = boxes_by_name(whole, "train")
    assert boxes_by_name(merged, "train") == {"cell": sorted(every["RBC"] + every["WBC"])}
    renamed = detection(form, classes={"WBC": "white"})
    assert sorted(renamed.class_names) == ["Platelets", "RBC", "white"]
    assert boxes_by_name(renamed, "train")["white"] == every["WBC"]


def test_a_star_stands_for_every_class_that_a_mapping_does_not_name() -> None:
    assert detection("coco", classes={"*": "item"}).class_names == ("item",)
    only = detection("coco", classes={"WBC": "WBC", "*": None})
    assert (only.class_names, only.train.category_ids) == (("WBC",), (2,))


def test_the_category_ids_are_those_of_the_file_and_of_a_merged_class_its_first() -> None:
    assert detection("coco", classes=["Platelets", "RBC"]).val.category_ids == (3, 1)
    merged = detection("coco", classes=MERGED).val
    assert merged.category_ids == (1,)
    assert {row["category_id"] for row in merged.ground_truth["annotations"]} == {1}


def test_the_report_counts_what_each_class_became_and_the_images_that_are_left_without_a_box() -> None:
    truth = json.loads((SMALL / "annotations" / "instances_train.json").read_text())
    counts = [sum(box["category_id"] == number for box in truth["annotations"]) for number in (1, 2, 3)]
    told = detection("coco", classes={"RBC": "cell", "WBC": "cell", "Platelets": None}).train.report()[-1]
    assert "1 classes of 3" in told
    assert f"RBC counts as cell ({counts[0]} boxes)" in told
    assert f"left out: Platelets ({counts[2]} boxes)" in told
    with_platelets = {box["image_id"] for box in truth["annotations"] if box["category_id"] == 3}
    emptied = len({box["image_id"] for box in truth["annotations"]} - with_platelets)
    assert emptied
    only = detection("coco", classes=["Platelets"]).train
    assert f"{emptied} of {len(truth['images'])} images have no box left and stay" in only.report()[-1]


def test_data_split_divides_what_was_chosen() -> None:
    data = detection("coco", classes=["WBC"], split=0.5, train="annotations/instances_train.json")
    assert data.class_names == data.val.class_names == ("WBC",)
    assert len(data.train) == len(data.val) == 2


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        (["WBC", "Platelet"], "no class 'Platelet'; did you mean 'Platelets'?"),
        ({"cup": None}, "the data set has 3 classes: RBC, WBC, Platelets"),
        ({"*": None}, "leaves none of the 3 classes"),
        (["WBC", "*"], "no class '*'"),
    ],
)
def test_classes_that_are_not_there_are_refused_with_those_that_are(classes: object, says: str) -> None:
    with pytest.raises(DataError) as error:
        _ = detection("coco", classes=classes).train
    assert str(error.value).startswith("data.classes: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[WBC,WBC]", "'WBC' twice"),
        ("[]", "expected a list of at least 1"),
        ("{}", "expected a list of at least 1"),
        ("{WBC: ''}", "given no name for 'WBC'"),
        ("{new: [RBC,WBC]}", "the class of the data set comes first: {RBC: new}"),
    ],
)
def test_other_forms_are_refused_when_the_spec_is_read(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        config.load("yolov5n", overrides=[f"data.classes={text}"], environ={})
    assert f"data.classes={text}" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "classes"), [("WBC", ["WBC"]), ("[3,7]", ["3", "7"]), ("{3: three, no: null}", {"3": "three", "no": None})]
)
def test_a_single_class_and_classes_that_look_like_numbers_are_names(text: str, classes: object) -> None:
    loaded = config.load("yolov5n", overrides=[f"data.classes={text}"], environ={})
    assert loaded.spec.data.classes == classes


@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_names_of_some_classes_are_refused_with_the_key_that_chooses(form: str) -> None:
    with pytest.raises(DataError, match=r"data\.classes"):
        _ = detection(form, names=["RBC", "WBC"]).train


def test_a_converted_set_has_the_chosen_classes(tmp_path: Path) -> None:
    data = detection("coco", classes=MERGED)
    convert({"train": data.train, "val": data.val}, tmp_path / "out", "voc", images="copy")
    again = open_data(DetectionDataSpec(format="voc", root=str(tmp_path / "out")))
    assert boxes_by_name(again, "val") == boxes_by_name(data, "val")


def test_classes_of_folders_are_chosen_merged_and_renamed(tmp_path: Path) -> None:
    root = folders(tmp_path, {"train": 3, "val": 2}, names=("cat", "dog", "emu"))
    data = open_data(
        ClassificationDataSpec(
            format="image_folder", root=str(root), classes={"cat": "pet", "dog": "pet", "emu": "bird"}
        )
    )
    assert (data.class_names, data.train.histogram()) == (("pet", "bird"), {"pet": 6, "bird": 3})
    some = open_data(ClassificationDataSpec(format="image_folder", root=str(root), classes=["emu", "cat"]))
    assert some.val.histogram() == {"emu": 2, "cat": 2}
    assert all(
        Path(origin).parent.name == ("emu", "cat")[label]
        for origin, label in zip(some.val.origins, some.val.labels, strict=True)
    )
    assert "left out: dog (2 images)" in some.val.report()[-1]
    np.testing.assert_array_equal(some.val.images[0].shape[2:], (3,))


def test_a_split_without_an_image_of_the_chosen_classes_is_refused(tmp_path: Path) -> None:
    root = folders(tmp_path, {"train": 2, "val": 2}, names=("cat", "dog"))
    shutil.rmtree(root / "val" / "dog")
    with pytest.raises(DataError, match=r"val split of .* holds no image of data.classes \(dog\)"):
        _ = open_data(ClassificationDataSpec(format="image_folder", root=str(root), classes=["dog"])).val


def test_folders_that_data_names_leaves_out_are_refused_with_the_key_that_chooses(tmp_path: Path) -> None:
    root = folders(tmp_path, {"train": 2, "val": 2}, names=("cat", "dog"))
    with pytest.raises(DataError, match=r"data\.classes=\[cat\]"):
        _ = open_data(ClassificationDataSpec(format="image_folder", root=str(root), names=["cat"])).train


def test_pixels_of_classes_left_out_count_nowhere_and_merged_ones_are_of_one_class(tmp_path: Path) -> None:
    root = folders(tmp_path / "found", {"": 1}, names=("cat",))
    (tmp_path / "JPEGImages").mkdir()
    shutil.copy(next(root.rglob("*.png")), tmp_path / "JPEGImages" / "a.png")
    width, height = probe(tmp_path / "JPEGImages" / "a.png")
    mask = (np.arange(width * height) % 4).astype(np.uint8).reshape(height, width)
    mask[0, 0] = IGNORED
    write_indices(mask, tmp_path / "SegmentationClass" / "a.png")
    (tmp_path / "classes.txt").write_text("ground\ncup\nmug\ntable\n")
    for name in ("train", "val"):
        file = tmp_path / "ImageSets" / "Segmentation" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a\n")

    def learnt(classes: object) -> tuple[tuple[str, ...], np.ndarray]:
        data = open_data(
            SegmentationDataSpec.model_validate({"format": "voc_masks", "root": str(tmp_path), "classes": classes})
        )
        return data.class_names, data.train.mask(0, (width, height))

    names, some = learnt(["mug", "ground"])
    assert names == ("mug", "ground")
    expected = np.select([mask == 2, mask == 0], [0, 1], IGNORED)
    np.testing.assert_array_equal(some, expected)
    names, merged = learnt({"mug": "cup", "*": "ground"})
    assert names == ("ground", "cup")
    np.testing.assert_array_equal(merged, np.select([mask == 1, mask == 2, mask == IGNORED], [1, 1, IGNORED], 0))
