"""One annotation file of Pascal VOC: XML that somebody else has made, read with limits.

The parser never resolves entities, loads nothing over the network and refuses documents with a type declaration, which is
where entity bombs ("billion laughs") are written. Its time grows linearly with the file.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from mtrain.files import read_bytes

MAX_BYTES = 64 << 20
"""Largest annotation file that is read: about 300,000 objects."""
LARGEST = 1e9
"""Largest coordinate that is taken for one, in pixels."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class VocObject:
    """One ``<object>``."""

    name: str
    corners: tuple[float, float, float, float]
    """xmin, ymin, xmax, ymax in pixels, as written."""
    difficult: bool


@dataclass(frozen=True, slots=True)
class VocPicture:
    """What one annotation file says."""

    file_name: str
    """Text of ``<filename>``; empty where there is none. Tools that convert data sets often leave a wrong one."""
    width: int
    """In pixels; 0 where ``<size>`` is missing or says nothing."""
    height: int
    objects: tuple[VocObject, ...]


def read_voc_xml(file: Path, faults: list[str]) -> VocPicture | None:
    """The content of ``file``. What is wrong is added to ``faults``, as ``file:line: message``; the result is then None."""
    found: list[str] = []
    picture = None
    try:
        picture = _picture(_root(file), found)
    except OSError as error:
        found.append(f" {error.strerror}")
    except etree.XMLSyntaxError as error:
        found.append(f"{error.lineno or 1}: {_short(error.msg)}")
    except ValueError as error:
        found.append(f" {error}")
    faults.extend(f"{file}:{fault}" for fault in found)
    return None if found else picture


def voc_class_names(file: Path) -> set[str]:
    """Names of the objects in ``file``, those before the damage where it is damaged."""
    names: set[str] = set()
    try:
        for item in _root(file, recover=True).iter("object"):
            names.add(_text(item.find("name")))
    except (OSError, ValueError, etree.XMLSyntaxError):
        pass  # reading the picture says what is wrong
    return names - {""}


def _root(file: Path, *, recover: bool = False) -> etree._Element:
    """The document's root element.

    Raises:
        OSError: the file cannot be read.
        etree.XMLSyntaxError: it is no well-formed XML.
        ValueError: it has a document type, or is no annotation.
    """
    content = read_bytes(file, limit=MAX_BYTES)
    if not content.strip():
        raise ValueError("empty file")
    parser = etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        huge_tree=False,  # libxml2 then limits depth and the length of a text
        recover=recover,
        remove_comments=True,
        remove_pis=True,
    )
    document = etree.parse(io.BytesIO(content), parser)
    root = document.getroot()
    if root is None:
        raise ValueError("no XML element in it")
    if document.docinfo.doctype:
        raise ValueError("has a document type (<!DOCTYPE ...>), which is refused; remove it")
    return root


def _picture(root: etree._Element, faults: list[str]) -> VocPicture:
    if root.tag != "annotation":
        faults.append(f"{root.sourceline}: the top element is <{_short(str(root.tag))}>, expected <annotation>")
    size = root.find("size")
    width, height = (0, 0) if size is None else _size(size, faults)
    objects = [_object(item, faults) for item in root.iter("object")]
    return VocPicture(
        file_name=_text(root.find("filename")),
        width=width,
        height=height,
        objects=tuple(item for item in objects if item is not None),
    )


def _size(size: etree._Element, faults: list[str]) -> tuple[int, int]:
    """Width and height in whole pixels; (0, 0), which many tools write where they do not know, says nothing."""
    sides = _numbers(size, ("width", "height"), faults)
    if not all(side.is_integer() for side in sides):
        faults.append(f"{size.sourceline}: <size> is {sides[0]:g} x {sides[1]:g}, expected whole numbers of pixels")
    return max(int(sides[0]), 0), max(int(sides[1]), 0)


def _object(item: etree._Element, faults: list[str]) -> VocObject | None:
    parts = _children(item)
    name = _text(parts.get("name"))
    if not name:
        faults.append(f"{item.sourceline}: an object has no <name>")
    box = parts.get("bndbox")
    if box is None:
        faults.append(f"{item.sourceline}: object {_short(name)!r} has no <bndbox>")
        return None
    x1, y1, x2, y2 = _numbers(box, ("xmin", "ymin", "xmax", "ymax"), faults)
    return VocObject(name=name, corners=(x1, y1, x2, y2), difficult=_text(parts.get("difficult")) == "1")


def _numbers(parent: etree._Element, tags: Sequence[str], faults: list[str]) -> list[float]:
    """The number in each of the children ``tags``; 0 with a fault where there is none."""
    children = _children(parent)
    values = []
    for tag in tags:
        text = _text(children.get(tag))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if abs(value) < LARGEST:
            values.append(value)
            continue
        values.append(0.0)
        if tag in children:
            faults.append(f"{children[tag].sourceline}: <{tag}> is {_short(text)!r}, expected a number")
        else:
            faults.append(f"{parent.sourceline}: <{parent.tag}> has no <{tag}>")
    return values


def _children(parent: etree._Element) -> dict[str, etree._Element]:
    """The first child of each name. One walk costs far less than a search for each name."""
    found: dict[str, etree._Element] = {}
    for child in parent:
        found.setdefault(child.tag, child)
    return found


def _text(element: etree._Element | None) -> str:
    text = None if element is None else element.text
    return " ".join(text.split()) if text else ""


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
