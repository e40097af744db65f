"""Boxes in CSV files: the usual layout, with and without a header, and wrong rows told with file and line."""

import re

import numpy as np
import pytest

from mtrain.errors import DataError
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.section import DetectionDataSpec
from tests.data_readers.hostile_sets import image

HEADER = "path,x1,y1,x2,y2,label\n"
ROWS = "a.jpg,1,2,31,22,cat\na.jpg,4.5,6,14.5,26,dog\nb.jpg,,,,,\n"


def written(root, text, *, val=ROWS):
    root.mkdir()
    for name in ("a.jpg", "b.jpg"):
        (root / name).write_bytes(image())
    (root / "train.csv").write_bytes(text.encode())
    (root / "val.csv").write_text(val)
    return root


def opened(root, **values):
    return open_data(DetectionDataSpec(format="csv_boxes", root=str(root), **values))


@pytest.mark.parametrize(
    "text",
    [
        HEADER + ROWS,
        ROWS,
        "\ufeff" + (HEADER + ROWS).replace(",", ";"),
        "label,x2,y2,x1,y1,path,extra\r\ncat,31,22,1,2,a.jpg,9\r\ndog,14.5,26,4.5,6,a.jpg,9\r\n,,,,,b.jpg,9\r\n",
    ],
)
def test_rows_are_boxes_in_pixels_and_a_path_alone_is_an_image_without_boxes(tmp_path, text):
    train, val = opened(written(tmp_path / "set", text)).both()
    assert train.class_names == val.class_names == ("cat", "dog")
    assert [sample.path.name for sample in train.samples] == ["a.jpg", "b.jpg"]
    np.testing.assert_array_equal(train.samples[0].boxes, [[1, 2, 31, 22], [4.5, 6, 14.5, 26]])
    assert [sample.labels.tolist() for sample in train.samples] == [[0, 1], []]
    assert [(sample.width, sample.height) for sample in train.samples] == [(64, 48)] * 2
    assert train.category_ids == (1, 2)


def test_names_folders_and_columns_can_be_given_and_one_file_divided(tmp_path):
    root = written(tmp_path / "set", "f,a,b,c,d,k\na.jpg,1,2,31,22,cat\nb.jpg,1,2,3,4,dog\n")
    (root / "val.csv").unlink()
    data = opened(root, split=0.5, names=["dog", "cat"], options={"columns": ["f", "a", "b", "c", "d", "k"]})
    train, val = data.both()
    assert {sample.path.name for sample in (*train.samples, *val.samples)} == {"a.jpg", "b.jpg"}
    assert train.class_names == ("dog", "cat")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a.jpg,1,2,x,4,cat", r"train\.csv:2: corners 1, 2, x, 4; expected four numbers"),
        ("a.jpg,1,2,nan,4,cat", "expected four numbers"),
        ("a.jpg,1,2,1e400,4,cat", "expected four numbers"),
        ("a.jpg,9,2,3,4,cat", "expected left, top, right, bottom"),
        ("a.jpg,1,2,3,4,", "no label"),
        (",1,2,3,4,cat", "no path"),
        ("a.jpg,1,2,3,4,cow", "class 'cow'; expected one of cat, dog"),
        ("a.jpg,1,2", "3 fields, expected at least 6"),
        ("gone.jpg,1,2,3,4,cat", r"gone\.jpg: no such file"),
        ("../" * 40 + "etc/passwd,1,2,3,4,cat", "not an image"),  # above any folder for temporary files
        ("/dev/zero,1,2,3,4,cat", "is a device"),
    ],
)
def test_a_wrong_row_is_told_with_its_line(tmp_path, row, says):
    root = written(tmp_path / "set", f"{HEADER}{row}\n")
    with pytest.raises(DataError) as caught:
        opened(root, names=["cat", "dog"]).train  # noqa: B018
    assert re.search(says, str(caught.value)), caught.value


def test_other_columns_are_refused_with_those_there_are(tmp_path):
    root = written(tmp_path / "set", "image,xmin,ymin,xmax,ymax,class,area\n")
    with pytest.raises(DataError, match=r"no column 'path', .* has image, xmin, .*data\.options\.columns"):
        opened(root).train  # noqa: B018
