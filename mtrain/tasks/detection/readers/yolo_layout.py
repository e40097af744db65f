"""Where the pictures and the description of a YOLO data set lie, also as exports from other machines write it."""

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.data.reading import FOLDERS_OF, Split, first_existing, lines_of
from mtrain.errors import DataError

DESCRIPTION = "data.yaml"
CLASS_LISTS = ("classes.txt", "labels/classes.txt", "obj.names", "labels.txt")
"""Text files with one class name a line, as labelling tools write them."""
_DRIVE = re.compile(r"^[A-Za-z]:")


def description_file(root: Path, name: str) -> Path:
    """The YAML file ``name`` in ``root``; for the usual name also the only YAML file there."""
    file = root / name
    if os.path.isfile(file) or name != DESCRIPTION:
        return file
    others = sorted(path for path in root.iterdir() if path.suffix.lower() in (".yaml", ".yml") and path.is_file())
    return others[0] if len(others) == 1 else file


def listed_names(root: Path) -> list[str] | None:
    """Class names from a text file of the data set, or of its training split; None where there is none."""
    places = [root, *(root / word for word in FOLDERS_OF["train"])]
    found = (place / name for place in places for name in CLASS_LISTS)
    return next((lines_of(file) for file in found if file.is_file()), None)


def no_names(root: Path, file: Path) -> str:
    """The message for a data set that says its classes nowhere."""
    where = f"{file} has no names" if file.is_file() else f"there is neither {DESCRIPTION} nor classes.txt in {root}"
    with os.scandir(root) as entries:
        suffixes = {Path(entry.name).suffix.lower() for entry in itertools.islice(entries, 1000)}
    other = {".xml": "voc", ".json": "coco"}
    looks = [
        f"; it holds {suffix} files: is it data.format {other[suffix]}?" for suffix in sorted(suffixes & set(other))
    ]
    return f"data.names: not given, and {where}{''.join(looks[:1])}; list the class names in label order"


def places_of(
    root: Path, value: str | None, images: str | None, description: Mapping[str, Any], split: Split
) -> list[Path]:
    """Folders and lists that hold the pictures of ``split``; ``value`` is ``data.<split>``, ``images`` is ``data.images``.

    Raises:
        DataError: one of them does not exist, or nothing says where the pictures are.
    """
    base = _base(root, description)
    if value is not None:
        return [_existing(value, base, root, split)]
    words = FOLDERS_OF[split] if split != "all" else ("train",)
    described = next((description[word] for word in words if description.get(word)), None)
    if described is not None and not isinstance(described, str | list):
        raise DataError(
            f"{split} of the YAML file: given {described!r}, expected a folder, a list file, or a list of these"
        )
    if described is not None and (split != "all" or not (root / "images").is_dir()):
        entries = [described] if isinstance(described, str) else [str(entry) for entry in described]
        return [_existing(entry, base, root, split) for entry in entries]
    if images is not None:
        return [_existing(images, base, root, split)]
    if split == "all":
        return [root / "images" if (root / "images").is_dir() else root]
    candidates = [
        root / pattern.format(word) for pattern in ("images/{}", "{}/images", "{}", "{}.txt") for word in words
    ]
    hint = ", or a share of all pictures with data.split (0.2)"
    return [first_existing(candidates, what=f"pictures of the {split} split", key=f"data.{split}", remedy=hint)]


def _base(root: Path, description: Mapping[str, Any]) -> Path:
    """``path`` of the description, where that is a folder; data sets move, so it often is not."""
    base = root / str(description.get("path") or ".").replace("\\", "/")
    return base if os.path.isdir(base) else root


def _existing(entry: str, base: Path, root: Path, split: Split) -> Path:
    """The folder or file that ``entry`` means here.

    An export keeps the path of the machine it was made on: ``../train/images``, ``C:\\sets\\cells\\train\\images``. What
    lies inside the data set under the end of such a path is meant.
    """
    plain = _DRIVE.sub("", entry.replace("\\", "/"))
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    inside = [root.joinpath(*parts[start:]) for start in range(max(len(parts) - 1, 1))]
    literal = [base / entry, root / entry]
    candidates = [*inside[:1], *literal] if entry.replace("\\", "/").startswith("../") else literal
    return first_existing([*candidates, *inside], what=f"pictures of the {split} split", key=f"data.{split}")
