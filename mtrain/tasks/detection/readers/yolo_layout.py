"""Find the images and the description of a YOLO data set, including exports made on other machines."""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Split
from mtrain.data.reading import FOLDERS_OF, first_existing, lines_of
from mtrain.errors import DataError

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
    """Return ``path`` of the description if that folder exists, else ``root``: data sets move, so it often does not."""
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
    candidates = [*inside[:1], *literal] if entry.replace("\\", "/").startswith("../") else literal
    return first_existing([*candidates, *inside], what=f"images of the {split} split", key=f"data.{split}")
