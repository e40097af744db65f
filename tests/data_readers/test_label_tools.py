"""What labelling programs save is read as it is, and gives the boxes that a person drew."""

import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.label_tools import Cvat, LabelMe, LabelStudio

WIDTH, HEIGHT = 80, 40
BOXES = {"cup": [10, 5, 30, 25], "table": [20, 10, 60, 38]}


def save_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.zeros((HEIGHT, WIDTH, 3), np.uint8))


def shape(label: str, points: list[list[float]], kind: str = "rectangle", **more: Any) -> dict[str, Any]:
    return {"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}, **more}


def labelme(file: Path, *shapes: dict[str, Any], image: str = "a.png", **more: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "version": "5.5.0",
        "flags": {},
        "imagePath": image,
        "imageData": None,
        "imageHeight": HEIGHT,
        "imageWidth": WIDTH,
    }
    file.write_text(json.dumps({**head, "shapes": list(shapes), **more}))


def boxes(found: Annotations, index: int = 0) -> list[tuple[str, list[float]]]:
    sample = found.samples[index]
    names = [found.class_names[label] for label in sample.labels]
    return sorted(zip(names, np.round(sample.boxes, 3).tolist(), strict=True))


DRAWN = sorted((name, [float(side) for side in box]) for name, box in BOXES.items())


# ------------------------------------------------------------------------------------------------------------ LabelMe
def test_rectangles_and_polygons_of_labelme_are_boxes_whichever_corner_was_drawn_first(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    polygon = [[20, 10], [60, 12], [55, 38], [30, 20]]
    labelme(tmp_path / "a.json", shape("cup", [[30, 25], [10, 5]]), shape("table", polygon, "polygon"))
    found = LabelMe().read(SplitRequest(split="all", root=tmp_path))
    assert boxes(found) == DRAWN
    assert (found.samples[0].width, found.samples[0].height, found.notes) == (WIDTH, HEIGHT, ())


def test_the_shapes_of_x_anylabeling_are_read_and_those_without_an_area_counted(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    corners = [[10, 5], [30, 5], [30, 25], [10, 25]]
    turned = [[40, 10], [60, 24], [40, 38], [20, 24]]
    labelme(
        tmp_path / "a.json",
        shape("cup", corners, difficult=True, score=0.9, attributes={}),
        shape("table", turned, "rotation", direction=0.5),
        shape("eye", [[3, 3]], "point"),
        shape("edge", [[3, 3], [9, 9]], "line"),
        shape("ring", [[40, 20], [50, 20]], "circle"),
    )
    found = LabelMe().read(SplitRequest(split="all", root=tmp_path))
    assert boxes(found) == sorted([*DRAWN, ("ring", [30.0, 10.0, 50.0, 30.0])])
    assert found.notes == ("shapes without an area (left out): 1 line, 1 point",)


def test_splits_are_folders_and_the_classes_those_of_the_training_split(tmp_path: Path) -> None:
    for split, name in (("train", "a"), ("val", "b")):
        save_image(tmp_path / split / f"{name}.png")
        labelme(tmp_path / split / f"{name}.json", shape("cup", [[10, 5], [30, 25]]), image=f"{name}.png")
    labelme(tmp_path / "train" / "a.json", shape("cup", [[10, 5], [30, 25]]), shape("table", [[20, 10], [60, 38]]))
    train = LabelMe().read(SplitRequest(split="train", root=tmp_path))
    val = LabelMe().read(SplitRequest(split="val", root=tmp_path, names=list(train.class_names)))
    assert train.class_names == val.class_names == ("cup", "table")
    assert [sample.path.name for sample in val.samples] == ["b.png"]
    labelme(tmp_path / "val" / "b.json", shape("mug", [[10, 5], [30, 25]]), image="b.png")
    with pytest.raises(DataError, match=r"not given: mug"):
        LabelMe().read(SplitRequest(split="val", root=tmp_path, names=list(train.class_names)))


SAID = ["..\\images\\a.png", "C:\\work\\a.png", "/home/bob/a.png", "../images/a.png"]


@pytest.mark.parametrize(
    ("said", "place"),
    [*((said, place) for said in SAID for place in ("images/a.png", "labels/a.png")), ("renamed.png", "labels/a.png")],
)
def test_the_image_is_found_whatever_path_another_machine_wrote(said: str, place: str, tmp_path: Path) -> None:
    save_image(tmp_path / place)
    labelme(tmp_path / "labels" / "a.json", shape("cup", [[10, 5], [30, 25]]), image=said)
    found = LabelMe().read(SplitRequest(split="all", root=tmp_path))
    assert found.samples[0].path == tmp_path / place


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no valid JSON|cannot be read|Expecting"),
        ('{"info": {}, "images": []}', "no list of shapes; expected a file of LabelMe"),
        (
            '{"shapes": [{"label": "cup", "points": [[1, 2], [3, "x"]], "shape_type": "rectangle"}]}',
            "could not convert",
        ),
        ('{"shapes": [{"label": "cup", "points": [], "shape_type": "polygon"}]}', "no numbers of pixels"),
        ('{"shapes": [{"label": "cup", "points": [[1e999, 2], [3, 4]]}]}', "no numbers of pixels"),
        ('{"shapes": [{"label": "", "points": [[1, 2], [3, 4]]}]}', "the label ''; expected a text"),
        ('{"shapes": [{"label": "cup"}]}', "no 'points'"),
        ('{"shapes": [3]}', "of another structure"),
        ('{"shapes": [], "imageWidth": 1e999}', "of another structure"),
        ('{"shapes": [], "imageWidth": [3]}', "of another structure"),
    ],
)
def test_files_that_are_not_of_the_program_are_named_with_the_reason(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=says) as error:
        LabelMe().read(SplitRequest(split="all", root=tmp_path))
    assert "1 of 1 files cannot be read as labelme" in str(error.value)
    assert str(tmp_path / "a.json") in str(error.value)


# --------------------------------------------------------------------------------------------------------------- CVAT
CVAT = f"""<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version><meta><job><labels><label><name>table</name></label></labels></job></meta>
<image id="0" name="sub/a.png" width="{WIDTH}" height="{HEIGHT}">
<box label="cup" occluded="0" xtl="10.00" ytl="5.00" xbr="30.00" ybr="25.00" z_order="0"><attribute name="x">y</attribute></box>
<polygon label="table" points="20.0,10.0;60.0,12.0;55.0,38.0" z_order="0"></polygon>
<ellipse label="plate" cx="40.0" cy="20.0" rx="10.0" ry="5.0"></ellipse>
<mask label="stain" rle="4, 4" left="3" top="4" width="5" height="6"></mask>
<polyline label="edge" points="1.0,2.0;3.0,4.0"></polyline><tag label="dark"></tag></image>
<image id="1" name="b.png" width="{WIDTH}" height="{HEIGHT}"></image></annotations>"""


def test_shapes_of_cvat_are_boxes_and_images_without_any_stay(tmp_path: Path) -> None:
    save_image(tmp_path / "images" / "sub" / "a.png")
    save_image(tmp_path / "images" / "b.png")
    (tmp_path / "annotations.xml").write_text(CVAT)
    found = Cvat().read(SplitRequest(split="all", root=tmp_path))
    assert found.class_names == ("cup", "plate", "stain", "table")
    more = [("plate", [30.0, 15.0, 50.0, 25.0]), ("stain", [3.0, 4.0, 8.0, 10.0])]
    assert [sample.path.name for sample in found.samples] == ["b.png", "a.png"]
    assert (boxes(found, 0), boxes(found, 1)) == ([], sorted([*DRAWN, *more]))
    assert found.notes == ("shapes without an area (left out): 1 polyline",)


def test_a_turned_box_of_cvat_is_the_box_around_it(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    turned = '<image name="a.png" width="80" height="40"><box label="cup" xtl="30" ytl="15" xbr="50" ybr="25" rotation="90"/></image>'
    (tmp_path / "annotations.xml").write_text(f"<annotations>{turned}</annotations>")
    assert boxes(Cvat().read(SplitRequest(split="all", root=tmp_path))) == [("cup", [35.0, 10.0, 45.0, 30.0])]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<annotation/>", "the top element is <annotation>, expected <annotations>"),
        ("<annotations><track id='0' label='cup'/></annotations>", "export them from CVAT as images"),
        ("<annotations><image id='0'/></annotations>", "no 'name'"),
        ("<annotations><image name='a.png'><box label='cup' xtl='1'/></image></annotations>", "no 'ytl'"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotations/>', "document type"),
        ("<annotations>", "annotations.xml"),
    ],
)
def test_xml_that_is_not_of_cvat_is_named_with_the_reason(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "annotations.xml").write_text(text)
    with pytest.raises(DataError, match=says):
        Cvat().read(SplitRequest(split="all", root=tmp_path))


# ------------------------------------------------------------------------------------------------------- Label Studio
def percent(box: list[int]) -> dict[str, float]:
    left, top, right, bottom = box
    return {
        "x": left / WIDTH * 100, "y": top / HEIGHT * 100, "width": (right - left) / WIDTH * 100,
        "height": (bottom - top) / HEIGHT * 100, "rotation": 0,
    }  # fmt: skip


def result(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    head = {"id": "x", "from_name": "label", "to_name": "image", "type": kind, "image_rotation": 0}
    return {**head, "original_width": WIDTH, "original_height": HEIGHT, "value": value}


RESULTS = [
    result("rectanglelabels", {**percent(BOXES["cup"]), "rectanglelabels": ["cup"]}),
    result(
        "polygonlabels",
        {"points": [[25, 25], [75, 30], [60, 95]], "closed": True, "polygonlabels": ["table"]},
    ),
    result("keypointlabels", {"x": 3, "y": 4, "width": 0.5, "keypointlabels": ["eye"]}),
]
ADDRESSES = ["/data/upload/1/0a1b2c3d-a.png", "/data/local-files/?d=sets/mine/a.png", "s3://bucket/sets/a.png", "a.png"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_json_of_label_studio_is_read_wherever_its_server_had_the_image(address: str, tmp_path: Path) -> None:
    save_image(tmp_path / "photos" / "a.png")
    done = [{"was_cancelled": True, "result": []}, {"was_cancelled": False, "result": RESULTS}, {"result": RESULTS[:1]}]
    (tmp_path / "project-1-at-2024.json").write_text(
        json.dumps([{"id": 7, "data": {"image": address}, "annotations": done}])
    )
    found = LabelStudio().read(SplitRequest(split="all", root=tmp_path))
    assert found.samples[0].path == tmp_path / "photos" / "a.png"
    assert boxes(found) == DRAWN
    assert found.notes == ("shapes without an area (left out): 1 keypoint",)


def test_json_min_of_label_studio_is_read(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    rows = [{**each["value"], "original_width": WIDTH, "original_height": HEIGHT} for each in RESULTS[:2]]
    task = {"image": "/data/upload/1/0a1b2c3d-a.png", "id": 7, "label": rows[:1], "outline": rows[1:], "annotator": 1}
    (tmp_path / "result.json").write_text(json.dumps([task, {"image": "b.png", "id": 8}]))
    save_image(tmp_path / "b.png")
    found = LabelStudio().read(SplitRequest(split="all", root=tmp_path))
    assert (boxes(found, 0), boxes(found, 1)) == (DRAWN, [])


def test_a_rectangle_of_label_studio_turns_about_its_first_corner(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    value = {**percent([40, 10, 60, 15]), "rotation": 90, "rectanglelabels": ["cup"]}
    task = {"data": {"image": "a.png"}, "annotations": [{"result": [result("rectanglelabels", value)]}]}
    (tmp_path / "a.json").write_text(json.dumps([task]))
    assert boxes(LabelStudio().read(SplitRequest(split="all", root=tmp_path))) == [("cup", [35.0, 10.0, 40.0, 30.0])]


@pytest.mark.parametrize("text", ['{"shapes": []}', "[3]", '[{"data": {"text": "x"}}]'])
def test_json_that_is_not_of_label_studio_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(
        DataError, match="a task without an image; expected the export JSON or JSON-MIN of Label Studio"
    ):
        LabelStudio().read(SplitRequest(split="all", root=tmp_path))


# ----------------------------------------------------------------------------------------- images of the same name
@pytest.mark.parametrize("said", ["a.png", "/home/bob/{split}/a.png"])
def test_of_images_of_one_name_each_split_has_its_own(said: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        save_image(tmp_path / "photos" / split / "a.png")
        image = f'<image name="{said.format(split=split)}" width="80" height="40"/>'
        (tmp_path / f"{split}.xml").write_text(f"<annotations>{image}</annotations>")
        found = Cvat().read(SplitRequest(split=split, root=tmp_path))
        assert found.samples[0].path == tmp_path / "photos" / split / "a.png"


def test_of_images_of_one_name_none_is_guessed(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save_image(tmp_path / folder / "a.png")
    (tmp_path / "annotations.xml").write_text('<annotations><image name="a.png"/></annotations>')
    with pytest.raises(DataError, match=r"a\.png may be .*one/a\.png or .*two/a\.png"):
        Cvat().read(SplitRequest(split="all", root=tmp_path))


@pytest.mark.parametrize("ending", ["png", "PNG"])
def test_a_renamed_image_lies_beside_its_file_though_others_have_that_name_too(ending: str, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save_image(tmp_path / folder / f"a.{ending}")
        labelme(tmp_path / folder / "a.json", shape("cup", [[10, 5], [30, 25]]), image="before.png")
    found = LabelMe().read(SplitRequest(split="all", root=tmp_path))
    assert sorted(sample.path.parent.name for sample in found.samples) == ["one", "two"]


def test_two_files_about_one_image_are_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png")
    labelme(tmp_path / "a.json", shape("cup", [[10, 5], [30, 25]]))
    shutil.copy(tmp_path / "a.json", tmp_path / "copy.json")
    with pytest.raises(DataError, match=r"images must be unique.*\n.*a.png"):
        LabelMe().read(SplitRequest(split="all", root=tmp_path))
