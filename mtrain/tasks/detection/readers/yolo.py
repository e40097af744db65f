"""Read annotations in YOLO form: a text file per image, with a line ``class x_centre y_centre width height`` per box,
in fractions of the image's size.

A line of a class and three or more points (a polygon) counts as the box around its points.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, Split, SplitRequest
from mtrain.data.once_per_host import once_per_host
from mtrain.data.reading import (
    FOLDERS_OF,
    first_existing,
    images_in,
    lines_of,
    listed,
    need_root,
    need_unique,
    order_names,
    size_of,
    walk,
)
from mtrain.errors import DataError
from mtrain.spec.files import read_bytes, read_text
from mtrain.spec.yaml_reader import MAX_BYTES, parse
from mtrain.tasks.detection.annotations import SHARED, AnnotatedImage, Annotations, assemble

MAX_LABEL_BYTES = 64 << 20
"""Largest label file of one image that is read, in bytes."""
_LARGEST = 2.0
"""Values beyond this are refused: they are not rounding errors of a fraction but pixels."""


DESCRIPTION = "data.yaml"
CLASS_LISTS = ("classes.txt", "labels/classes.txt", "obj.names", "labels.txt")
"""Text files with one class name per line, as labelling tools write them."""
_DRIVE = re.compile(r"^[A-Za-z]:")


def description_file(root: Path, name: str) -> Path:
    """Return the YAML file ``name`` in ``root``; for the default name also the only YAML file there."""
    file = root / name
    if os.path.isfile(file) or name != DESCRIPTION:
        return file
    others = sorted(path for path in root.iterdir() if path.suffix.lower() in (".yaml", ".yml") and path.is_file())
    return others[0] if len(others) == 1 else file


def listed_names(root: Path) -> list[str] | None:
    """Return the class names from a text file of the data set or of its training split; None if there is none."""
    places = [root, *(root / word for word in FOLDERS_OF["train"])]
    files = (place / name for place in places for name in CLASS_LISTS)
    return next((lines_of(file) for file in files if file.is_file()), None)


def no_names(root: Path, file: Path) -> str:
    """Return the error message for a data set that names its classes nowhere."""
    where = f"{file} has no names" if file.is_file() else f"there is neither {DESCRIPTION} nor classes.txt in {root}"
    with os.scandir(root) as entries:
        suffixes = {Path(entry.name).suffix.lower() for entry in itertools.islice(entries, 1000)}
    other = {".xml": "voc", ".json": "coco"}
    format_hints = [
        f"; it holds {suffix} files: is it data.format {other[suffix]}?" for suffix in sorted(suffixes & set(other))
    ]
    return f"data.names: not given, and {where}{''.join(format_hints[:1])}; list the class names in label order"


def places_of(
    root: Path, value: str | None, images: str | None, description: Mapping[str, Any], split: Split
) -> list[Path]:
    """Return the folders and list files with the images of ``split``; ``value`` is ``data.<split>``, ``images`` is
    ``data.images``.

    Raises:
        DataError: one of them does not exist, or no source names the images' place.
    """
    base = _base(root, description)
    if value is not None:
        return [_existing(value, base, root, split)]
    split_names = FOLDERS_OF[split] if split != "all" else ("train",)
    described_places = next(
        (description[split_name] for split_name in split_names if description.get(split_name)), None
    )
    if described_places is not None and not isinstance(described_places, str | list):
        raise DataError(
            f"{split} of the YAML file: given {described_places!r}, expected a folder, a list file, or a list of these"
        )
    if described_places is not None and (split != "all" or not (root / "images").is_dir()):
        entries = (
            [described_places] if isinstance(described_places, str) else [str(entry) for entry in described_places]
        )
        return [_existing(entry, base, root, split) for entry in entries]
    if images is not None:
        return [_existing(images, base, root, split)]
    if split == "all":
        return [root / "images" if (root / "images").is_dir() else root]
    candidates = [
        root / pattern.format(split_name)
        for pattern in ("images/{}", "{}/images", "{}", "{}.txt")
        for split_name in split_names
    ]
    hint = ", or a share of all images with data.split (0.2)"
    return [first_existing(candidates, what=f"images of the {split} split", key=f"data.{split}", remedy=hint)]


def _base(root: Path, description: Mapping[str, Any]) -> Path:
    """Return ``path`` of the description if that folder exists, else ``root``."""
    # Data sets move, and ``path`` stays behind: a folder that is not there is no error.
    base = root / str(description.get("path") or ".").replace("\\", "/")
    return base if os.path.isdir(base) else root


def _existing(entry: str, base: Path, root: Path, split: Split) -> Path:
    """Find the folder or file that ``entry`` means on this machine.

    An export keeps the path of the machine on which it was made: ``../train/images`` or
    ``C:\\sets\\cells\\train\\images``. The end of such a path is looked up inside the data set.
    """
    plain = _DRIVE.sub("", entry.replace("\\", "/"))
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    inside = [root.joinpath(*parts[start:]) for start in range(max(len(parts) - 1, 1))]
    literal = [base / entry, root / entry]
    # Roboflow writes ``../train/images`` for a folder inside the data set, so that comes before the literal meaning.
    candidates = [*inside[:1], *literal] if entry.replace("\\", "/").startswith("../") else literal
    return first_existing([*candidates, *inside], what=f"images of the {split} split", key=f"data.{split}")


class Yolo(Dataset):
    """The ``yolo`` data set plugin.

    ``data.yaml`` gives ``names`` (list or mapping), optional ``nc``, ``path``, and ``train``, ``val``: image
    folders, text files that list images, or lists of these; ``data.train`` and ``data.val`` of the spec override it.
    Without it: ``images/train`` or ``train/images``, and names from ``data.names`` or ``classes.txt``. The label file
    of ``.../images/a/b.jpg`` is ``.../labels/a/b.txt``, or lies beside the image where no folder is called
    ``images``.
    """

    kind: ClassVar[str] = "detection"

    class Options(PluginOptions):
        """Location of the description file."""

        description: str = Field(default=DESCRIPTION, description="YAML file with names, train and val, from data.root")

    options: Options

    @once_per_host(SHARED)
    def read(self, request: SplitRequest) -> Annotations:
        """Read one split. Images without a label file have no boxes; a note counts label files without an image.

        Raises:
            DataError: files are missing, label lines are malformed, classes are out of range, or names disagree.
                All mistakes are listed with file and line.

        """
        root = need_root(request.root, "yolo")
        file = description_file(root, self.options.description)
        description = _load_yaml(file) if os.path.exists(file) else {}
        if description.get("names") is None and request.names is None:
            description = {**description, "names": listed_names(root)}
        class_names = _names(description, request.names, file=file)
        places = places_of(root, request.value, request.images, description, request.split)
        paths = sorted({path for place in places for path in _images(place)})
        if not paths:
            raise DataError(
                f"data.{request.split}: no images in {', '.join(map(str, places))}; expected folders of images"
            )
        return assemble(
            _read_all(paths, places, class_count=len(class_names)),
            class_names=class_names,
            category_ids=tuple(range(len(class_names))),
            notes=_notes(paths, places),
        )


def _load_yaml(file: Path) -> Mapping[str, Any]:
    try:
        parsed = parse(read_text(file, limit=MAX_BYTES), name=str(file))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    if parsed.problems:
        raise DataError(f"{file}: cannot be read:\n{listed(parsed.problems)}")
    if not parsed.values:
        raise DataError(f"{file}: expected keys such as names, train and val")
    return parsed.values


def _names(description: Mapping[str, Any], requested: Sequence[str] | None, *, file: Path) -> tuple[str, ...]:
    described = description.get("names")
    if isinstance(described, dict):
        if set(described) != {str(number) for number in range(len(described))}:
            keys = ", ".join(sorted(described)[:20])
            raise DataError(f"{file}: names has the keys {keys}; expected 0 to {len(described) - 1}, each once")
        described = [described[str(number)] for number in range(len(described))]
    if described is None:
        if requested is None:
            raise DataError(no_names(file.parent, file))
        described = list(requested)
    if not isinstance(described, list) or not all(isinstance(name, str | int | float) for name in described):
        raise DataError(f"{file}: names: given {str(described)[:100]!r}, expected a list of class names")
    names = [str(name) for name in described]
    if description.get("nc", len(names)) != len(names):
        raise DataError(f"{file}: nc is {description['nc']}, but {len(names)} names are given; correct one of them")
    if requested is not None and list(requested) != names:
        order_names(names, requested, where=str(file))
        raise DataError(
            f"data.names: {', '.join(requested)}; label files count by {file}: {', '.join(names)}; leave data.names out"
        )
    return tuple(names)


def _images(place: Path) -> list[Path]:
    if place.is_dir():
        return images_in(place)
    return [place.parent / line.replace("\\", "/") for line in lines_of(place)]


def label_file(image: Path) -> Path:
    """Return the file that holds the boxes of an image."""
    parts = image.parts
    # From the end: a folder above the data set may be called images too.
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            return Path(*parts[:i], "labels", *parts[i + 1 :]).with_suffix(".txt")
    return image.with_suffix(".txt")


_NOT_LABELS = ("classes.txt", "train.txt", "val.txt", "test.txt")


def _notes(paths: Sequence[Path], places: Sequence[Path]) -> list[str]:
    labels = {label_file(path) for path in paths}
    unlabelled = sorted(path.name for path in paths if not os.path.isfile(label_file(path)))
    label_folders = {label_file(place / "x.jpg").parent for place in places if place.is_dir()}
    orphans = sorted(
        path.name
        for place in label_folders
        for path in walk(place)
        if path.suffix == ".txt" and path not in labels and path.name not in _NOT_LABELS
    )
    return [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for names, what in (
            (unlabelled, "images without a label file (taken as empty)"),
            (orphans, "label files without an image"),
        )
        if names
    ]


def _read_all(paths: Sequence[Path], places: Sequence[Path], *, class_count: int) -> list[AnnotatedImage]:
    problems: list[str] = []
    images: list[AnnotatedImage] = []
    ids = [_image_id(path, places) for path in paths]
    need_unique(ids, where=", ".join(map(str, places)), what="image names without suffix (they share a label file)")
    for path, image_id in zip(paths, ids, strict=True):
        rows = _read_labels(label_file(path), class_count, problems)
        try:
            images.append(_image(path, image_id, rows))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError(
            f"{len(problems)} wrong label lines or images; correct or remove them (data.names names all classes; data.classes "
            f"chooses some):\n{listed(problems)}"
        )
    return images


def _image_id(path: Path, places: Sequence[Path]) -> str:
    for place in places:
        if path.is_relative_to(place):
            return path.relative_to(place).with_suffix("").as_posix()
    return path.with_suffix("").as_posix()


def _read_labels(file: Path, class_count: int, problems: list[str]) -> list[tuple[float, ...]]:
    """Return (class, x centre, y centre, width, height) of every line; mistakes are added to ``problems``."""
    if not os.path.isfile(file):
        return []
    try:
        # Bytes that are no text become a line that is no box, which is reported with its number.
        text = read_bytes(file, limit=MAX_LABEL_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return []
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse(line.split(), class_count))
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
    return rows


def _parse(fields: Sequence[str], class_count: int) -> tuple[float, ...]:
    try:
        values = [float(field) for field in fields]
    except ValueError:
        values = []
    # A class and at least three points: two numbers each.
    polygon = len(values) >= 7 and len(values) % 2 == 1
    if len(values) != 5 and not polygon:
        line_start = " ".join(fields[:8])[:60]
        raise ValueError(f"{line_start!r}{', ...' if len(fields) > 8 else ''}; expected a class and 4 numbers")
    label, numbers = values[0], values[1:]
    if not label.is_integer() or not 0 <= label < class_count:
        raise ValueError(f"class {fields[0][:20]}; there are {class_count} names: expected 0 to {class_count - 1}")
    if not all(abs(value) <= _LARGEST for value in numbers):
        raise ValueError(f"{' '.join(fields[1:5])[:100]} is not normalised; divide by the image's width and height")
    if polygon:
        x, y = numbers[0::2], numbers[1::2]
        return label, (min(x) + max(x)) / 2, (min(y) + max(y)) / 2, max(x) - min(x), max(y) - min(y)
    return label, *numbers


def _image(path: Path, image_id: str, rows: Sequence[tuple[float, ...]]) -> AnnotatedImage:
    width, height = size_of(path)
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    scaled = table[:, 1:] * np.array([width, height, width, height], dtype=np.float64)
    size = scaled[:, 2:]
    boxes_xywh = np.concatenate([scaled[:, :2] - size / 2, size], axis=1)
    return AnnotatedImage.of(path, image_id, boxes_xywh, table[:, 0], size_wh=(width, height))
