"""Every data set of the table is read or refused in words: no other error, no waiting, no enormous message."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.data.images.decode import decode
from mtrain.errors import DataError
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.check import verify_images
from mtrain.tasks.detection.section import DetectionDataSpec
from tests.data_readers.hostile_sets import ANY, OTHER_IDS, Case, all_cases, coco_set, enormous_png, image, yolo_set

CASES = {case.name: case for case in all_cases()}
SECONDS = 20
"""Every case takes milliseconds; only one that waits or grows comes to this."""


class Hang(BaseException):
    """No part of the code under test may take this for an error of its own."""


@contextlib.contextmanager
def no_hang(name: str) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"{name}: still at work after {SECONDS} seconds")

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def look(root: Path, form: str) -> str:
    """Read and decode everything; the refusal, or nothing."""
    try:
        data = open_data(DetectionDataSpec(format=form, root=str(root)))
        verify_images(*data.both())
        for sample in data.train.samples:
            decode(sample.path)
    except DataError as error:
        return str(error)
    return ""


def check(case: Case, root: Path) -> None:
    case.build(root)
    with no_hang(case.name):
        message = look(root, case.form)
    assert len(message) < 20_000, message[:500]
    assert message.count("\n") < 60
    if case.says is None:
        assert message == ""
    elif case.says not in (ANY, OTHER_IDS):
        assert re.search(case.says, message), message or "was read"


def test_the_table_is_of_the_promised_size() -> None:
    assert len(CASES) == len(all_cases()) >= 200


@pytest.mark.parametrize("name", CASES)
def test_hostile_data_is_read_or_refused(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path / "set")


@pytest.mark.parametrize(
    "name",
    [
        "coco annotations.category_id: None",
        "coco images.width: nan",
        "coco file: brackets in a field",
        "yolo data.yaml: names that are aliases without end",
        "image: EPS",
        "images/train/a.jpg is a pipe",
        "annotations/instances_train.json is a device",
    ],
)
def test_the_command_line_refuses_it_with_2_and_no_traceback(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, root = CASES[name], tmp_path / "set"
    case.build(root)
    with no_hang(name):
        code = main(
            ["data", "check", "-o", f"data.format={case.form}", "-o", f"data.root={root}", "--output", str(tmp_path)]
        )
    stderr = capsys.readouterr().err
    assert (code, "Traceback" in stderr) == (2, False), stderr
    assert stderr.startswith("error: ")


def test_text_ids_of_categories_are_mapped_with_a_note(tmp_path: Path) -> None:
    CASES["coco file: ids of categories: words"].build(tmp_path / "a")
    CASES["coco file: ids of categories: numbers as text"].build(tmp_path / "b")
    words, numbers = (open_data(DetectionDataSpec(format="coco", root=str(tmp_path / name))).train for name in "ab")
    assert words.category_ids == (1, 2)
    assert numbers.category_ids == (7, 9)
    assert words.class_names == numbers.class_names == ("cat", "dog")
    assert [sample.labels.tolist() for sample in words.samples] == [[0], [1]]
    assert any("count as 1 to 2" in note for note in words.notes)
    assert any("numbers they spell" in note for note in numbers.notes)


def test_faults_of_every_kind_are_told_together_and_no_more_than_twenty(tmp_path: Path) -> None:
    import json

    from tests.data_readers.hostile_sets import coco_content

    content = coco_content()
    wrong = {"image_id": 1, "category_id": 1, "bbox": [1, 2, None, 4]}
    content["annotations"] += [wrong | {"id": number} for number in range(100, 150)]
    content["annotations"].append({"id": 900, "image_id": 77, "category_id": 1, "bbox": [1, 2, 3, 4]})
    coco_set(tmp_path / "set", json.dumps(content).encode())
    message = look(tmp_path / "set", "coco")
    assert "51 wrong entries" in message
    assert message.count("annotation 1") == 20
    assert "... and 31 more" in message


def test_max_pixels_can_be_raised_and_lowered(tmp_path: Path) -> None:
    yolo_set(tmp_path / "set", b"")
    low = DetectionDataSpec(format="yolo", root=str(tmp_path / "set"), max_pixels=3000)
    with pytest.raises(DataError, match=r"data\.max_pixels"):
        open_data(low).train  # noqa: B018
    assert len(open_data(low.model_copy(update={"max_pixels": 64 * 48})).train) == 1
    big = tmp_path / "big.png"
    big.write_bytes(enormous_png(11_000, 11_000))
    with pytest.raises(DataError, match="121 million, more than the 120 million"):
        decode(big)


def test_an_image_that_waits_for_a_writer_is_refused_where_it_is_decoded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").symlink_to("/dev/zero")
    for name, kind in (("a.jpg", "named pipe"), ("b.jpg", "device")):
        with no_hang(name), pytest.raises(DataError, match=kind):
            decode(tmp_path / name)


def test_no_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow starts Ghostscript for EPS files; mtrain never lets it, under any file name."""
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    (tmp_path / "a.jpg").write_bytes(CASES["image: EPS"].build and b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match="not an image"):
        decode(tmp_path / "a.jpg")
    assert image()


@pytest.mark.parametrize("kind", ["pipe", "device", "vast", "cut"])
def test_a_strange_file_in_the_cache_of_images_counts_as_absent(kind, tmp_path):

    from types import SimpleNamespace

    import numpy as np

    from mtrain.tasks.detection.image_cache import DiskCache

    file = tmp_path / "x.npy"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        np.save(file, np.zeros((2, 2, 3), np.uint8))
        content = file.read_bytes()
        file.write_bytes(content.replace(b"(2, 2, 3)", b"(2, 99999999999, 3)") if kind == "vast" else content[:-1])
    store = SimpleNamespace(_samples=[None], _file=lambda _: Path(file))
    assert DiskCache.get(store, 0) is None
