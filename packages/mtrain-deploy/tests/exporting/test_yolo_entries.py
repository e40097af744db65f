"""What programs for YOLO models find in a file: entries that are right, or a sentence on which they end."""

import ast

import pytest

from mtrain_deploy.exported.metadata import Input, Metadata


def entries(*, kind: str, form: str, layout: str = "NCHW") -> dict[str, str]:
    images = Input(name="images", key="images", dtype="float32", shape=("batch", 3, 64, 64), layout=layout)
    metadata = Metadata(
        mtrain="1", kind=kind, model="yolov5n", options={}, class_names=("cup", "a 'b'"), image_size=64,
        inputs=(images,), outputs={}, form=form, precision="fp32", spec={},
    )  # fmt: skip
    return metadata.yolo_entries(size_step=32)


@pytest.mark.parametrize(
    ("kind", "form", "task"), [("detection", "nms-fixed", "detect"), ("classification", "decoded", "classify")]
)
def test_outputs_that_ultralytics_reads_as_they_are_have_its_task(kind, form, task):
    found = entries(kind=kind, form=form)
    assert found["task"] == task
    assert ast.literal_eval(found["imgsz"]) == [64, 64]
    assert ast.literal_eval(found["names"]) == {0: "cup", 1: "a 'b'"}
    assert (int(found["stride"]), int(found["batch"])) == (32, 1)
    assert ast.literal_eval(found["args"])["nms"] == (task == "detect") == ast.literal_eval(found["end2end"])


@pytest.mark.parametrize(
    ("kind", "form", "right"),
    [
        ("detection", "decoded", "nms-fixed"),
        ("detection", "raw", "nms-fixed"),
        ("detection", "nms", "nms-fixed"),
        ("classification", "raw", "decoded"),
    ],
)
def test_outputs_that_ultralytics_would_misread_end_it_with_what_to_do(kind, form, right):
    """It compares `task` with its own, and evaluates `imgsz`, also where the user names the task."""
    found = entries(kind=kind, form=form)
    assert found["task"].endswith(f"export with --form {right}")
    with pytest.raises(SyntaxError):
        ast.literal_eval(found["imgsz"])
    assert set(found) == {"stride", "names", "task", "imgsz"}  # YOLOv5's own detect.py reads the first two


def test_other_images_and_tasks_have_no_entries():
    assert entries(kind="detection", form="nms-fixed", layout="NHWC") == {}
    assert entries(kind="segmentation", form="decoded") == {}
