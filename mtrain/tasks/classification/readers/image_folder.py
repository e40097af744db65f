"""Read images that lie in one folder per class: ``<class>/x.jpg``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from mtrain.core.interfaces import Dataset, Split, SplitRequest
from mtrain.data.images.header import SUFFIXES
from mtrain.data.reading import FOLDERS_OF, leads_around, listed, name_some, need_root, some_classes, walk
from mtrain.data.texts import Texts
from mtrain.errors import DataError
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages


class ImageFolder(Dataset):
    """The ``image_folder`` data set plugin.

    ``train/<class>/x.jpg`` and ``val/<class>/x.jpg`` (or ``valid``, ``validation``), or ``<class>/x.jpg`` alone, which
    ``data.split`` divides; ``data.train`` and ``data.val`` name other folders. Images may lie in subfolders of their
    class. Classes are the folders of the training split in alphabetical order, or ``data.names``.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True

    def read(self, request: SplitRequest) -> LabelledImages:
        """Read one split. Only the names of files are read.

        Raises:
            DataError: there are no folders of classes, one of them has no image, or they disagree with ``names``.
        """
        if request.images is not None:
            raise DataError("data.images: given, but image_folder finds images in the folders of classes; leave it out")
        root = need_root(request.root, "image_folder")
        folder = _split_folder(root, request.value, request.split)
        classes = _class_folders(folder, request.split)
        class_names = (
            tuple(sorted(classes))
            if request.names is None
            else _agreeing(request.names, classes, folder, request.split)
        )
        numbers = {name: number for number, name in enumerate(class_names)}
        paths, labels, others = _images(folder, classes, numbers, request.split)
        strays = [file.name for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES and file.is_file()]
        notes = [f"{name_some(others, 'files whose suffix is not that of an image were left out')}"] if others else []
        notes += [f"{name_some(strays, 'images outside the folders of classes were left out')}"] if strays else []
        origins = Texts.of(str(path) for path in paths)
        return LabelledImages(
            images=EncodedImages(origins),
            labels=np.array(labels, dtype=np.int64),
            class_names=class_names,
            origins=origins,
            keys=Texts.of(
                # Relative to the root, because hosts may keep the set in
                # different places, and ``data.split`` hashes these keys.
                path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
                for path in paths
            ),
            notes=notes,
        )


def _split_folder(root: Path, value: str | None, split: Split) -> Path:
    """Return the folder whose subfolders are the classes of a split."""
    key = f"data.{'train' if split == 'all' else split}"
    if value is not None:
        folder = root / value
        if not folder.is_dir():
            raise DataError(
                f"{key}: {folder} is no folder; give the folder, from data.root, that has a folder per class"
            )
        return folder
    usual = {name: [root / word for word in FOLDERS_OF[name] if (root / word).is_dir()] for name in ("train", "val")}
    if split == "all":
        if usual["val"]:
            raise DataError(
                f"data.split: {root} has an evaluation split of its own ({usual['val'][0].name}/); leave out data.split, or "
                "name the folder to divide with data.train"
            )
        return usual["train"][0] if usual["train"] else root
    found = usual.get(split) or [root / word for word in FOLDERS_OF[split] if (root / word).is_dir()]
    if not found:
        raise DataError(
            f"{key}: no folder {' or '.join(FOLDERS_OF[split])} in {root}; expected {split}/<class>/x.jpg, or data.split=0.2 "
            f"to divide <class>/x.jpg; set data.root or {key}"
        )
    return found[0]


def _class_folders(folder: Path, split: Split) -> dict[str, Path]:
    folders = {
        entry.name: entry
        for entry in folder.iterdir()
        # macOS adds ``__MACOSX`` to archives. A link back to a folder above would be a class that holds all others.
        if not entry.name.startswith((".", "__MACOSX")) and os.path.isdir(entry) and not leads_around(entry, folder)
    }
    if not folders:
        raise DataError(
            f"data.{'train' if split == 'all' else split}: {folder} has no folders; expected one folder of images per "
            "class, named like the class"
        )
    return folders


def _agreeing(names: Sequence[str], classes: dict[str, Path], folder: Path, split: Split) -> tuple[str, ...]:
    unknown = sorted(set(classes) - set(names))
    # An evaluation split may lack classes; one that lacks in training could never be learnt.
    missing = [name for name in names if name not in classes] if split != "val" else []
    if not unknown and not missing and len(set(names)) == len(names):
        return tuple(names)
    parts = [f"{folder}: its {len(classes)} folders are not the {len(names)} classes of data.names or of data.train"]
    parts += [f"  no such class: the folder {name!r}" for name in unknown[:20]]
    parts += [f"  no folder: the class {name!r}" for name in missing[:20]]
    parts.append("  rename or remove the folders, or correct data.names, which names each class once")
    if not missing and len(set(names)) == len(names):
        parts.append(f"  {some_classes(names)}")
    raise DataError("\n".join(parts))


def _images(
    folder: Path, classes: dict[str, Path], numbers: dict[str, int], split: Split
) -> tuple[list[Path], list[int], list[str]]:
    """Return the images, their labels, and the names of files that are no images by their suffix."""
    paths: list[Path] = []
    labels: list[int] = []
    others: list[str] = []
    empty: list[str] = []
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        files = walk(classes[name]) if name in classes else []
        images = [file for file in files if file.suffix.lower() in SUFFIXES]
        others += [f"{name}/{file.name}" for file in files if file.suffix.lower() not in SUFFIXES]
        if not images and name in classes:
            held = f", only {files[0].name}" if files else ""
            empty.append(f"{classes[name]}: no image{held}")
        paths += images
        labels += [number] * len(images)
    if empty and split != "val":
        raise DataError(
            f"{folder}: {len(empty)} folders of classes hold no image ({' '.join(sorted(SUFFIXES))}); fill or remove "
            f"them:\n{listed(empty)}"
        )
    return paths, labels, others
