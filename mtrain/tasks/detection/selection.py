"""Select pictures of a split: drop missing ones, or divide the split into a training and an evaluation part."""

import hashlib
import os
from collections.abc import Sequence

from mtrain.data.reading import listed, named
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations, Picture, assemble


def without_missing(annotations: Annotations) -> Annotations:
    """Return the pictures whose file exists; a note counts the missing ones.

    Raises:
        DataError: no file exists.
    """
    available = [picture for picture in annotations.pictures if os.path.isfile(picture.path)]
    if len(available) == len(annotations.pictures):
        return annotations
    missing = [picture.file_name for picture in annotations.pictures if not os.path.isfile(picture.path)]
    if not available:
        raise DataError(
            f"data.skip_missing: none of the {named(missing, 'annotated pictures')} exists; set data.images"
        )
    note = named(missing, f"of {len(annotations.pictures)} pictures are missing and were skipped")
    return _subset(annotations, available, notes=[*annotations.notes, note])


def need_sizes(annotations: Annotations) -> None:
    """Refuse pictures whose size is unknown: neither the annotation nor a file gives it.

    Raises:
        DataError: some are missing; they are named.
    """
    missing = [f"{picture.path}: no such file" for picture in annotations.pictures if not picture.width]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(annotations.pictures)} pictures are missing; correct data.images, or leave them "
            "out "
            f"with data.skip_missing=true:\n{listed(missing)}"
        )


def need_bounded_pictures(annotations: Annotations, *, max_pixels: int) -> None:
    """Refuse pictures of more than ``max_pixels``, before anything is decoded.

    Raises:
        DataError: some are larger; they are listed.
    """
    large = [
        f"{picture.path}: {picture.width} x {picture.height}"
        for picture in annotations.pictures
        if picture.width * picture.height > max_pixels
    ]
    if large:
        raise DataError(
            f"{len(large)} of {len(annotations.pictures)} pictures have more pixels than data.max_pixels "
            f"({max_pixels}) allows; "
            f"make them smaller, or raise it:\n{listed(large)}"
        )


def divided(annotations: Annotations, share: float, *, seed: int) -> tuple[Annotations, Annotations]:
    """Divide a split into a training part and an evaluation part with ``share`` of the pictures, at least one in each.

    A hash of ``seed`` and its name decides a picture's part, so it is the same on every host and for any order of
    listing, and most pictures keep their part when others are added.

    Raises:
        DataError: there are fewer than two pictures.
    """
    pictures = annotations.pictures
    if len(pictures) < 2:
        raise DataError(f"data.split: {len(pictures)} pictures cannot be divided; give at least two, or leave it out")
    ranked = sorted(pictures, key=lambda picture: _rank(picture, seed))
    count = min(max(round(share * len(pictures)), 1), len(pictures) - 1)
    notes = annotations.notes
    return _subset(annotations, ranked[count:], notes=notes), _subset(annotations, ranked[:count], notes=())


def _rank(picture: Picture, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{picture.file_name}\0{picture.image_id}".encode()).digest()


def _subset(annotations: Annotations, pictures: Sequence[Picture], *, notes: Sequence[str]) -> Annotations:
    return assemble(pictures, class_names=annotations.class_names, category_ids=annotations.category_ids, notes=notes)
