"""Check every image of a data set before training starts."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mtrain.data.images.header import probe, read_image, stored_size
from mtrain.data.reading import listed
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations, Sample


def verify_images(*splits: Annotations, workers: int = 8) -> int:
    """Check that every image file exists, is whole, and has the annotated size; return the number of images.

    Raises:
        DataError: some fail; the first 20 are named with the reason, the rest counted.

    """
    samples = list(_unique(splits))
    # Threads suffice: only headers are parsed and end markers
    # sought, so most of the time goes into waiting for the disk.
    with ThreadPoolExecutor(max_workers=workers) as pool:
        faults = [fault for fault in pool.map(_fault, samples, chunksize=64) if fault]
    if faults:
        missing = any(not os.path.exists(sample.path) for sample in samples)
        remedy = " (data.skip_missing=true leaves out those that are not there)" if missing else ""
        raise DataError(
            f"{len(faults)} of {len(samples)} images cannot be used; replace or remove them{remedy}:\n{listed(faults)}"
        )
    return len(samples)


def _unique(splits: Sequence[Annotations]) -> Iterable[Sample]:
    paths = set()
    for annotations in splits:
        for sample in annotations.samples:
            if sample.path not in paths:
                paths.add(sample.path)
                yield sample


def _fault(sample: Sample) -> str:
    try:
        width, height = probe(sample.path)
    except DataError as error:
        return str(error)
    if (width, height) == (sample.width, sample.height):
        return ""
    orientation_hint = ""
    if (height, width) == (sample.width, sample.height):
        is_turned = stored_size(read_image(sample.path)) != (width, height)
        orientation_hint = (
            " (turned by its EXIF orientation)" if is_turned else " (width and height are exchanged there)"
        )
    return (
        f"{sample.path}: {width} x {height} as displayed{orientation_hint}, the annotations say {sample.width} x "
        f"{sample.height}"
    )
