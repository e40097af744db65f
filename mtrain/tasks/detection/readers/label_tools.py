"""Read what labelling programs save themselves: LabelMe and X-AnyLabeling, CVAT, Label Studio.

Of every shape with an area the box around it is taken. Coordinates are continuous pixels, as the programs write them, and boxes
are not clipped.
"""

import math
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
from lxml import etree

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.images.header import SUFFIXES
from mtrain.data.once_per_host import once_per_host
from mtrain.data.reading import images_in, listed, name_some, need_root, need_unique, order_names, size_of
from mtrain.data.shards import files_of
from mtrain.errors import DataError
from mtrain.spec.files import parse_json, read_bytes
from mtrain.tasks.detection.annotations import SHARED, AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.readers.voc_xml import parse_xml

MAX_BYTES = 4 << 30
"""Largest file of annotations that is read."""
_LARGEST_PX = 1e9
_UPLOADED = re.compile(r"^[0-9a-f]{8}-")
"""What Label Studio puts before the names of files that were uploaded."""
_SUFFIXES = sorted({*SUFFIXES, *map(str.upper, SUFFIXES)})
Box = tuple[str, float, float, float, float]
"""Label, left, top, right, bottom, in pixels."""


@dataclass(slots=True)
class Labelled:
    """One image as a program saved it."""

    file: Path
    """The file of annotations."""
    name: str
    """The image, as the file calls it: a name, a path of another machine, or an address."""
    size_wh: tuple[int, int] = (0, 0)
    """(0, 0): the file does not say."""
    boxes: list[Box] = field(default_factory=list)


class LabelTool(Dataset):
    """Base class of the readers: files of a split, each with one image or many."""

    kind: ClassVar[str] = "detection"
    classes_of_train: ClassVar[bool] = True
    form: ClassVar[str]
    """Name of the plugin."""
    suffixes: ClassVar[Sequence[str]] = (".json",)

    @once_per_host(SHARED)
    def read(self, request: SplitRequest) -> Annotations:
        """Read one split.

        Raises:
            DataError: files are missing or of another program, or shapes are wrong. All of these are listed.
        """
        root = need_root(request.root, self.form)
        files = files_of(
            root, request.value, split=request.split, suffixes=self.suffixes, kind=self.form, also=("annotations",)
        )
        left_out: Counter[str] = Counter()
        images: list[Labelled] = []
        problems: list[str] = []
        for file in files:
            try:
                images += self._images(file, left_out)
            except KeyError as error:
                problems.append(f"{file}: no {error} where every file of this form has it")
            except (AttributeError, TypeError, IndexError, OverflowError) as error:
                problems.append(f"{file}: of another structure ({error})")
            except (ValueError, OSError, etree.XMLSyntaxError) as error:
                problems.append(f"{file}: {getattr(error, 'strerror', None) or error}")
        if problems:
            raise DataError(f"{len(problems)} of {len(files)} files cannot be read as {self.form}:\n{listed(problems)}")
        found = sorted({box[0] for image in images for box in image.boxes})
        # An evaluation split may lack classes of the training split, whose names are then asked for.
        available = found if request.names is None else [*request.names, *sorted({*found} - {*request.names})]
        names = order_names(available, request.names, where=str(root))
        finder = _Images(root, root if request.images is None else root / request.images)
        label_of = {name: label for label, name in enumerate(names)}
        annotated = [_annotate(image, finder.find(image), root, label_of) for image in images]
        need_unique((image.image_id for image in annotated), where=str(root), what="images")
        notes = [
            f"shapes without an area (left out): {', '.join(f'{n} {kind}' for kind, n in sorted(left_out.items()))}"
        ]
        return assemble(
            annotated,
            class_names=names,
            category_ids=tuple(range(1, len(names) + 1)),
            notes=[*finder.notes, *(notes if left_out else [])],
        )

    @abstractmethod
    def _images(self, file: Path, left_out: Counter[str]) -> Iterable[Labelled]:
        """Yield the images of a file; count shapes that are no boxes in ``left_out``.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: The file is of another form.
        """


class _Images:
    """Finds images by the names that a program on another machine gave them."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self.others: list[str] = []

    @cached_property
    def _by_name(self) -> Mapping[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for path in images_in(self._folder):
            found.setdefault(path.name, []).append(path)
        return found

    def find(self, image: Labelled) -> Path:
        """Return the file of an image; where none is found, the place beside its annotations, which will be reported missing.

        Raises:
            DataError: The file of annotations does not say which of several images of one name is meant.
        """
        # Addresses and paths of Windows: only their end means something here.
        path = PureWindowsPath(unquote(image.name.rpartition("?d=")[2]))
        parts = [part for part in path.parts if part not in (path.anchor, "..", "data", "upload")]
        if not parts:
            raise DataError(f"{image.file}: an image without a name")
        name = parts[-1]
        for base in (image.file.parent, self._folder, self._root, self._root / "images"):
            for place in (base.joinpath(*parts), base / name):
                if os.path.isfile(place):
                    return place
        for known in (name, _UPLOADED.sub("", name)):
            meant = self._by_name.get(known, [])
            # Folders may have images of the same names: the annotations ``train`` are about those in a folder ``train``.
            for hint in (parts[-2:-1], [image.file.stem]):
                meant = [path for path in meant if path.parent.name in hint] or meant
            if len(meant) > 1:
                raise DataError(
                    f"{image.file}: {name} may be {meant[0]} or {meant[1]}; move the file of annotations into the folder of its "
                    "images, or rename that folder or the file so that both have one name"
                )
            if meant:
                return meant[0]
        # LabelMe keeps the image beside its file, and programs that rename both leave its name inside as it was.
        beside = next((image.file.with_suffix(s) for s in _SUFFIXES if image.file.with_suffix(s).is_file()), None)
        if beside is not None:
            self.others.append(name)
        return beside or image.file.parent / name

    @property
    def notes(self) -> list[str]:
        """Return a sentence on images that were found by the name of their annotations."""
        return (
            [name_some(self.others, "images have the name of their file of annotations, not that which it says")]
            if self.others
            else []
        )


def _annotate(image: Labelled, path: Path, root: Path, label_of: Mapping[str, int]) -> AnnotatedImage:
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
    table = np.array([box[1:] for box in image.boxes], dtype=np.float64).reshape(-1, 4)
    boxes_xywh = np.concatenate([table[:, :2], table[:, 2:] - table[:, :2]], axis=1)
    labels = [label_of[box[0]] for box in image.boxes]
    size_wh = image.size_wh if min(image.size_wh) > 0 else size_of(path)
    return replace(AnnotatedImage.of(path, name, boxes_xywh, labels, size_wh=size_wh), file_name=name)


def _around(label: object, points: Iterable[Sequence[Any]]) -> Box:
    """Return the box around points. Raises: ``ValueError`` for one that is no pair of numbers, and for an empty label."""
    if not isinstance(label, str) or not label.strip():
        raise ValueError(f"a shape with the label {label!r}; expected a text")
    xy = np.array([(float(x), float(y)) for x, y in points], dtype=np.float64).reshape(-1, 2)
    if not len(xy) or not (np.abs(xy) < _LARGEST_PX).all():
        raise ValueError(f"a shape of class {label[:60]!r} whose points are no numbers of pixels")
    (left, top), (right, bottom) = xy.min(axis=0).tolist(), xy.max(axis=0).tolist()
    return label.strip(), left, top, right, bottom


def _turn(
    left: float, top: float, width: float, height: float, degrees: float, *, about: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the corners of a rectangle that is turned clockwise ``about`` a point."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    corners = [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
    if not degrees:
        return corners
    offsets = [(x - about[0], y - about[1]) for x, y in corners]
    return [(about[0] + x * cosine - y * sine, about[1] + x * sine + y * cosine) for x, y in offsets]


def _read_json(file: Path) -> Any:
    return parse_json(read_bytes(file, limit=MAX_BYTES))


class LabelMe(LabelTool):
    """The ``labelme`` data set plugin: a JSON file per image, of LabelMe or X-AnyLabeling.

    ``train/a.json`` and ``val/b.json``, or all in one folder, which ``data.split`` divides; ``data.train`` and ``data.val`` name
    other folders. An image lies beside its file, in ``data.images``, or anywhere below ``data.root``. Classes are ``data.names``, or
    all labels of the training split in alphabetical order.
    """

    form = "labelme"

    def _images(self, file: Path, left_out: Counter[str]) -> Iterator[Labelled]:
        content = _read_json(file)
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
            raise ValueError("no list of shapes; expected a file of LabelMe")
        size = tuple(int(content.get(key) or 0) for key in ("imageWidth", "imageHeight"))
        image = Labelled(file, str(content.get("imagePath") or f"{file.stem}.jpg"), (size[0], size[1]))
        for shape in content["shapes"]:
            kind, points = shape.get("shape_type") or "polygon", shape["points"]
            if kind == "circle":
                (x, y), (rim_x, rim_y) = points
                radius = math.hypot(rim_x - x, rim_y - y)
                points = [(x - radius, y - radius), (x + radius, y + radius)]
            elif kind not in ("rectangle", "polygon", "rotation", "mask", "quadrilateral"):
                left_out[str(kind)] += 1
                continue
            image.boxes.append(_around(shape.get("label"), points))
        yield image


class Cvat(LabelTool):
    """The ``cvat`` data set plugin: XML of "CVAT for images", one file for many images.

    ``annotations.xml``, which ``data.split`` divides, or ``train.xml`` and ``val.xml``; ``data.train`` and ``data.val`` name other
    files. Images are found by their names, below ``data.images`` or ``data.root``. Classes are ``data.names``, or all labels of the
    training split in alphabetical order.
    """

    form = "cvat"
    suffixes = (".xml",)

    def _images(self, file: Path, left_out: Counter[str]) -> Iterator[Labelled]:
        root = parse_xml(file, limit=MAX_BYTES)
        if root.tag != "annotations":
            raise ValueError(f"the top element is <{str(root.tag)[:60]}>, expected <annotations>")
        if root.find("track") is not None:
            raise ValueError("tracks of a video; export them from CVAT as images: 'CVAT for images 1.1'")
        for element in root.iter("image"):
            image = Labelled(
                file, element.attrib["name"], (int(element.get("width", 0)), int(element.get("height", 0)))
            )
            for shape in element:
                points = _cvat_points(shape)
                if points is not None:
                    image.boxes.append(_around(shape.get("label"), points))
                elif shape.get("label") is not None and shape.tag != "tag":
                    left_out[str(shape.tag)] += 1
            yield image


def _cvat_points(shape: etree._Element) -> list[tuple[float, float]] | None:
    """Return points of which the box around them is that of a shape; None for a shape without an area."""

    def numbers(*names: str) -> list[float]:
        return [float(shape.attrib[name]) for name in names]

    if shape.tag == "box":
        left, top, right, bottom = numbers("xtl", "ytl", "xbr", "ybr")
        middle = ((left + right) / 2, (top + bottom) / 2)
        return _turn(left, top, right - left, bottom - top, float(shape.get("rotation", 0)), about=middle)
    if shape.tag == "polygon":
        return [(float(x), float(y)) for x, y in (pair.split(",") for pair in shape.attrib["points"].split(";"))]
    if shape.tag == "ellipse":
        x, y, across, down = numbers("cx", "cy", "rx", "ry")
        return [(x - across, y - down), (x + across, y + down)]
    if shape.tag == "mask":
        left, top, width, height = numbers("left", "top", "width", "height")
        return [(left, top), (left + width, top + height)]
    return None


class LabelStudio(LabelTool):
    """The ``label_studio`` data set plugin: the exports JSON and JSON-MIN of Label Studio, one file for many tasks.

    A JSON file, which ``data.split`` divides, or ``train.json`` and ``val.json``; ``data.train`` and ``data.val`` name other files.
    Images are found by the end of their address, with or without what an upload put before it, below ``data.images`` or ``data.root``.
    Of several annotations of a task the first that was not cancelled counts. Classes are ``data.names``, or all labels of the training
    split in alphabetical order.
    """

    form = "label_studio"

    def _images(self, file: Path, left_out: Counter[str]) -> Iterator[Labelled]:
        content = _read_json(file)
        tasks = content if isinstance(content, list) else [content]
        for task in tasks:
            values = task.get("data", task) if isinstance(task, dict) else {}
            name = next((str(values[key]) for key in ("image", "img", "image_url", "url") if values.get(key)), None)
            if name is None:
                raise ValueError("a task without an image; expected the export JSON or JSON-MIN of Label Studio")
            image = Labelled(file, name)
            for result in _results(task):
                self._add(image, result, left_out)
            yield image

    def _add(self, image: Labelled, result: Mapping[str, Any], left_out: Counter[str]) -> None:
        # In JSON the numbers are inside of ``value``, in JSON-MIN they lie beside the size of the image.
        value = result.get("value", result)
        labels = next((value[key] for key in value if key.endswith("labels") and value[key]), None)
        if labels is None:
            return
        size = (result["original_width"], result["original_height"])
        image.size_wh = (int(size[0]), int(size[1]))
        if "points" in value:
            points = [(x * size[0] / 100, y * size[1] / 100) for x, y in value["points"]]
        elif "radiusX" in value:
            x, y, across, down = (value[key] for key in ("x", "y", "radiusX", "radiusY"))
            points = [((x + side * across) * size[0] / 100, (y + side * down) * size[1] / 100) for side in (-1, 1)]
        elif {"x", "y", "width", "height"} <= set(value) and "keypointlabels" not in value:
            left, width = (value[key] * size[0] / 100 for key in ("x", "width"))
            top, height = (value[key] * size[1] / 100 for key in ("y", "height"))
            points = _turn(left, top, width, height, float(value.get("rotation") or 0), about=(left, top))
        else:
            left_out[str(result.get("type", "keypoint")).removesuffix("labels")] += 1
            return
        image.boxes += [_around(label, points) for label in labels]


def _results(task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the shapes of a task."""
    done = task.get("annotations", task.get("completions"))
    if done is not None:
        return next((each["result"] for each in done if not each.get("was_cancelled")), [])
    lists = (value for value in task.values() if isinstance(value, list))
    return [item for value in lists for item in value if isinstance(item, dict) and "original_width" in item]
