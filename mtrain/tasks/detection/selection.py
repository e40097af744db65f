"""Select images of a split: drop missing ones, or divide the split into a training and an evaluation part."""

import os

from mtrain.data.reading import listed, name_some
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations


def without_missing(annotations: Annotations) -> Annotations:
    """Return the images whose file exists; a note counts the missing ones.

    Raises:
        DataError: no file exists.
    """
    available = [image for image in annotations.images if os.path.isfile(image.path)]
    if len(available) == len(annotations.images):
        return annotations
    missing = [image.file_name for image in annotations.images if not os.path.isfile(image.path)]
    if not available:
        raise DataError(
            f"data.skip_missing: none of the {name_some(missing, 'annotated images')} exists; set data.images"
        )
    note = name_some(missing, f"of {len(annotations.images)} images are missing and were skipped")
    return annotations.subset(available, notes=[*annotations.notes, note])


def need_sizes(annotations: Annotations) -> None:
    """Refuse images whose size is unknown: neither the annotation nor a file gives it.

    Raises:
        DataError: some are missing; they are named.
    """
    missing = [f"{image.path}: no such file" for image in annotations.images if not image.width]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(annotations.images)} images are missing; correct data.images, or leave them "
            "out "
            f"with data.skip_missing=true:\n{listed(missing)}"
        )


def need_bounded_images(annotations: Annotations, *, max_pixels: int) -> None:
    """Refuse images of more than ``max_pixels``, before anything is decoded.

    Raises:
        DataError: some are larger; they are listed.
    """
    large = [
        f"{image.path}: {image.width} x {image.height}"
        for image in annotations.images
        if image.width * image.height > max_pixels
    ]
    if large:
        raise DataError(
            f"{len(large)} of {len(annotations.images)} images have more pixels than data.max_pixels "
            f"({max_pixels}) allows; "
            f"make them smaller, or raise it:\n{listed(large)}"
        )
