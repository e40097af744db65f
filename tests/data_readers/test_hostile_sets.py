"""Data sets that accidents and strangers make, each with its one error, or what is read of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.data.images.decode import decode
from mtrain.errors import DataError
from mtrain.spec import config
from mtrain.tasks.datasets import open_data
from tests.data_readers.class_images import image
from tests.data_readers.test_class_name_text import voc

BASES = {"voc": "digits", "coco": "digits", "yolo": "digits"}


def folders(root: Path, *, suffix: str = ".png", content: bytes | None = None) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            (root / split / name / f"a{suffix}").write_bytes(image() if content is None else content)


def with_folders(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        folders(root)
        change(root)

    return build


def deep(root: Path) -> None:
    folder = root / "train/cat"
    for _ in range(150):
        folder = folder / "d"
    folder.mkdir(parents=True)
    (folder / "b.png").write_bytes(image())


def many_links(root: Path) -> None:
    for number in range(300):
        (root / "train/cat" / f"link{number}").symlink_to(root / "train/cat")


def dangling(root: Path) -> None:
    (root / "train/cat/gone.png").symlink_to("nowhere.png")


def table(*lines: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        folders(root)
        for split in ("train", "val"):
            (root / f"{split}.csv").write_text("path,label\n" + "".join(f"{line}\n" for line in lines))

    return build


def entities(root: Path) -> None:
    head = b'<!DOCTYPE a [<!ENTITY x "' + b"x" * 1000 + b'"><!ENTITY y "' + b"&x;" * 1000 + b'">]>'
    voc(root, head=head, name=b"&y;")


def outside_entity(root: Path) -> None:
    voc(root, head=b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>', name=b"&x;")


CASES: dict[str, tuple[str, Callable[[Path], None], str | None]] = {
    "folders: 150 levels": ("image_folder", with_folders(deep), None),
    "folders: 300 links to itself": ("image_folder", with_folders(many_links), None),
    "folders: dangling link": ("image_folder", with_folders(dangling), r"gone\.png"),
    "folders: no images": ("image_folder", lambda root: folders(root, suffix=".txt"), "no image"),
    "folders: empty images": ("image_folder", lambda root: folders(root, content=b""), "not a readable image"),
    "folders: a page in place of an image": ("image_folder", lambda root: folders(root, content=b"<html>"), "image"),
    "folders: file in place of a split": (
        "image_folder",
        lambda root: (root.mkdir(), (root / "train").touch()),
        "train",
    ),
    "folders: nothing": ("image_folder", lambda root: root.mkdir(), "train"),
    "table: good": ("csv_labels", table("train/cat/a.png,cat", "train/dog/a.png,dog"), None),
    "table: out of the folder": ("csv_labels", table("../../../etc/passwd,cat", "train/dog/a.png,dog"), "passwd"),
    "table: device": ("csv_labels", table("/dev/zero,cat", "train/dog/a.png,dog"), "zero"),
    "table: a name of 5000 letters": ("csv_labels", table("x" * 5000 + ",cat", "train/dog/a.png,dog"), "xxx"),
    "table: null character": ("csv_labels", table("a\0b.png,cat", "train/dog/a.png,dog"), "a|null|CSV"),
    "table: one field": ("csv_labels", table("train/cat/a.png"), "fields"),
    "table: open quotation mark": ("csv_labels", table('"train/cat/a.png,cat'), "CSV"),
    "table: field of a megabyte": ("csv_labels", table("x" * (1 << 20) + ",cat"), "CSV|field"),
    "voc: entities": ("voc", entities, "DOCTYPE|entit"),
    "voc: a file of the system": ("voc", outside_entity, "DOCTYPE|entit"),
    "voc: brackets": ("voc", lambda root: voc(root, name=b"<a>" * 5000 + b"</a>" * 5000), r"\.xml"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_set_is_read_or_is_one_error(name: str, tmp_path: Path) -> None:
    form, build, says = CASES[name]
    root = tmp_path / "set"
    build(root)
    values = [f"data.format={form}", f"data.root={root}", "data.options={}"]
    spec = config.load(BASES.get(form, "vit_digits"), overrides=values, environ={}).spec

    def look() -> int:
        train = open_data(spec.data).train
        for index in range(len(train)):
            (train.images[index] if hasattr(train, "images") else decode(train.samples[index].path))
        return len(train)

    if says is None:
        assert look() == {"folders: 150 levels": 3}.get(name, 2)
        return
    with pytest.raises(DataError, match=says) as caught:
        look()
    assert len(str(caught.value)) < 20_000
    assert os.path.isdir(root)
