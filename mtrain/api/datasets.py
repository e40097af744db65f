"""Data sets: checked, converted to another format, and the embedded one made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.core.interfaces import Remark, Table
from mtrain.spec.request import SpecRequest
from mtrain.tasks.datasets import open_data

if TYPE_CHECKING:
    from mtrain.tasks.detection.convert import Format, Placing

__all__ = ["ConvertDataRequest", "Converted", "Remark", "Table", "check", "convert", "make_digits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertDataRequest:
    """A request to write a data set in another format."""

    spec: SpecRequest
    """The spec whose data are read."""
    folder: Path
    form: "Format"
    """Format to write."""
    images: "Placing" = "link"


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A data set that was written."""

    images: Mapping[str, int]
    """Number of images by split."""
    labels: int
    notes: tuple[str, ...] = ()
    """What the format cannot hold, in sentences."""


def check(request: SpecRequest, *, images: int, out: Path) -> Iterator[Table | Remark]:
    """Yield counts, histograms and what is wrong with a data set; then save images with their labels, also augmented.

    Args:
        request: the spec whose data are read.
        images: number of images in each grid.
        out: folder of the grids.

    Raises:
        UsageError: the spec is wrong, or the data cannot be read.
    """
    from mtrain.data.images.drawing import save_image
    from mtrain.rank.assembly import open_data_of

    loaded = request.read(request.config)
    opened = open_data_of(loaded.job)
    verified = opened.verify()
    yield Remark(text=f"{loaded.source}: data.format {loaded.spec.data.format}, {verified}")
    yield from opened.describe()
    for name, view_name, image in opened.views(limit=images):
        file = out / f"data_check_{loaded.name}_{name}.jpg"
        save_image(image, file)
        yield Remark(text=f"{view_name}: {file}")


def convert(request: ConvertDataRequest, *, tell: Callable[[str], None]) -> Converted:
    """Write a data set in another format, its images linked or copied; ``tell`` receives the notes on its spec.

    Raises:
        UsageError: the spec is wrong, or the data cannot be read, have no boxes, or cannot be written.
    """
    from mtrain.tasks.detection.convert import check_kind
    from mtrain.tasks.detection.convert import convert as write

    loaded = request.spec.read(request.spec.config)
    for note in loaded.notes:
        tell(note)
    opened = open_data(loaded.spec.data, registry=loaded.registry)
    check_kind(opened.kind, loaded.spec.data.format)
    names = ("train", "val") if loaded.spec.evaluate.enabled else ("train",)
    splits = dict(zip(names, opened.both() if len(names) == 2 else [opened.train], strict=True))
    notes = tuple(write(splits, request.folder, request.form, images=request.images))
    labels = sum(len(image.labels) for split in splits.values() for image in split.images)
    return Converted(images={name: len(split) for name, split in splits.items()}, labels=labels, notes=notes)


def make_digits(folder: Path, *, train: int, val: int, size: int, seed: int, suffix: str) -> None:
    """Write handwritten digits on canvases, in COCO form.

    Args:
        folder: where they are written.
        train: number of canvases to train on.
        val: number of canvases to evaluate on.
        size: their side in pixels.
        seed: seed of the layout.
        suffix: ``jpg`` or ``png``.
    """
    from mtrain.tasks.detection.readers import digits

    options = digits.DigitsOptions(train=train, val=val, size=size, seed=seed, suffix=suffix)  # type: ignore[arg-type]
    digits.make_digits(folder, options)
