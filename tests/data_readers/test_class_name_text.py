"""Class names that are not UTF-8 are refused by every reader, with the name and the data set."""

import io
import json
import os
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.commands import main
from mtrain.errors import DataError
from mtrain.spec import config
from mtrain.tasks.datasets import open_data

STRANGE = os.fsdecode(b"caf\xe9")


def images(folder: Path, count: int = 2) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        cv2.imwrite(str(folder.parent / f"{index}.png"), np.zeros((16, 16, 3), np.uint8))
        os.rename(folder.parent / f"{index}.png", folder / f"{index}.png")


def folders(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split / STRANGE)
        images(root / split / "dog")


def coco(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split)
        content = {
            "images": [{"id": 1, "file_name": "0.png", "width": 16, "height": 16}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 8, 8], "area": 64, "iscrowd": 0}],
            "categories": [{"id": 1, "name": STRANGE}, {"id": 2, "name": "dog"}],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def csv(root: Path) -> None:
    for split in ("train", "val"):
        images(root / split)
        (root / f"{split}.csv").write_bytes(
            f"file,label\n{split}/0.png,caf".encode() + b"\xe9\n" + f"{split}/1.png,dog\n".encode()
        )


def yolo(root: Path) -> None:
    for split in ("train", "val"):
        images(root / "images" / split)
        (root / "labels" / split).mkdir(parents=True)
        (root / "labels" / split / "0.txt").write_text("0 .5 .5 .5 .5\n")
    (root / "data.yaml").write_bytes(b"train: images/train\nval: images/val\nnames: [caf\xe9, dog]\n")


def voc(root: Path, *, head: bytes = b"", name: bytes = b"caf\xe9") -> None:
    for split in ("train", "val"):
        images(root / "JPEGImages" / split)
        for number in range(2):
            os.rename(root / "JPEGImages" / split / f"{number}.png", root / "JPEGImages" / f"{split}{number}.png")
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "ImageSets/Main" / f"{split}.txt").write_text(f"{split}0\n")
        (root / "Annotations" / f"{split}0.xml").write_bytes(
            head
            + b"<annotation><filename>x.png</filename><size><width>16</width><height>16</height></size><object><name>"
            + name
            + b"</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"
        )


def columns(root: Path) -> tuple[list[bytes], list[bytes]]:
    images(root / "made")
    return [(root / "made" / f"{number}.png").read_bytes() for number in range(2)], [b"caf\xe9", b"dog"]


def table_of(root: Path, *, dictionary: bool = False) -> "object":
    pa = pytest.importorskip("pyarrow", reason="needs mtrain[data]")
    images, names = columns(root)
    labels = pa.array(names, pa.binary())
    text = pa.StringArray.from_buffers(2, *labels.buffers()[1:])
    if dictionary:
        text = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), text)
    return pa.table({"image": pa.array(images, pa.binary()), "label": text})


def parquet(root: Path) -> None:
    table = table_of(root)
    import pyarrow.parquet as pq

    for split in ("train", "val"):
        pq.write_table(table, root / f"{split}.parquet", use_dictionary=False)


def parquet_dictionary(root: Path) -> None:
    table = table_of(root, dictionary=True)
    import pyarrow.parquet as pq

    for split in ("train", "val"):
        pq.write_table(table, root / f"{split}.parquet", store_schema=False)


def parquet_metadata(root: Path) -> None:
    """Hugging Face's metadata name the classes, as JSON."""
    pa = pytest.importorskip("pyarrow", reason="needs mtrain[data]")
    import pyarrow.parquet as pq

    images, _ = columns(root)
    features = {"label": {"_type": "ClassLabel", "names": [STRANGE, "dog"]}, "image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": pa.array(images, pa.binary()), "label": [0, 1]}).replace_schema_metadata(metadata)
    for split in ("train", "val"):
        pq.write_table(table, root / f"{split}.parquet")


def arrow(root: Path) -> None:
    table = table_of(root)
    import pyarrow as pa

    for split in ("train", "val"):
        with pa.ipc.new_stream(str(root / f"{split}.arrow"), table.schema) as writer:
            writer.write_table(table)


def shards(root: Path, *, json_labels: bool = False) -> None:
    images, names = columns(root)
    for split in ("train", "val"):
        with tarfile.open(root / f"{split}.tar", "w") as archive:
            for number, (image, name) in enumerate(zip(images, names, strict=True)):
                label = json.dumps({"label": os.fsdecode(name)}).encode() if json_labels else name
                for suffix, content in (("png", image), ("json" if json_labels else "cls", label)):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def shards_json(root: Path) -> None:
    shards(root, json_labels=True)


@pytest.mark.parametrize(
    ("form", "base", "make"),
    [
        ("voc", "digits", voc),
        ("parquet", "vit_digits", parquet),
        ("parquet", "vit_digits", parquet_dictionary),
        ("parquet", "vit_digits", parquet_metadata),
        ("huggingface", "vit_digits", arrow),
        ("webdataset", "vit_digits", shards),
        ("webdataset", "vit_digits", shards_json),
        ("image_folder", "vit_digits", folders),
        ("coco", "digits", coco),
        ("csv_labels", "vit_digits", csv),
        ("yolo", "digits", yolo),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_names_that_are_not_utf8_are_refused_with_the_data_set(tmp_path, form, base, make, capfd):
    root = tmp_path / "set"
    root.mkdir()
    make(root)
    values = [f"data.format={form}", f"data.root={root}", "data.options={}"]
    spec = config.load(base, overrides=values, environ={}).spec
    with pytest.raises(DataError, match=r"(?i)utf-?8|character encoding") as caught:
        open_data(spec.data).both()
    assert str(root) in str(caught.value)
    assert main(["data", "check", "-c", base, *(word for value in values for word in ("-o", value))]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_class_names_in_another_declared_encoding_are_read(tmp_path):
    voc(tmp_path / "set", head=b'<?xml version="1.0" encoding="iso-8859-1"?>')
    values = ["data.format=voc", f"data.root={tmp_path / 'set'}", "data.options={}"]
    spec = config.load("digits", overrides=values, environ={}).spec
    assert open_data(spec.data).train.class_names == ("caf\u00e9",)


def header(kind: bytes, size: int, name: bytes = b"x") -> bytes:
    """Return the header of a member of a tar file; sizes above 8 GiB are in base 256."""
    number = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"0" * 12 + b" " * 8 + kind
    block = block.ljust(257, b"\0") + b"ustar\x0000"
    block = block.ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


@pytest.mark.parametrize(
    "content",
    [
        header(b"L", 0) * 5000,
        header(b"x", 0) * 5000,
        header(b"0", 2**45, b"0.jpg"),
        header(b"L", 2**45),
        header(b"x", 2**45),
        header(b"0", 2**62, b"0.jpg"),
    ],
    ids=["chained long names", "chained pax", "large", "large long name", "large pax", "larger"],
)
def test_a_shard_with_hostile_headers_is_refused_in_words(tmp_path, content):
    (tmp_path / "train.tar").write_bytes(content + bytes(1024))
    (tmp_path / "val.tar").write_bytes(content + bytes(1024))
    values = ["data.format=webdataset", f"data.root={tmp_path}", "data.options={}"]
    spec = config.load("vit_digits", overrides=values, environ={}).spec
    with pytest.raises(DataError, match=r"train\.tar"):
        open_data(spec.data).both()
