"""Read one annotation file of Pascal VOC safely: it is XML from an unknown source."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lxml import etree

from mtrain.spec.files import read_bytes

MAX_BYTES = 64 << 20
"""Largest annotation file that is read, in bytes: about 300,000 objects."""
LARGEST = 1e9
"""Coordinates of this size or more are refused as wrong, in pixels."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class VocObject:
    """The content of one ``<object>``."""

    name: str
    corners: tuple[float, float, float, float]
    """xmin, ymin, xmax, ymax in pixels, as written."""
    difficult: bool


@dataclass(frozen=True, slots=True)
class VocImage:
    """The content of one annotation file."""

    file_name: str
    """Text of ``<filename>``; empty if there is none. Tools that convert data sets often leave a wrong name."""
    width: int
    """Width in pixels; 0 if ``<size>`` is missing or empty."""
    height: int
    objects: tuple[VocObject, ...]


def read_voc_xml(file: Path, faults: list[str]) -> VocImage | None:
    """Read ``file``. On errors return None and add them to ``faults`` as ``file:line: message``."""
    file_faults: list[str] = []
    image = None
    try:
        image = _image(parse_xml(file), file_faults)
    except OSError as error:
        file_faults.append(f" {error.strerror}")
    except etree.XMLSyntaxError as error:
        file_faults.append(f"{error.lineno or 1}: {_short(error.msg)}")
    except ValueError as error:
        file_faults.append(f" {error}")
    faults.extend(f"{file}:{fault}" for fault in file_faults)
    return None if file_faults else image


def voc_class_names(file: Path) -> set[str]:
    """Return the names of the objects in ``file``; in a damaged file, those before the damage."""
    names: set[str] = set()
    try:
        for item in parse_xml(file, recover=True).iter("object"):
            names.add(_text(item.find("name")))
    except (OSError, ValueError, etree.XMLSyntaxError):
        pass  # reading the image reports the error
    return names - {""}


def parse_xml(file: Path, *, recover: bool = False, limit: int = MAX_BYTES) -> etree._Element:
    """Return the document's root element.

    Raises:
        OSError: the file cannot be read.
        etree.XMLSyntaxError: it is not well-formed XML.
        ValueError: it is empty or has a document type.
    """
    content = read_bytes(file, limit=limit)
    if not content.strip():
        raise ValueError("empty file")
    # Entities are never resolved and nothing is loaded over the network. Together with the refusal of a document
    # type below, in which entity bombs ("billion laughs") are written, the time grows linearly with the file.
    parser = etree.XMLParser(
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        huge_tree=False,  # keep libxml2's limits on depth and text length
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


def _image(root: etree._Element, faults: list[str]) -> VocImage:
    if root.tag != "annotation":
        faults.append(f"{root.sourceline}: the top element is <{_short(str(root.tag))}>, expected <annotation>")
    size = root.find("size")
    width, height = (0, 0) if size is None else _size(size, faults)
    objects = [_object(item, faults) for item in root.iter("object")]
    return VocImage(
        file_name=_text(root.find("filename")),
        width=width,
        height=height,
        objects=tuple(item for item in objects if item is not None),
    )


def _size(size: etree._Element, faults: list[str]) -> tuple[int, int]:
    """Return width and height in whole pixels; (0, 0), which many tools write for an unknown size, means unknown."""
    sides = _numbers(size, ("width", "height"), faults)
    if not all(side.is_integer() for side in sides):
        faults.append(f"{size.sourceline}: <size> is {sides[0]:g} x {sides[1]:g}, expected whole numbers of pixels")
    # Many tools write 0 x 0 for an unknown size.
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
    """Return the number in each of the children ``tags``; 0 and a fault if there is none."""
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
    """Return the first child of each name."""
    # One pass costs far less than a search for each name.
    children: dict[str, etree._Element] = {}
    for child in parent:
        children.setdefault(child.tag, child)
    return children


def _text(element: etree._Element | None) -> str:
    text = None if element is None else element.text
    return " ".join(text.split()) if text else ""


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
