"""The same images in three formats give the same boxes, and wrong files are refused with everything listed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.check import verify_images
from mtrain.tasks.detection.readers.coco import Coco, read_content
from mtrain.tasks.detection.readers.voc import Voc
from mtrain.tasks.detection.readers.yolo import Yolo, label_file
from mtrain.tasks.detection.section import DetectionDataSpec

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
COCO_SMALL = Path(__file__).parents[1] / "data" / "coco_ccby_small"
NAMES = ["RBC", "WBC", "Platelets"]


def three_readings(root: Path, split: str, coco_file: str) -> tuple[Annotations, Annotations, Annotations]:
    return (
        Coco().read(SplitRequest(root=root, value=coco_file, images="images", split=split)),
        Voc().read(SplitRequest(root=root / "voc", names=NAMES, split=split)),
        Yolo().read(SplitRequest(root=root / "yolo", split=split)),
    )


def assert_same_boxes(root: Path, split: str, coco_file: str, count: int) -> None:
    coco, voc, yolo = three_readings(root, split, coco_file)
    assert coco.class_names == voc.class_names == yolo.class_names == tuple(NAMES)
    assert len(coco.samples) == len(voc.samples) == len(yolo.samples) == count
    assert coco.problems == voc.problems == yolo.problems
    for a, b, c in zip(coco.samples, voc.samples, yolo.samples, strict=True):
        assert a.path.name == b.path.name == c.path.name
        assert (a.width, a.height) == (b.width, b.height) == (c.width, c.height) == (640, 480)
        np.testing.assert_array_equal(a.boxes, b.boxes)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.area, b.area)
        np.testing.assert_array_equal(a.labels, c.labels)
        np.testing.assert_allclose(a.boxes, c.boxes, atol=4e-4, rtol=0)


@pytest.mark.parametrize(("split", "count"), [("train", 4), ("val", 3)])
def test_coco_voc_and_yolo_give_the_same_boxes(split: str, count: int) -> None:
    assert_same_boxes(SMALL, split, f"annotations/instances_{split}.json", count)


def test_the_zero_area_box_is_dropped_for_training_counted_and_kept_for_evaluation() -> None:
    coco = Coco().read(SplitRequest(root=SMALL, split="val"))
    assert coco.problems == {"zero_area": 1}
    assert coco.report() == ["boxes without area, dropped for training: 1"]
    saved = sum(len(sample.boxes) for sample in coco.samples)
    original = json.loads((SMALL / "annotations" / "instances_val.json").read_text())["annotations"]
    truth = coco.ground_truth["annotations"]
    assert len(truth) == len(original) == saved + 1
    assert sorted(a["bbox"] for a in truth) == sorted(a["bbox"] for a in original)
    assert [a["area"] for a in truth].count(0) == 1


def test_voc_names_are_those_of_both_splits_in_alphabetical_order() -> None:
    assert Voc().read(SplitRequest(root=SMALL / "voc", split="val")).class_names == ("Platelets", "RBC", "WBC")


def test_data_names_change_the_order_of_labels_but_not_the_category_ids() -> None:
    plain = Coco().read(SplitRequest(root=SMALL, split="val"))
    turned = Coco().read(SplitRequest(root=SMALL, names=["Platelets", "WBC", "RBC"], split="val"))
    assert (plain.category_ids, turned.category_ids) == ((1, 2, 3), (3, 2, 1))
    for a, b in zip(plain.samples, turned.samples, strict=True):
        assert [plain.category_ids[i] for i in a.labels] == [turned.category_ids[i] for i in b.labels]


def test_names_that_disagree_are_refused_with_the_nearest_ones() -> None:
    with pytest.raises(DataError) as error:
        Coco().read(SplitRequest(root=SMALL, names=["RBC", "WBC", "Platelet", "Other"], split="val"))
    assert "4 classes given" in str(error.value)
    assert "has 3" in str(error.value)
    assert "'Platelet' is not among them; did you mean 'Platelets'?" in str(error.value)
    with pytest.raises(DataError, match="not given: Platelets"):
        Voc().read(SplitRequest(root=SMALL / "voc", names=["RBC", "WBC"], split="val"))
    with pytest.raises(DataError, match="label files count by"):
        Yolo().read(SplitRequest(root=SMALL / "yolo", names=["WBC", "RBC", "Platelets"], split="val"))


def coco_content() -> dict:
    return {
        "images": [
            {"id": 7, "file_name": "b.jpg", "width": 100, "height": 50},
            {"id": 3, "file_name": "a.jpg", "width": 100, "height": 50},
        ],
        "annotations": [],
        "categories": [{"id": 90, "name": "late"}, {"id": 4, "name": "early"}],
    }


def annotate(content: dict, *rows: tuple, image_id: int = 7) -> Annotations:
    content["annotations"] = [
        {"id": i, "image_id": image_id, "category_id": category, "bbox": box, "area": 5.5, "iscrowd": crowd}
        for i, (category, box, crowd) in enumerate(rows)
    ]
    return read_content(content, folder=Path("x"), file=Path("x.json"))


def test_category_ids_with_gaps_are_mapped_in_order_of_id_and_empty_images_stay() -> None:
    read = annotate(coco_content(), (90, [1, 2, 3, 4], 0), (4, [10, 2, 3, 4], 1))
    assert read.class_names == ("early", "late")
    assert read.category_ids == (4, 90)
    assert [s.path.name for s in read.samples] == ["a.jpg", "b.jpg"]
    assert [len(s.boxes) for s in read.samples] == [0, 2]
    sample = read.samples[1]
    assert sample.labels.tolist() == [1, 0]
    assert sample.boxes.tolist() == [[1, 2, 4, 6], [10, 2, 13, 6]]
    assert sample.area.tolist() == [5.5, 5.5]
    assert sample.boxes.dtype == np.float32
    boxes, labels = sample.targets
    assert (boxes.tolist(), labels.tolist()) == ([[1, 2, 4, 6]], [1])


def test_bad_boxes_are_dropped_or_clipped_and_counted_by_kind() -> None:
    read = annotate(
        coco_content(),
        (4, [90, 40, 30, 30], 0),  # clipped
        (4, [99.5, 40, 1.0, 10], 0),  # half a pixel out: rounding
        (4, [200, 10, 5, 5], 0),  # outside
        (4, [10, 10, 0, 5], 0),  # no width
        (4, [10, 10, -5, 5], 0),  # negative
        (4, [20, 20, 5, 5], 0),
        (4, [20, 20, 5, 5], 0),  # again
        (90, [20, 20, 5, 5], 0),  # another class: not a repetition
    )
    assert read.problems == {"zero_area": 2, "outside": 1, "duplicate": 1, "clipped": 1}
    assert read.samples[1].boxes.tolist() == [
        [90, 40, 100, 50],
        [99.5, 40, 100, 50],
        [20, 20, 25, 25],
        [20, 20, 25, 25],
    ]
    assert len(read.ground_truth["annotations"]) == 8
    assert read.ground_truth["annotations"][0]["bbox"] == [90, 40, 30, 30]


def test_annotations_of_unknown_images_and_categories_are_all_listed() -> None:
    content = coco_content()
    content["annotations"] = [
        {"id": 1, "image_id": 99, "category_id": 4, "bbox": [1, 1, 2, 2]},
        {"id": 2, "image_id": 7, "category_id": 5, "bbox": [1, 1, 2, 2]},
        {"id": 3, "image_id": 7, "category_id": 4, "bbox": [1, 1, float("nan"), 2]},
        {"id": 4, "image_id": 7, "category_id": 4, "bbox": [1, 1]},
    ]
    with pytest.raises(DataError) as error:
        read_content(content, folder=Path("x"), file=Path("x.json"))
    text = str(error.value)
    assert "4 wrong entries" in text
    assert "annotation 1: image_id 99" in text
    assert "annotation 2: category_id 5" in text
    assert "annotation 3: bbox" in text
    assert "annotation 4: bbox" in text


def test_more_than_twenty_mistakes_are_counted() -> None:
    content = coco_content()
    content["annotations"] = [{"id": i, "image_id": 99, "category_id": 4, "bbox": [0, 0, 1, 1]} for i in range(50)]
    with pytest.raises(DataError) as error:
        read_content(content, folder=Path("x"), file=Path("x.json"))
    assert str(error.value).count("image_id 99") == 20
    assert "... and 30 more" in str(error.value)


def test_images_with_one_id_are_refused() -> None:
    content = coco_content()
    content["images"][1]["id"] = 7
    with pytest.raises(DataError, match="ids of images must be unique"):
        read_content(content, folder=Path("x"), file=Path("x.json"))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no valid JSON"), ("[]", "no list images"), ("{}", "no list images")]
)
def test_damaged_annotation_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        Coco().read(SplitRequest(root=tmp_path, value="a.json", split="train"))


def test_missing_folders_and_files_say_which_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root: not given"):
        Coco().read(SplitRequest(split="train"))
    with pytest.raises(DataError, match=r"data\.root: .*no folder"):
        Voc().read(SplitRequest(root=tmp_path / "absent", split="train"))
    with pytest.raises(DataError, match=r"instances_train\.json, .*instances_train2017\.json, .*; set data\.train"):
        Coco().read(SplitRequest(root=tmp_path, split="train"))
    with pytest.raises(DataError, match=r"data\.names"):
        Yolo().read(SplitRequest(root=tmp_path, split="train"))


def test_coco_2017_layout_is_found_without_any_setting(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    shutil.copy(SMALL / "annotations" / "instances_val.json", tmp_path / "annotations" / "instances_val2017.json")
    shutil.copytree(SMALL / "images", tmp_path / "val2017")
    assert all(s.path.is_file() for s in Coco().read(SplitRequest(root=tmp_path, split="val")).samples)


@pytest.fixture
def yolo(tmp_path: Path) -> Path:
    shutil.copytree(SMALL / "yolo", tmp_path / "yolo")
    return tmp_path / "yolo"


def test_wrong_label_lines_are_all_named_with_file_and_line(yolo: Path) -> None:
    file = next((yolo / "labels" / "val").glob("*.txt"))
    file.write_text("3 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1\n\n0 320 240 50 50\n0 a b c d\n1.5 0.5 0.5 0.1 0.1\n")
    with pytest.raises(DataError) as error:
        Yolo().read(SplitRequest(root=yolo, split="val"))
    text = str(error.value)
    assert f"{file}:1: class 3; there are 3 names: expected 0 to 2" in text
    assert f"{file}:2: '0 0.5 0.5 0.1'; expected a class and 4 numbers" in text
    assert f"{file}:4: 320 240 50 50 is not normalised" in text
    assert f"{file}:5:" in text
    assert f"{file}:6: class 1.5" in text


def test_mistakes_of_both_splits_are_told_at_once(yolo: Path) -> None:
    files = [next((yolo / "labels" / split).glob("*.txt")) for split in ("train", "val")]
    for file in files:
        file.write_text("9 0.5 0.5 0.1 0.1\n")
    data = open_data(DetectionDataSpec(format="yolo", root=str(yolo)))
    with pytest.raises(DataError) as error:
        data.both()
    assert all(f"{file}:1: class 9" in str(error.value) for file in files)


def test_yolo_images_without_labels_are_empty_and_labels_without_images_noted(yolo: Path) -> None:
    files = sorted((yolo / "labels" / "val").glob("*.txt"))
    files[0].rename(files[0].with_name("orphan.txt"))
    read = Yolo().read(SplitRequest(root=yolo, split="val"))
    assert len(read.samples[0].boxes) == 0
    assert any("1 images without a label file" in note and files[0].stem in note for note in read.notes)
    assert any("1 label files without an image: orphan.txt" in note for note in read.notes)


def test_yolo_polygons_count_as_the_box_around_them(yolo: Path) -> None:
    file = sorted((yolo / "labels" / "val").glob("*.txt"))[0]
    file.write_text("1 0.25 0.5 0.5 0.25 0.75 0.75\n")
    assert Yolo().read(SplitRequest(root=yolo, split="val")).samples[0].boxes.tolist() == [[160, 120, 480, 360]]


def test_yolo_lists_of_images_and_upper_case_suffixes_are_read(yolo: Path) -> None:
    images = sorted((yolo / "images" / "val").iterdir())
    images[0].rename(images[0].with_suffix(".JPG"))
    assert len(Yolo().read(SplitRequest(root=yolo, split="val")).samples) == 3
    (yolo / "some.txt").write_text(f"images/val/{images[1].name}\n")
    read = Yolo().read(SplitRequest(root=yolo, value="some.txt", split="val"))
    assert [s.path.name for s in read.samples] == [images[1].name]
    assert len(read.samples[0].boxes) > 0


def test_a_class_count_that_disagrees_with_the_names_is_refused(yolo: Path) -> None:
    (yolo / "data.yaml").write_text("nc: 4\nnames: [RBC, WBC, Platelets]\n")
    with pytest.raises(DataError, match="nc is 4, but 3 names"):
        Yolo().read(SplitRequest(root=yolo, split="val"))


def test_labels_lie_beside_the_last_folder_called_images() -> None:
    assert label_file(Path("/images/x/images/val/a.b.png")) == Path("/images/x/labels/val/a.b.txt")
    assert label_file(Path("pics/a.png")) == Path("pics/a.txt")


def test_third_party_yolo_with_real_irregularities_is_read_and_reported() -> None:
    root = COCO_SMALL / "yolo_thirdparty"
    reads = [Yolo().read(SplitRequest(root=root, value=f"images/{split}", split="train")) for split in ("train", "val")]
    assert sum(len(r.samples) for r in reads) == 3
    notes = " ".join(note for r in reads for note in r.notes)
    assert "000000000508" in notes
    assert "000000000656" in notes
    assert "000000000659" in notes


def test_real_coco_with_crowds_and_id_gaps_is_read() -> None:
    train, val = (Coco().read(SplitRequest(root=COCO_SMALL, split=split)) for split in ("train", "val"))
    assert (len(train), len(val)) == (2, 2)
    assert [sum(int(s.crowd.sum()) for s in split.samples) for split in (train, val)] == [1, 1]
    assert max(train.category_ids) > len(train.class_names)


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    shutil.copytree(SMALL / "voc", tmp_path / "voc")
    return tmp_path / "voc"


def test_damaged_and_missing_voc_files_are_all_named(voc: Path) -> None:
    files = sorted((voc / "Annotations").glob("*.xml"))
    ids = (voc / "ImageSets" / "Main" / "train.txt").read_text().split()
    mine = [f for f in files if f.stem in ids]
    mine[0].write_text("<annotation>")
    mine[1].unlink()
    mine[2].write_text(mine[2].read_text().replace("<xmin>", "<xmin>x", 1))
    with pytest.raises(DataError) as error:
        Voc().read(SplitRequest(root=voc, names=NAMES, split="train"))
    assert "3 of 4 annotation files" in str(error.value)
    assert all(f.name in str(error.value) for f in mine[:3])


def test_difficult_objects_are_trained_on_unless_told_otherwise(voc: Path) -> None:
    file = next(iter((voc / "Annotations").glob("BloodImage_00000.xml")))
    file.write_text(file.read_text().replace("<difficult>0", "<difficult>1", 1))
    usual, strict = (
        Voc(Voc.Options(use_difficult=use)).read(SplitRequest(root=voc, names=NAMES, split="val")).samples[0]
        for use in (True, False)
    )
    assert len(usual.targets[0]) == len(strict.targets[0]) + 1
    assert strict.crowd.sum() == 1


def test_exchanged_sides_are_a_matter_of_exif_only_where_the_image_is_turned_by_it(tmp_path: Path) -> None:
    pixels = Image.fromarray(np.zeros((20, 60, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels.save(tmp_path / "plain.jpg")
    pixels.save(tmp_path / "turned.jpg", exif=exif)
    boxes = np.zeros((0, 4))
    for name, size_wh, says in (
        ("plain", (20, 60), "60 x 20 as displayed (width and height are exchanged there)"),
        ("turned", (60, 20), "20 x 60 as displayed (turned by its EXIF orientation)"),
    ):
        image = AnnotatedImage.of(tmp_path / f"{name}.jpg", name, boxes, [], size_wh=size_wh)
        with pytest.raises(DataError) as error:
            verify_images(assemble([image], class_names=["a"], category_ids=[1]))
        assert says in str(error.value)
