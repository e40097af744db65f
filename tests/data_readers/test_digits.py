"""The embedded data set: reproducible, disjoint, whole, made once; and what `mtrain data` prints."""

import hashlib
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mtrain.commands.data import data
from mtrain.core.interfaces import SplitRequest
from mtrain.data.images.decode import decode
from mtrain.data.images.digits_canvas import _strokes, canvas
from mtrain.data.images.drawing import save_image
from mtrain.errors import DataError, PluginError, SpecError
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.check import verify_images
from mtrain.tasks.detection.drawing import annotations_grid, comparison, draw_boxes
from mtrain.tasks.detection.label_statistics import class_histogram, image_sizes, size_histogram, statistics
from mtrain.tasks.detection.readers.digits import Digits, DigitsOptions, default_folder, make_digits
from mtrain.tasks.detection.section import DetectionDataSpec

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
FEW = DigitsOptions(train=6, val=3, size=96)


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digits(tmp_path_factory.mktemp("digits") / "set", FEW)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    assert digest(make_digits(tmp_path / "again", FEW)) == digest(made)
    other = make_digits(tmp_path / "other", FEW.model_copy(update={"seed": 1}))
    assert digest(other) != digest(made)


def test_a_larger_set_begins_with_the_smaller_one(made: Path, tmp_path: Path) -> None:
    larger = make_digits(tmp_path / "larger", FEW.model_copy(update={"train": 8}))
    for image in (made / "images").iterdir():
        assert (larger / "images" / image.name).read_bytes() == image.read_bytes()


def test_the_set_is_valid_coco_with_clear_digits_that_do_not_overlap(made: Path) -> None:
    for split, count in (("train", 6), ("val", 3)):
        read = Digits(FEW).read(SplitRequest(root=made, split=split))
        assert len(read) == count
        assert read.report() == []
        assert read.class_names == tuple("0123456789")
        verify_images(read)
        for sample in read.samples:
            assert 1 <= len(sample.boxes) <= 6
            heights = sample.boxes[:, 3] - sample.boxes[:, 1]
            assert (heights > 0.14 * 96).all()
            assert (heights <= 0.46 * 96).all()
            cover = np.zeros((96, 96), int)
            for x1, y1, x2, y2 in sample.boxes.astype(int):
                cover[y1:y2, x1:x2] += 1
            assert cover.max() == 1


def test_ink_fills_its_box_to_every_edge() -> None:
    drawn = canvas("train", 0, size=320, seed=0)
    image, boxes = drawn.image, drawn.boxes
    grey = image.astype(float).mean(axis=2)
    for x1, y1, x2, y2 in boxes:
        inside = grey[y1:y2, x1:x2]
        ring = np.concatenate([grey[max(y1 - 3, 0), x1:x2], grey[min(y2 + 2, 319), x1:x2]])
        ink = np.abs(inside - ring.mean()) > 25
        assert ink[:3].any()
        assert ink[-3:].any()
        assert ink[:, :3].any()
        assert ink[:, -3:].any()


def test_train_and_val_share_no_stroke() -> None:
    train, val = ({s.tobytes() for s in _strokes(split)[0]} for split in ("train", "val"))
    assert len(train) > 3 * len(val) > 1000
    assert not train & val


def _make(folder: str) -> str:
    return digest(make_digits(Path(folder), FEW))


@pytest.mark.job
def test_two_processes_may_make_one_set_at_the_same_time(tmp_path: Path, made: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_make, [str(tmp_path / "set")] * 2, chunksize=1)
    assert results == [digest(made)] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_a_folder_with_other_things_or_other_digits_is_left_alone(made: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="something else than the digits"):
        make_digits(tmp_path, FEW)
    with pytest.raises(DataError, match="made with"):
        make_digits(made, FEW.model_copy(update={"seed": 5}))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_filled_and_options_have_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (make_digits(tmp_path / "empty", FEW) / "annotations" / "instances_val.json").is_file()
    assert default_folder(FEW) != default_folder(DigitsOptions())


def test_open_data_reads_each_split_when_asked(made: Path) -> None:
    options = FEW.model_dump()
    opened = open_data(DetectionDataSpec(format="digits", root=str(made), options=options))
    assert opened.kind == "detection"
    assert (len(opened.train), len(opened.val), len(opened.class_names)) == (6, 3, 10)
    assert opened.train is opened.train


def test_open_data_refuses_unknown_formats_and_options(made: Path) -> None:
    with pytest.raises(PluginError, match="coco"):
        open_data(DetectionDataSpec(format="cocoo", root=str(made)))
    with pytest.raises(SpecError, match=r"data\.options\.sise"):
        open_data(DetectionDataSpec(format="digits", root=str(made), options={"sise": 3}))


def test_splits_with_different_classes_are_refused(made: Path, tmp_path: Path) -> None:
    content = json.loads((made / "annotations" / "instances_val.json").read_text())
    content["categories"][0]["name"] = "zero"
    (tmp_path / "val.json").write_text(json.dumps(content))
    spec = DetectionDataSpec(format="coco", root=str(made), val=str(tmp_path / "val.json"))
    with pytest.raises(DataError, match="both splits need the same classes"):
        _ = open_data(spec).val


def test_statistics_are_in_pixels_of_the_network_input() -> None:
    opened = open_data(DetectionDataSpec(format="coco", root=str(SMALL), images="images"))
    metrics = statistics(opened.val, image_size=320)
    assert metrics["class_count"] == 3
    first = opened.val.samples[0]
    np.testing.assert_allclose(metrics["boxes_wh_px"][0], (first.boxes[0, 2:] - first.boxes[0, :2]) / 2)
    stretched = statistics(opened.val, image_size=320, stretch=True)["boxes_wh_px"]
    np.testing.assert_allclose(stretched, metrics["boxes_wh_px"] * (1, 640 / 480))
    total = sum(class_histogram(opened.val).values())
    assert total == len(metrics["boxes_wh_px"]) == sum(size_histogram(opened.val).values())
    assert image_sizes(opened.val) == {(640, 480): 3}


def test_boxes_are_drawn_where_they_are_and_the_original_is_left_alone() -> None:
    image = np.full((100, 200, 3), 128, np.uint8)
    drawn = draw_boxes(image, np.array([[50, 40, 90, 80]]), [1], ("a", "b"), scores=[0.5])
    assert (image == 128).all()
    changed = np.argwhere((drawn != 128).any(axis=2))
    assert changed.max(axis=0).tolist()[0] in range(79, 83)
    assert (drawn[60, 50] != 128).any()
    assert (drawn[55:75, 55:85] == 128).all()


def test_grids_hold_every_image_and_can_be_saved(tmp_path: Path) -> None:
    opened = open_data(DetectionDataSpec(format="coco", root=str(SMALL), images="images"))
    actual = {0: np.array([[10, 10, 100, 100, 0.9, 0], [0, 0, 5, 5, 0.1, 1]]), 2: np.zeros((0, 6))}
    for name, image in (
        ("grid.jpg", annotations_grid(opened.train)),
        ("pairs.png", comparison(opened.val, actual)),
    ):
        save_image(image, tmp_path / "new" / name)
        assert decode(tmp_path / "new" / name).shape == image.shape
    with pytest.raises(DataError, match="cannot be written"):
        save_image(image, tmp_path / "a.xyz")


def test_data_make_digits_writes_a_set_and_says_how_to_use_it(tmp_path: Path) -> None:
    arguments = ["make", "digits", str(tmp_path / "d"), "--train", "2", "--val", "1", "--size", "64", "--png"]
    outcome = CliRunner().invoke(data, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert f"data.root={tmp_path / 'd'}" in outcome.output
    assert len(list((tmp_path / "d" / "images").glob("*.png"))) == 3


def test_data_check_prints_counts_bad_boxes_and_saves_grids(tmp_path: Path) -> None:
    spec = tmp_path / "cells.yml"
    spec.write_text(f"data:\n  format: coco\n  root: {SMALL}\n  images: images\n")
    outcome = CliRunner().invoke(data, ["check", str(spec), "--output", str(tmp_path)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    for text in ("7 image files", "Platelets", "RBC", "boxes without area, dropped for training: 1", "640 x 480: 4"):
        assert text in outcome.output
    for kind in ("train", "val", "augmented"):
        assert decode(tmp_path / f"data_check_cells_{kind}.jpg").size > 0
