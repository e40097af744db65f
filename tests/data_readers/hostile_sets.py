"""Data sets as accidents, careless programs and strangers make them, as a table: what is written, and what is to happen.

Each case changes one thing of a small correct set. ``says`` is a pattern of the refusal; None: the set is to be read.
"""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

DEEP = 100_000
"""Brackets within one another: far more than any parser goes down."""


@dataclass(frozen=True)
class Case:
    name: str
    form: str
    """The data set plugin that reads it."""
    build: Callable[[Path], None]
    says: str | None


def image(form: str = "JPEG", size: tuple[int, int] = (64, 48)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (90, 120, 30)).save(content, form)
    return content.getvalue()


def enormous_png(width: int, height: int) -> bytes:
    """A correct header, and no more data than a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def enormous_jpeg() -> bytes:
    content = bytearray(image())
    place = content.find(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", 30_000, 30_000)
    return bytes(content)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n%%EndComments\n(/tmp/hostile) (w) file closefile\n%%EOF\n"


# ---------------------------------------------------------------------------------------------------------------- COCO
def coco_content() -> dict[str, Any]:
    return {
        "images": [
            {"id": 1, "file_name": "a.jpg", "width": 64, "height": 48},
            {"id": 2, "file_name": "b.jpg", "width": 64, "height": 48},
        ],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 30, 20], "area": 600, "iscrowd": 0},
            {"id": 2, "image_id": 2, "category_id": 2, "bbox": [4.5, 6, 10, 20], "area": 200.0, "iscrowd": 0},
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }


def coco_set(root: Path, train: bytes) -> None:
    (root / "annotations").mkdir(parents=True)
    (root / "images").mkdir()
    for name in ("a.jpg", "b.jpg"):
        (root / "images" / name).write_bytes(image())
    (root / "annotations/instances_train.json").write_bytes(train)
    (root / "annotations/instances_val.json").write_text(json.dumps(coco_content()))


def coco_file(name: str, content: bytes, says: str | None) -> Case:
    return Case(f"coco file: {name}", "coco", lambda root: coco_set(root, content), says)


def shortly(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:30]} ... of {len(text)}"


def coco_value(key: str, field: str, value: Any, says: str | None, name: str = "") -> Case:
    """The first entry of list ``key`` with another value in ``field``; ``...`` removes it."""
    content = coco_content()
    if value is ...:
        del content[key][0][field]
    else:
        content[key][0][field] = value
    text = json.dumps(content).encode()
    message = name or ("missing" if value is ... else shortly(repr(value)))
    return Case(f"coco {key}.{field}: {message}", "coco", lambda root: coco_set(root, text), says)


def coco_cases() -> Iterator[Case]:
    text = json.dumps(coco_content()).encode()
    yield coco_file("as it should be", text, None)
    yield coco_file("byte order mark", b"\xef\xbb\xbf" + text, None)
    yield coco_file("UTF-16", text.decode().encode("utf-16"), None)
    yield coco_file("NaN in a field that is not read", text.replace(b'"area": 600', b'"area": 600, "x": NaN'), None)
    for name, content in {
        "empty": b"",
        "blank": b" \n",
        "truncated": text[: len(text) // 2],
        "trailing words": text + b" {}",
        "not UTF-8": text.replace(b"cat", b"c\xff\xfet"),
        "zeros": b"\0" * 500,
        "an image": image(),
        "html": b"<html><body>404</body></html>",
        "brackets": b"[" * DEEP,
        "brackets, closed": b"[" * DEEP + b"]" * DEEP,
        "braces": b'{"a":' * DEEP,
        "brackets in a field": text.replace(b"600", b"[" * DEEP + b"]" * DEEP),
        "a number of 6000 digits": text.replace(b"600", b"9" * 6000),
    }.items():
        yield coco_file(
            name, content, r"instances_train\.json: (no valid JSON|no list)|wrong entries|6000 digits|hidden"
        )
    for name, value in {"list": [], "text": "x", "number": 3, "null": None, "true": True}.items():
        yield coco_file(f"{name} at the top", json.dumps(value).encode(), "no list images, annotations, categories")
    for key in ("images", "annotations", "categories"):
        for value in (None, {}, "x", 3):
            content = coco_content() | {key: value}
            yield coco_file(f"{key} is {value!r}", json.dumps(content).encode(), f"no list {key}")
        for value in (None, [], "x", 3, True, [[1]]):
            content = deepcopy(coco_content())
            content[key].insert(1, value)
            yield coco_file(f"{value!r} among {key}", json.dumps(content).encode(), rf"1 wrong entries.*\n.*{key}\[1\]")
    yield coco_file("no images", json.dumps(coco_content() | {"images": [], "annotations": []}).encode(), "no image")
    yield coco_file(
        "no categories", json.dumps(coco_content() | {"categories": []}).encode(), "not among the categories"
    )
    yield from coco_fields()
    for key, what in (("images", "ids of images"), ("categories", "ids of categories")):
        content = coco_content()
        content[key][1]["id"] = 1
        yield coco_file(
            f"one id twice in {key}", json.dumps(content).encode(), f"{what}.*unique|instances_train.*unique"
        )
    content = coco_content()
    content["annotations"][1]["id"] = 1
    yield coco_file("one id twice in annotations", json.dumps(content).encode(), None)
    for name, ids in {
        "words": ("c1", "d1"),
        "numbers as text": ("7", "9"),
        "mixed": (1, "1"),
        "floats": (1.0, 2.0),
    }.items():
        content = coco_content()
        for place, value in enumerate(ids):
            content["categories"][place]["id"] = content["annotations"][place]["category_id"] = value
        yield coco_file(f"ids of categories: {name}", json.dumps(content).encode(), OTHER_IDS)


OTHER_IDS = "both splits need the same classes|^$"
"""Not used as a refusal: see ``reads_alone``."""


def coco_fields() -> Iterator[Case]:
    odd = (None, [], {}, [1], True)
    for value in (..., *odd, 1.5, 10**30, "x" * 5_000):
        yield coco_value("images", "id", value, "wrong entries")
    for value in (..., *odd, 7, "", "x" * 5_000):
        yield coco_value("images", "file_name", value, "wrong entries")
    for value in (
        "gone.jpg",
        "../../../etc/passwd",
        "/etc/passwd",
        "images",
        ".",
        "x" * 300,
        "a\0.jpg",
        "\ud800.jpg",
        "a.jpg/b",
    ):
        yield coco_value("images", "file_name", value, "images cannot be used|no folder holds")
    yield from coco_sides()
    yield from coco_annotation_fields()
    for value in (..., *odd, float("nan"), 10**30, "x" * 5_000):
        yield coco_value("categories", "id", value, "wrong entries|not among the categories")
    for value in ([], {}, True, "x" * 5_000):
        yield coco_value("categories", "name", value, "wrong entries.*\n.*category 1: name")


def coco_sides() -> Iterator[Case]:
    for key in ("width", "height"):
        for value in ("64", [], {}, True, -1, 1e12, float("nan"), float("inf"), 10**400, 63.5):
            yield coco_value("images", key, value, "wrong entries")
        for value in (..., None, 0, 64.0 if key == "width" else 48.0):
            yield coco_value("images", key, value, None)
        yield coco_value("images", key, 65, "the annotations say")
        yield coco_value("images", key, 900_000, "data.max_pixels|the annotations say")


def coco_annotation_fields() -> Iterator[Case]:
    for key in ("image_id", "category_id"):
        for value in (..., None, [], {}, [1], True, "x", "1", 99, -1, 10**30, float("nan"), "x" * 5_000):
            yield coco_value("annotations", key, value, "wrong entries")
    for value in (..., None, [], {}, "1 2 3 4", 5, True, [1, 2, 3], [1, 2, 3, 4, 5], [[1, 2, 3, 4]]):
        yield coco_value("annotations", "bbox", value, "wrong entries.*\n.*annotation 1: bbox")
    for value in ("4", None, [], {}, True, float("nan"), float("inf"), -float("inf"), 1e300, 10**400):
        yield coco_value("annotations", "bbox", [1, 2, value, 4], r"wrong entries.*\n.*annotation 1: bbox\[2\]")
    for value in ("600", [], {}, True, float("nan"), float("inf"), 10**400):
        yield coco_value("annotations", "area", value, "wrong entries.*\n.*annotation 1: area")
    for value in (..., None, 0, -1, 1e9):
        yield coco_value("annotations", "area", value, None)
    for value in ("0", [], {}, 0.5, float("nan")):
        yield coco_value("annotations", "iscrowd", value, "wrong entries.*\n.*annotation 1: iscrowd")
    for value in (..., None, True, 1):
        yield coco_value("annotations", "iscrowd", value, None)
    for value in (..., None, [], "x", {}):
        yield coco_value("annotations", "id", value, None)


# ---------------------------------------------------------------------------------------------------------------- YOLO
YAML = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


def yolo_set(root: Path, label: bytes, description: bytes = YAML.encode()) -> None:
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        (root / "images" / split / "a.jpg").write_bytes(image())
        (root / "labels" / split / "a.txt").write_bytes(b"0 0.5 0.5 0.2 0.2\n")
    (root / "labels/train/a.txt").write_bytes(label)
    (root / "data.yaml").write_bytes(description)


def yolo_cases() -> Iterator[Case]:
    lines: dict[str, tuple[bytes, str | None]] = {
        "empty": (b"", None),
        "byte order mark": (b"\xef\xbb\xbf0 0.5 0.5 0.2 0.2\n", None),
        "polygon": (b"1 0.1 0.1 0.5 0.1 0.5 0.5\n", None),
        "text": (b"cat 0.5 0.5 0.2 0.2\n", r"a\.txt:1"),
        "NaN": (b"0 nan 0.5 0.2 0.2\n", "not normalised"),
        "infinity": (b"0 0.5 inf 0.2 0.2\n", "not normalised"),
        "pixels": (b"0 320 240 20 20\n", "not normalised"),
        "class NaN": (b"nan 0.5 0.5 0.2 0.2\n", "class nan"),
        "class too large": (b"2 0.5 0.5 0.2 0.2\n", "class 2"),
        "class of 400 digits": (b"9" * 400 + b" 0.5 0.5 0.2 0.2\n", r"a\.txt:1"),
        "negative class": (b"-1 0.5 0.5 0.2 0.2\n", "class -1"),
        "four columns": (b"0 0.5 0.5 0.2\n", "4 numbers"),
        "six columns": (b"0 0.5 0.5 0.2 0.2 0.9\n", "4 numbers"),
        "200001 columns": (b"0 " + b"0.5 " * 200_001 + b"\n", "4 numbers"),
        "a word of a million letters": (b"x" * 1_000_000, "4 numbers"),
        "not UTF-8": (b"\xff\xfe\x00\xd8 0.5 0.5 0.2 0.2\n", r"a\.txt:1"),
        "zeros": (b"\0" * 5_000, r"a\.txt:1"),
        "an image": (image(), r"a\.txt:1"),
    }
    for name, (content, says) in lines.items():
        yield Case(f"yolo label: {name}", "yolo", lambda root, content=content: yolo_set(root, content), says)
    good = b"0 0.5 0.5 0.2 0.2\n"
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    descriptions: dict[str, tuple[str | bytes, str | None]] = {
        "names as a mapping": (YAML.replace("[cat, dog]", "{0: cat, 1: dog}"), None),
        "empty": ("", "data.yaml: expected keys|names"),
        "a list": ("[1, 2]", "data.yaml"),
        "text": ("hello", "data.yaml"),
        "not UTF-8": (b"names: [\xff\xfe]", "data.yaml"),
        "aliases without end": (bomb + "names: *a11\n", "data.yaml.*alias|data.yaml"),
        "names that are aliases without end": (bomb.replace("a11:", "names:"), "data.yaml"),
        "brackets": ("names: " + "[" * 20_000, "data.yaml"),
        "a tag": ("names: !!python/object/apply:os.system ['true']\n", "data.yaml"),
        "names: a number": (YAML.replace("[cat, dog]", "5"), "names"),
        "names: a word": (YAML.replace("[cat, dog]", "cat"), "names"),
        "names: lists": (YAML.replace("[cat, dog]", "[[a], [b]]"), "names"),
        "names: gaps": (YAML.replace("[cat, dog]", "{0: cat, 2: dog}"), "names has the keys"),
        "names: words as keys": (YAML.replace("[cat, dog]", "{a: cat, b: dog}"), "names has the keys"),
        "nc: text": (YAML + "nc: two\n", "nc is"),
        "train: a number": (YAML.replace("images/train", "5"), "train"),
        "train: 5000 letters": (YAML.replace("images/train", "x" * 5_000), "data.train"),
        "train: absolute": (YAML.replace("images/train", "/nowhere/at/all"), "data.train"),
        "path: 5000 letters": (YAML + f"path: {'x' * 5_000}\n", None),
    }
    for name, (text, says) in descriptions.items():
        content = text if isinstance(text, bytes) else text.encode()
        yield Case(f"yolo data.yaml: {name}", "yolo", lambda root, content=content: yolo_set(root, good, content), says)
    for name, entry in {
        "null character": b"a\0b.jpg",
        "5000 letters": b"x" * 5_000,
        "not UTF-8": b"\xff\xfe.jpg",
    }.items():

        def build(root: Path, entry: bytes = entry) -> None:
            yolo_set(root, good, YAML.replace("images/train", "list.txt").encode())
            (root / "list.txt").write_bytes(entry + b"\n")

        yield Case(f"yolo list: {name}", "yolo", build, "list.txt|missing|cannot be used|wrong label")


# ------------------------------------------------------------------------------------------------------------ images
def image_cases() -> Iterator[Case]:
    contents: dict[str, tuple[bytes, str | None]] = {
        **{form: (image(form), None) for form in ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")},
        **{form: (image(form), "not an image") for form in ("PPM", "TGA", "ICO", "PCX", "SGI", "PDF", "JPEG2000")},
        "EPS": (EPS, "not an image"),
        "empty": (b"", "empty"),
        "zeros": (b"\0" * 5_000, "not an image"),
        "text": (b"hello", "not an image"),
        "truncated JPEG": (image()[:-50], "truncated|ends"),
        "two bytes of JPEG": (image()[:2], "JPEG"),
        "truncated PNG": (image("PNG")[:40], "PNG|image"),
        "PNG of 30000 x 30000": (enormous_png(30_000, 30_000), "max_pixels|the annotations say"),
        "PNG of 0 x 0": (enormous_png(0, 0), "a.jpg"),
        "PNG of 4 billion x 4 billion": (enormous_png(2**32 - 1, 2**32 - 1), "a.jpg"),
        "JPEG of 30000 x 30000": (enormous_jpeg(), "max_pixels|the annotations say"),
    }
    for form in ("WEBP", "TIFF", "GIF", "BMP"):
        contents[f"truncated {form}"] = (image(form)[:20], r"a\.jpg")
    for name, (content, says) in contents.items():

        def build(root: Path, content: bytes = content) -> None:
            yolo_set(root, b"0 0.5 0.5 0.2 0.2\n")
            (root / "images/train/a.jpg").write_bytes(content)

        yield Case(f"image: {name}", "yolo", build, says)


# ----------------------------------------------------------------------------------------------------- kinds of files
def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_sparse_file(path: Path) -> None:
    """As long as a disk, and no byte on it."""
    with path.open("wb") as file:
        file.truncate(1 << 42)


def kind_cases() -> Iterator[Case]:
    good = b"0 0.5 0.5 0.2 0.2\n"
    for make in (a_pipe, a_folder, a_device, a_link_to_itself, a_sparse_file):
        name = make.__name__.replace("_", " ")
        for form, file in (
            ("coco", "annotations/instances_train.json"),
            ("coco", "images/a.jpg"),
            ("yolo", "images/train/a.jpg"),
            ("yolo", "labels/train/a.txt"),
            ("yolo", "data.yaml"),
        ):

            def build(root: Path, make: Callable[[Path], None] = make, form: str = form, file: str = file) -> None:
                coco_set(root, json.dumps(coco_content()).encode()) if form == "coco" else yolo_set(root, good)
                (root / file).unlink()
                make(root / file)

            yield Case(f"{file} is {name}", form, build, ANY)

    def loops(root: Path) -> None:
        yolo_set(root, good)
        for number in range(4):
            (root / f"images/train/loop{number}").symlink_to(root / "images")

    yield Case("four links to the folder around them", "yolo", loops, ANY)


ANY = ".*"
"""Read or refused, as the layout has it; only no traceback and no waiting."""


def all_cases() -> list[Case]:
    return [*coco_cases(), *yolo_cases(), *image_cases(), *kind_cases()]
