"""Annotation files of Pascal VOC that are damaged, enormous or malicious: read in linear time, or refused with their place."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.voc import Voc

BOX = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
CAT = f"<object><name>cat</name>{BOX}</object>\n"
SECONDS = 20
"""A file that takes longer than this is a hang: every file here takes well under a second."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"still reading after {SECONDS} seconds")

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def read(root: Path, xml: str | bytes) -> Annotations:
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    (root / "ImageSets/Main/train.txt").write_text("a\n")
    Image.new("RGB", (64, 48)).save(root / "JPEGImages/a.jpg")
    (root / "Annotations/a.xml").write_bytes(xml.encode() if isinstance(xml, str) else xml)
    return Voc().read(SplitRequest(root=root, split="train"))


def annotation(*inside: str) -> str:
    size = "<size><width>64</width><height>48</height></size>"
    return f"<annotation>\n<filename>a.jpg</filename>\n{size}\n{''.join(inside)}</annotation>"


def test_twenty_thousand_objects_are_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, annotation(CAT * 20_000)).ground_truth["annotations"]) == 20_000


@pytest.mark.parametrize("blank", [" ", "\n", "\t \n"])
def test_blanks_without_end_in_a_name_are_read(tmp_path: Path, blank: str) -> None:
    blanks = blank * 100_000
    actual = read(tmp_path, annotation(CAT.replace("cat", f"{blanks}cat{blanks}")))
    assert actual.class_names == ("cat",)


def test_a_name_that_is_never_closed_is_refused_in_linear_time(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.xml:4: "):
        read(tmp_path, annotation("<object><name>" + " " * 100_000))


def test_the_name_of_a_class_may_hold_a_comment_and_escaped_characters(tmp_path: Path) -> None:
    actual = read(tmp_path, annotation(CAT.replace("cat", "black<!-- sic --> &amp; white")))
    assert actual.class_names == ("black & white",)


def test_the_encoding_that_the_file_declares_is_used(tmp_path: Path) -> None:
    text = '<?xml version="1.0" encoding="GB2312"?>' + annotation(CAT.replace("cat", "猫"))
    assert read(tmp_path, text.encode("gb2312")).class_names == ("猫",)


def bomb(*, levels: int) -> str:
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, levels))
    return f'<!DOCTYPE annotation [<!ENTITY e0 "lol">{entities}]>'


@pytest.mark.parametrize(
    "xml",
    [
        bomb(levels=10) + annotation(CAT.replace("cat", "&e9;")),
        bomb(levels=10) + annotation(CAT).replace("<annotation>", '<annotation a="&e9;">'),
        '<!DOCTYPE annotation [<!ENTITY e SYSTEM "file:///etc/passwd">]>' + annotation(CAT.replace("cat", "&e;")),
        '<!DOCTYPE annotation SYSTEM "http://127.0.0.1:9/x.dtd">' + annotation(CAT),
    ],
    ids=["entity bomb in a text", "entity bomb in an attribute", "a file as entity", "a type from the network"],
)
def test_entities_are_refused_and_never_resolved(tmp_path: Path, xml: str) -> None:
    with pytest.raises(DataError, match=r"a\.xml") as error:
        read(tmp_path, xml)
    assert "root:" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_every_fault_of_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    xml = annotation(
        CAT.replace("<xmin>1<", "<xmin>nan<"),
        CAT.replace("<xmax>30<", "<xmax>1e400<"),
        CAT.replace("<ymin>2</ymin>", ""),
        f"<object><name>cat</name></object>\n<object>{BOX}</object>\n",
    )
    with pytest.raises(DataError) as error:
        read(tmp_path, xml)
    messages = [line.partition("a.xml:")[2] for line in str(error.value).splitlines()[1:]]
    assert messages == [
        "4: <xmin> is 'nan', expected a number",
        "5: <xmax> is '1e400', expected a number",
        "6: <bndbox> has no <ymin>",
        "7: object 'cat' has no <bndbox>",
        "8: an object has no <name>",
    ]


@pytest.mark.parametrize(
    ("xml", "says"),
    [
        ("", "empty file"),
        (" \n", "empty file"),
        ("cat 1 2 3 4", "Start tag expected"),
        ("<annotation>", "end of data|Premature"),
        (annotation(CAT)[:-20], r"a\.xml:\d+: "),
        (annotation("<a>" * 5_000), "depth|Excessive"),
        (b"\xff\xfe\x00\xd8" * 10, r"a\.xml:\d+: "),
        (b"\x00" * 100, r"a\.xml:\d+: "),
        ("<html><body>404 not found</body></html>", "expected <annotation>"),
        (annotation(CAT).replace("64", "wide"), "<width> is 'wide'"),
        (annotation(CAT).replace("64", "x" * 5_000), "<width> is 'xxx"),
        (annotation(CAT).replace("64", "63.5"), "expected whole numbers"),
        (annotation(CAT).replace("64", "9" * 400), "expected a number"),
        (annotation(CAT).replace("<name>cat</name>", "<name> </name>"), "has no <name>"),
    ],
)
def test_what_is_no_annotation_is_refused(tmp_path: Path, xml: str | bytes, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        read(tmp_path, xml)
    assert "a.xml:" in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_pipe_and_a_folder_are_no_annotation(tmp_path: Path) -> None:
    read(tmp_path, annotation(CAT))
    file = tmp_path / "Annotations/a.xml"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="named pipe"):
        Voc().read(SplitRequest(root=tmp_path, split="train"))
    file.unlink()
    file.mkdir()
    with pytest.raises(DataError, match="folder"):
        Voc().read(SplitRequest(root=tmp_path, split="train"))
