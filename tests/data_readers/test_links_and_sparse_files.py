"""Trees of links are entered once and within bounds; files that are longer than any image are not read whole."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from mtrain.data import reading
from mtrain.data.images import header
from mtrain.data.images.decode import decode
from mtrain.data.images.header import probe, read_image
from mtrain.data.reading import images_in, walk
from mtrain.errors import DataError
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.section import DetectionDataSpec
from tests.data_readers.class_images import image
from tests.data_readers.hostile_sets import yolo_set

ENORMOUS = 40 << 30


def touched(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image())


def names(found: list[Path], root: Path) -> list[str]:
    return [str(file.relative_to(root)) for file in found]


def tree_of_links(root: Path, levels: int = 24) -> None:
    """``2**levels`` paths to one image, through two links in each folder."""
    for level in range(levels):
        (root / f"{level}").mkdir(parents=True)
        for side in "ab":
            (root / f"{level}" / side).symlink_to(root / f"{level + 1}")
    touched(root / f"{levels}" / "x.png")


def test_sixteen_million_paths_by_links_are_one_image(tmp_path):
    tree_of_links(tmp_path / "tree")
    assert names(walk(tmp_path / "tree"), tmp_path / "tree") == ["24/x.png"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set/in").symlink_to(tmp_path / "tree/0")
    assert len(images_in(tmp_path / "set")) == 1


def test_links_out_of_the_folder_are_followed_and_folders_have_their_own_path(tmp_path):
    touched(tmp_path / "set/b/1.png", tmp_path / "elsewhere/deep/2.png", tmp_path / "set/c/3.png")
    (tmp_path / "set/a").symlink_to("b")
    (tmp_path / "set/z").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/y").symlink_to(tmp_path / "elsewhere/deep")
    assert names(walk(tmp_path / "set"), tmp_path / "set") == ["b/1.png", "c/3.png", "y/2.png"]


def test_links_to_folders_around_and_circles_add_nothing(tmp_path):
    touched(tmp_path / "set/train/1.png", tmp_path / "set/val/2.png", tmp_path / "other/3.png")
    for number, target in enumerate(["/", tmp_path, tmp_path / "set", tmp_path / "set/train"]):
        (tmp_path / "set/train" / f"link{number}").symlink_to(target)
    (tmp_path / "set/train/self").symlink_to("self")
    assert names(walk(tmp_path / "set/train"), tmp_path / "set/train") == ["1.png", "self"]
    assert names(walk(tmp_path / "set"), tmp_path / "set") == ["train/1.png", "train/self", "val/2.png"]


def test_images_beside_a_class_do_not_join_it_by_a_link(tmp_path):
    for split in ("train", "val"):
        touched(*(tmp_path / split / name / f"{name}.png" for name in ("cat", "dog")))
    (tmp_path / "train/dog/up").symlink_to(tmp_path)
    (tmp_path / "train/everything").symlink_to(tmp_path)
    train = open_data(ClassificationDataSpec(format="image_folder", root=str(tmp_path))).train
    assert train.class_names == ("cat", "dog")
    assert train.labels.tolist() == [0, 1]
    assert [Path(origin).stem for origin in train.origins] == ["cat", "dog"]


def test_more_folders_or_files_than_any_data_set_has_are_refused(tmp_path, monkeypatch):
    touched(*(tmp_path / f"set/{number}/x.png" for number in range(6)))
    assert len(walk(tmp_path / "set")) == 6
    monkeypatch.setattr(reading, "MAX_FOLDERS", 5)
    with pytest.raises(DataError, match="link") as caught:
        walk(tmp_path / "set")
    assert str(tmp_path / "set") in str(caught.value)
    monkeypatch.setattr(reading, "MAX_FOLDERS", 100)
    monkeypatch.setattr(reading, "MAX_FILES", 5)
    with pytest.raises(DataError, match="files"):
        walk(tmp_path / "set")


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(tmp_path, monkeypatch):
    touched(tmp_path / "set/a/1.png", tmp_path / "set/b/2.png")
    scan = os.scandir

    def refusing(path: Path) -> object:
        if Path(path).name == "b":  # root may read everything, whatever the mode says
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"set/b: cannot be read"):
        walk(tmp_path / "set")
    assert walk(tmp_path / "nowhere") == []


def test_label_folders_of_links_are_looked_through_once(tmp_path):
    yolo_set(tmp_path / "set", b"0 0.5 0.5 0.2 0.2\n")
    tree_of_links(tmp_path / "set/labels/train/tree")
    (tmp_path / "set/labels/train/orphan.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    notes = open_data(DetectionDataSpec(format="yolo", root=str(tmp_path / "set"))).train.notes
    assert [note for note in notes if "without an image" in note] == ["1 label files without an image: orphan.txt"]


def sparse(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    os.truncate(file, ENORMOUS)
    return file


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", ""])
def test_a_sparse_image_is_refused_without_reading_it(form, tmp_path, monkeypatch):
    content = io.BytesIO()
    if form:
        Image.new("RGB", (64, 48)).save(content, form)
    file = sparse(tmp_path / "x.png", content.getvalue())
    monkeypatch.setattr(header, "read_bytes", limited(header.read_bytes))
    for read in (probe, decode):
        with pytest.raises(DataError, match=r"x\.png.* bytes"):
            read(file)


def limited(read):
    def wrapper(path, *, limit):
        assert limit <= (64 << 20) + 64 * 48 * 16, "no more is read than such an image has"
        return read(path, limit=limit)

    return wrapper


def test_a_large_image_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "SMALL_BYTES", 1000)
    Image.effect_noise((200, 100), 90).save(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert read_image(tmp_path / "x.png") == (tmp_path / "x.png").read_bytes()
    assert decode(tmp_path / "x.png").shape == (100, 200, 3)
