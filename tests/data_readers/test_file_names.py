"""Images whose file names are not UTF-8 are checked, divided, scored and predicted on like all others."""

import json
import os
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.core.record_files import json_text
from mtrain.spec import outputs
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.section import DetectionDataSpec
from tests.data_readers.class_images import image

pytestmark = pytest.mark.smoke

STRANGE = os.fsdecode(b"caf\xe9")
CLASSES = ("red", "green", "blue")


def folders(root: Path) -> None:
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            for file in (f"{STRANGE}{number}.png", f"a{number}.png"):
                (root / split / name / STRANGE).mkdir(parents=True, exist_ok=True)
                (root / split / name / STRANGE / file).write_bytes(image(seed=number))


def yolo(root: Path) -> None:
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for file in (STRANGE, "a", "b", "c"):
            (root / "images" / split / f"{file}.png").write_bytes(image())
            (root / "labels" / split / f"{file}.txt").write_text("0 .5 .5 .5 .5\n")
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(CLASSES)}]\n")


SETS = {"image_folder": folders, "yolo": yolo}


@pytest.mark.parametrize("form", SETS)
def test_names_of_any_bytes_are_checked_and_divided(form, tmp_path, capfd):
    root = tmp_path / STRANGE
    SETS[form](root)
    base = "digits" if form == "yolo" else "vit_digits"
    values = [f"data.format={form}", "data.options={}", f"data.root={root}"]
    words = [word for value in values for word in ("-o", value)]
    assert main(["data", "check", "-c", base, *words, "--output", str(tmp_path / "sheets")]) == 0, capfd.readouterr()
    assert any((tmp_path / "sheets").iterdir())
    kind = DetectionDataSpec if form == "yolo" else ClassificationDataSpec
    train = {"image_folder": "train", "yolo": "images/train"}[form]
    parts = open_data(kind(format=form, root=str(root), train=train, split=0.34))
    assert len(parts.val) >= 1
    assert len(parts.train) + len(parts.val) == {"image_folder": 6, "yolo": 4}[form]


@pytest.mark.job
def test_predictions_and_metrics_name_such_images(tmp_path, monkeypatch, capfd):
    pytest.importorskip("onnx", reason="needs mtrain[export]")
    pytest.importorskip("onnxruntime", reason="needs mtrain[onnx]")
    from tests.serving.files import exported

    monkeypatch.chdir(tmp_path)
    folders(Path("set"))
    exported(Path("x.onnx"), "classification")
    assert main(["predict", "--weights", "x.onnx", "--out", "out", "--confidence", "0", "set/val"]) == 0
    content = Path("out/predictions.json").read_bytes()
    content.decode("utf-8")
    names = {row["file_name"] for row in json.loads(content)}
    assert names == {str(path.relative_to("set/val")) for path in Path("set/val").rglob("*.png")}
    assert all(Path("set/val", name).is_file() for name in names), "the names lead to the files again"
    spec = ["-o", "data.format=image_folder", "-o", "data.root=set", "-o", "data.options={}", "-o", "data.workers=0"]
    spec += ["-o", "data.names=[red, green, blue]"]
    assert main(["evaluate", "--weights", "x.onnx", *spec]) == 0, capfd.readouterr()
    (summary,) = Path("runs").glob("*/summary.json")
    assert json.loads(summary.read_bytes())["metrics"]["accuracy"] >= 0


def test_lone_surrogates_become_escapes_that_json_reads_back(tmp_path):
    value = {"file": STRANGE, "other": "\ud800x", "plain": "é"}
    outputs.write_text(tmp_path / "x.json", json_text(value))
    content = (tmp_path / "x.json").read_bytes()
    assert "é".encode() in content
    assert json.loads(content.decode("utf-8")) == value
