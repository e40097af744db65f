"""Image folders and CSV files with labels: what is read, how it is divided, and what is refused in which words."""

import os
import re

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mtrain.commands import main
from mtrain.data.images.decode import decode
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import DataError
from mtrain.spec import plugins
from mtrain.spec.building import schema_of
from mtrain.spec.registry import Registry
from mtrain.tasks.classification.images import verify
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.classification.task import ClassificationTask
from mtrain.tasks.datasets import open_data
from tests.data_readers.class_images import COLOURS, encoded, folders, image, noise
from tests.data_readers.hostile_sets import enormous_png

pytestmark = pytest.mark.smoke


def section(root, form="image_folder", **values):
    return ClassificationDataSpec(**{"format": form, "root": str(root), "image_size": 16, **values})


def opened(root, form="image_folder", **values):
    return open_data(section(root, form, **values))


def look(root, form="image_folder", **values) -> str:
    """Read, verify and decode everything; the refusal, or nothing."""
    message = ""
    try:
        splits = opened(root, form, **values).both()
        verify(*splits)
        for split in splits:
            for index in range(len(split)):
                split.images[index]
    except DataError as error:
        message = str(error)
    assert len(message) < 20_000
    return message


def table(folder, text, *, name="train.csv", images=("a.png", "b.png", "c.png")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for number, file in enumerate(images):
        (folder / file).write_bytes(image(seed=number))
    return folder


# --------------------------------------------------------------------------------------------------------- image folders
def test_folders_are_classes_in_alphabetical_order_and_evaluation_has_those_of_training(tmp_path):
    folders(tmp_path, {"train": 3}, names=("dog", "cat", "emu"))
    folders(tmp_path, {"valid": 2}, names=("emu", "cat"))
    data = opened(tmp_path)
    train, val = data.both()
    assert train.class_names == val.class_names == ("cat", "dog", "emu")
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 2, 2])
    assert val.report() == ["classes without an image: dog"]
    np.testing.assert_array_equal(train.images[4], decode(tmp_path / "train/dog/1.png"))
    assert look(tmp_path) == ""


def test_given_names_order_the_classes(tmp_path):
    folders(tmp_path, {"train": 1, "val": 1})
    assert opened(tmp_path, names=["dog", "cat"]).train.class_names == ("dog", "cat")
    assert opened(tmp_path, names=["dog", "cat"]).train.labels.tolist() == [0, 1]


def test_other_folders_can_be_named_and_images_may_lie_deeper(tmp_path):
    folders(tmp_path, {"learn/cells": 1, "look": 1})
    (tmp_path / "learn/cells/cat/more/still").mkdir(parents=True)
    (tmp_path / "learn/cells/cat/more/still/x.JPEG").write_bytes(image(form="JPEG"))
    (tmp_path / "learn/cells/cat/.hidden.png").write_bytes(b"")
    train, val = opened(tmp_path, train="learn/cells", val="look").both()
    assert (len(train), len(val)) == (3, 2)
    assert train.keys == ["learn/cells/cat/0.png", "learn/cells/cat/more/still/x.JPEG", "learn/cells/dog/0.png"]


def test_what_is_no_image_by_its_name_is_left_out_and_told(tmp_path):
    folders(tmp_path, {"train": 1, "val": 1})
    (tmp_path / "train/cat/notes.txt").write_text("x")
    (tmp_path / "train/stray.png").write_bytes(image())
    assert opened(tmp_path).train.report() == [
        "1 files whose suffix is not that of an image were left out: cat/notes.txt",
        "1 images outside the folders of classes were left out: stray.png",
    ]


def test_the_content_and_not_the_suffix_decides_how_an_image_is_decoded(tmp_path):
    folders(tmp_path, {"train": 1, "val": 1})
    for number, form in enumerate(("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")):
        (tmp_path / f"train/cat/w{number}.jpg").write_bytes(image(form=form))
    assert look(tmp_path) == ""


def test_images_of_every_mode_are_rgb_as_they_are_shown(tmp_path):
    folders(tmp_path, {"train": 1, "val": 1})
    rgb = Image.fromarray(noise((30, 20), COLOURS["cat"], 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray((np.arange(600).reshape(20, 30) * 100).astype(np.uint16))
    contents = {
        "deep.png": encoded(deep),
        "grey.png": encoded(rgb.convert("L")),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "turned.jpg": encoded(rgb, "JPEG", exif=exif),
        "palette.gif": encoded(rgb.convert("P"), "GIF"),
        "alpha.png": encoded(rgb.convert("RGBA")),
    }
    for name, content in contents.items():
        (tmp_path / "train/cat" / name).write_bytes(content)
    assert look(tmp_path) == ""
    train = opened(tmp_path).train
    shapes = {os.path.basename(train.origins[i]): train.images[i].shape for i in range(len(train))}
    assert {shapes[name] for name in contents if name != "turned.jpg"} == {(20, 30, 3)}
    assert shapes["turned.jpg"] == (30, 20, 3)
    assert dict(zip((os.path.basename(o) for o in train.origins), map(train.images.size, range(8)), strict=True))[
        "turned.jpg"
    ] == (20, 30)


def damaged(root, name, content):
    folders(root, {"train": 2, "val": 1})
    (root / "train/cat" / name).write_bytes(content)


def no_folders(root):
    root.mkdir()
    (root / "a.png").write_bytes(image())


def loop(root):
    folders(root, {"train": 1, "val": 1})
    (root / "train/cat/again").symlink_to(root / "train/cat")
    (root / "train/dog/up").symlink_to(root)


def link_to_itself(root):
    folders(root, {"train": 1, "val": 1})
    (root / "train/cat/self.png").symlink_to("self.png")


def pipe(root):
    folders(root, {"train": 1, "val": 1})
    os.mkfifo(root / "train/cat/p.png")


def empty_class(root):
    folders(root, {"train": 1, "val": 1})
    (root / "train/emu").mkdir()


def class_of_other_files(root):
    folders(root, {"train": 1, "val": 1})
    (root / "train/emu").mkdir()
    (root / "train/emu/a.txt").write_text("x")


def unknown_class(root):
    folders(root, {"train": 1, "val": 1})
    folders(root, {"val": 1}, names=("emu",))


HOSTILE = {
    "no root": (lambda root: None, {}, r"data\.root: .*is no folder here"),
    "only train": (lambda root: folders(root, {"train": 1}), {}, r"data\.val: no folder val or valid .*data\.split=0\.2"),
    "only classes": (lambda root: folders(root, {"": 2}), {}, r"data\.train: no folder train in .*or data\.split=0\.2"),
    "images alone": (no_folders, {"split": 0.5}, "has no folders; expected one folder of images per class"),
    "an empty class": (empty_class, {}, r"1 folders of classes hold no image .*\n  .*emu: no image$"),
    "a class of other files": (class_of_other_files, {}, r"emu: no image, only a\.txt"),
    "a class that only val has": (unknown_class, {}, "no such class: the folder 'emu'"),
    "a name without folder": (
        lambda root: folders(root, {"train": 1, "val": 1}),
        {"names": ["cat", "dog", "eel"]},
        "no folder: the class 'eel'",
    ),
    "a name twice": (lambda root: folders(root, {"train": 1, "val": 1}), {"names": ["cat", "dog", "cat"]}, "each class once"),
    "a folder that is not there": (lambda root: folders(root, {"train": 1, "val": 1}), {"val": "gone"}, r"data\.val: .*gone is no folder"),
    "data.images": (lambda root: folders(root, {"train": 1, "val": 1}), {"images": "x"}, r"data\.images: given"),
    "both a split and val": (
        lambda root: folders(root, {"train": 1, "val": 1}),
        {"split": 0.5},
        r"has an evaluation split of its own \(val/\)",
    ),
    "one image of each class to divide": (lambda root: folders(root, {"": 1}), {"split": 0.5}, "no class has two"),
    "an empty file": (lambda root: damaged(root, "x.png", b""), {}, r"1 of 7 images.*\n.*x\.png: empty file"),
    "text": (lambda root: damaged(root, "x.jpg", b"<html>"), {}, r"x\.jpg: not an image in JPEG"),
    "a truncated PNG": (lambda root: damaged(root, "x.png", image()[:200]), {}, r"x\.png: truncated PNG"),
    "a truncated JPEG": (
        lambda root: damaged(root, "x.jpg", image(form="JPEG")[:-40]),
        {},
        r"x\.jpg: truncated JPEG",
    ),
    "an enormous image": (
        lambda root: damaged(root, "x.png", enormous_png(11_000, 11_000)),
        {},
        r"11000 x 11000 pixels are more than data\.max_pixels",
    ),
    "a link to itself": (link_to_itself, {}, r"self\.png: Too many levels of symbolic links"),
    "a pipe": (pipe, {}, r"p\.png: is a named pipe"),
    "folders that contain themselves": (loop, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_folders_of_any_kind_are_read_or_refused(name, tmp_path):
    build, values, says = HOSTILE[name]
    build(tmp_path / "set")
    message = look(tmp_path / "set", **values)
    assert (re.search(says, message) is not None) if says else message == "", message or "was read"


def test_an_unreadable_image_ends_a_training_step_with_its_name(tmp_path):
    damaged(tmp_path, "0.png", image()[:200])
    source = task_of(section(tmp_path)).sources()["train"]
    with pytest.raises(DataError, match=r"cat/0\.png: not a readable image"):
        source.sample(0, 0)


# --------------------------------------------------------------------------------------------------------------- dividing
def test_a_share_of_each_class_is_set_aside_by_name_and_seed_alone(tmp_path):
    folders(tmp_path / "a", {"": 20})
    folders(tmp_path / "b", {"": 20})
    parts = [
        opened(tmp_path / root, split=0.25, split_seed=seed).both() for root, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    names = [[(part.keys, part.labels.tolist()) for part in both] for both in parts]
    assert names[0] == names[1] != names[2]
    train, val = parts[0]
    assert (train.histogram(), val.histogram()) == ({"cat": 15, "dog": 15}, {"cat": 5, "dog": 5})
    assert sorted([*train.keys, *val.keys]) == sorted(f"{name}/{i}.png" for name in ("cat", "dog") for i in range(20))
    folders(tmp_path / "a", {"": 21})
    _, more = opened(tmp_path / "a", split=0.25).both()
    assert len(set(val.keys) & set(more.keys)) >= 8  # one of each class may give way to the new one


def test_a_class_of_one_image_is_for_training(tmp_path):
    folders(tmp_path, {"": 4})
    folders(tmp_path, {"": 1}, names=("emu",))
    train, val = opened(tmp_path, split=0.5).both()
    assert (train.histogram(), val.histogram()) == ({"cat": 2, "dog": 2, "emu": 1}, {"cat": 2, "dog": 2, "emu": 0})


def test_a_divided_split_keeps_the_limit_of_pixels(tmp_path):
    folders(tmp_path, {"": 2})
    train = opened(tmp_path, split=0.5, max_pixels=100).train
    with pytest.raises(DataError, match=r"data\.max_pixels"):
        train.images[0]


# ------------------------------------------------------------------------------------------------------------- CSV files
def test_paths_start_at_the_csv_file_and_labels_are_words_or_numbers(tmp_path):
    table(tmp_path / "x", "path,label\na.png,dog\nb.png,cat\n")
    table(tmp_path / "x", "path,label\nc.png,dog\n", name="val.csv")
    train, val = opened(tmp_path / "x", "csv_labels").both()
    assert (train.class_names, train.labels.tolist(), val.labels.tolist()) == (("cat", "dog"), [1, 0], [1])
    np.testing.assert_array_equal(val.images[0], decode(tmp_path / "x/c.png"))
    table(tmp_path / "y", "path,label\na.png,10\nb.png,9\nc.png,10\n")
    numbers = opened(tmp_path / "y", "csv_labels", split=0.5)
    assert numbers.class_names == ("9", "10")
    named = opened(tmp_path / "y", "csv_labels", train="train.csv", names=[f"n{i}" for i in range(11)]).train
    assert named.labels.tolist() == [10, 9, 10]


def test_other_headers_folders_and_separators(tmp_path):
    table(tmp_path / "images", "", images=("a.png", "b.png"))
    text = '\ufefffile name; class \r\n"a.png";cat\r\n\r\nb.png;"dog"\r\n'
    (tmp_path / "list.csv").write_bytes(text.encode())
    options = {"path_column": "file name", "label_column": "class"}
    train = opened(tmp_path, "csv_labels", train="list.csv", images="images", options=options).train
    assert train.labels.tolist() == [0, 1]
    assert train.origins == [str(tmp_path / "images/a.png"), str(tmp_path / "images/b.png")]
    (tmp_path / "list.csv").write_text("file name\tclass\na.png\tcat\n")
    assert len(opened(tmp_path, "csv_labels", train="list.csv", images="images", options=options).train) == 1


CSV = {
    "no label column": ("path,lable\na.png,x\n", r"no column 'label'; its first line has path, lable; did you mean 'lable'\?.*path_column"),
    "empty": ("", "empty; expected a CSV file with the columns path, label"),
    "header alone": ("path,label\n", "holds no image"),
    "UTF-16": ("path,label\na.png,x\n".encode("utf-16"), "not UTF-8 text"),
    "zeros": (b"path,label\n\0\0\n", r"train\.csv:2: .*(NUL|1 fields)"),
    "a short row": ("path,label\na.png\n", r"train\.csv:2: 1 fields, expected at least 2"),
    "an open quote": ('path,label\n"a.png,x\n', r"train\.csv:2: no valid CSV"),
    "no label": ("path,label\na.png,\nb.png,x\n", r"1 of 2 labels.*\n.*train\.csv:2: no label"),
    "no path": ("path,label\n,x\n", r"train\.csv:2: no path"),
    "a path twice": ("path,label\na.png,x\nb.png,y\na.png,y\n", r"train\.csv:4: a\.png is also in train\.csv:2"),
    "a missing image": ("path,label\ngone.png,x\n", r"gone\.png: No such file"),
    "a path out of the folder": (f"path,label\n{'../' * 40}etc/passwd,x\n", r"passwd: not an image in JPEG"),
    "a device": ("path,label\n/dev/zero,x\n", r"zero: is a device"),
    "a folder": ("path,label\n.,x\n", "is a folder"),
    "a long name": (f"path,label\n{'x' * 400},x\n", "File name too long"),
    "html": ("<html><body>404</body></html>", r"no column 'path', 'label'; its first line has <html>"),
}  # fmt: skip


@pytest.mark.parametrize("name", CSV)
def test_csv_files_of_any_kind_are_refused_with_file_and_line(name, tmp_path):
    text, says = CSV[name]
    table(tmp_path / "set", text)
    table(tmp_path / "set", "path,label\nc.png,x\n", name="val.csv")
    message = look(tmp_path / "set", "csv_labels")
    assert re.search(says, message), message or "was read"


def test_labels_that_are_no_class_are_listed_with_the_nearest_one(tmp_path):
    table(tmp_path, "path,label\na.png,cat\nb.png,dgo\n")
    message = look(tmp_path, "csv_labels", train="train.csv", val="train.csv", names=["cat", "dog"])
    assert "1 of 2 labels are not among the 2 classes (cat, dog)" in message
    assert "train.csv:3: class 'dgo'; did you mean 'dog'?" in message
    message = look(tmp_path, "csv_labels", train="gone.csv", val="train.csv")
    assert "gone.csv is no file, no folder with .csv or .tsv files, and no pattern" in message


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(ValidationError):
        plugins.load("datasets", "csv_labels").Options(column="x")


# ------------------------------------------------------------------------------------------------- samples and commands
def task_of(data):
    schema = schema_of("classification", registry=Registry.read())
    return ClassificationTask(schema(data=data), open_data(data))


@pytest.mark.job
@pytest.mark.parametrize("workers", [1, 3])
def test_samples_are_the_same_bits_for_any_number_of_workers(tmp_path, workers):
    folders(tmp_path, {"": 6})
    data = section(tmp_path, split=0.5)
    expected = [task_of(data).sources()["train"].sample(2, index).image for index in range(6)]
    pool = WorkerPool(task_of(data).sources(), workers=workers)
    try:
        loader = pool.loader("train", lambda e, u: [np.array([5, 0, 3])], micro_batch=3, updates_per_epoch=2)
        for batch in loader.micro_batches(2):
            np.testing.assert_array_equal(batch["images"], np.stack([expected[i] for i in (5, 0, 3)]))
        loader.close()
    finally:
        pool.close()
    other = [task_of(data).sources()["train"].sample(3, index).image for index in range(6)]
    assert all(not np.array_equal(one, two) for one, two in zip(expected, other, strict=True))


def test_data_check_shows_a_folder_and_refuses_a_broken_one(tmp_path, capsys):
    folders(tmp_path / "set", {"train": 3, "val": 2})
    arguments = ["data", "check", "-o", "model.name=vit", "-o", "data.format=image_folder", "-o", "data.image_size=16",
                 "-o", f"data.root={tmp_path / 'set'}", "--out", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "10 images, all read" in shown
    assert re.search(r"train images: \d+ x \d+ to \d+ x \d+ px, given to the network as 16 x 16", shown)
    (tmp_path / "set/train/cat/0.png").write_bytes(b"no")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 1 of 10 images cannot be used")
    assert "Traceback" not in error
