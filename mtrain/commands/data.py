"""``mtrain data``: inspect a data set before training on it, convert it, or make the embedded one."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.helping import CommandGroup
from mtrain.commands.options import JobCommand, spec_options, spec_request, take_request
from mtrain.spec import remedies, terminal
from mtrain.spec.request import SpecRequest

if TYPE_CHECKING:
    from rich.console import Console

    from mtrain.core.interfaces import Remark, Table
    from mtrain.tasks.detection.convert import Format, Placing


VISION = ("cv2", "PIL", "simplejpeg", "lxml", "msgspec", "sklearn")
"""Modules with which data sets of images are read, made and written."""


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


@click.group(cls=CommandGroup)
def data() -> None:
    """Check or convert a data set, or make the embedded one."""


@data.command(
    cls=JobCommand, examples=(("mtrain data check yolov5n_bccd", "counts, mistakes, and images with their labels"),)
)
@click.argument("spec", required=False)
@spec_options
@click.option("--images", "-n", default=16, show_default=True, type=click.IntRange(min=1), help="Images in the grid.")
@click.option(
    "--out", "--output", "out", type=click.Path(file_okay=False, path_type=Path), default=Path("."),
    help="Folder of the image grids.",
)  # fmt: skip
def check(*, spec: str | None, images: int, out: Path, **params: Any) -> None:
    """Print counts, histograms and what is wrong with the data set of SPEC, and save images with their labels, also augmented."""
    _need_vision()
    from rich.console import Console

    if spec is not None and params["config"] is not None:
        raise click.UsageError(f"{spec} and -c {params['config']} are both given; keep one")
    request = spec_request({**params, "config": spec or params["config"]})
    console = Console(soft_wrap=True)
    for part in check_data(request, images=images, out=out):
        print_part(console, part)


def print_part(console: "Console", part: "Table | Remark") -> None:
    """Print a table, or a remark in the colour that says whether it is good."""
    from rich import table as rich_table

    from mtrain.core.interfaces import Remark

    if isinstance(part, Remark):
        colours = {True: "green", False: "yellow", None: None}
        console.print(terminal.printable(part.text), style=colours[part.good], markup=False)
        return
    table = rich_table.Table(*map(_cell, part.columns))
    for row in part.rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*map(_cell, row))
    console.print(table)


def _cell(text: str) -> str:
    """Return what a file of data says, without what a terminal obeys, and without brackets that are markup."""
    from rich.markup import escape

    return escape(terminal.one_line(text))


@data.command(
    cls=JobCommand,
    examples=(("mtrain data convert out/ --to yolo -c spec.yml", "the data set of a spec as YOLO files"),),
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(["coco", "voc", "yolo"]), help="Format to write.")
@click.option("--format", "given", metavar="FORMAT", help="Format to read: data.format.")
@click.option("--root", metavar="FOLDER", help="Data set to read: data.root.")
@click.option(
    "--images", type=click.Choice(["link", "copy"]), default="link", show_default=True, help="Hard links, or copies."
)
@spec_options
def convert(folder: Path, **params: Any) -> None:
    """Write a data set to FOLDER in another format, its images linked or copied.

    For example: mtrain data convert cells-yolo --to yolo --format voc --root cells
    """
    _need_vision()
    typed = {"data.format": params.pop("given"), "data.root": params.pop("root")}
    params["overrides"] += tuple(f"{path}={value}" for path, value in typed.items() if value is not None)
    request = take_request(ConvertDataRequest, params, folder=folder)
    result = convert_data(request, tell=terminal.say)
    for note in result.notes:
        terminal.say(f"note: {note}")
    counts = ", ".join(f"{count} {name}" for name, count in result.images.items())
    terminal.say(f"{counts} images with {result.labels} labels: {folder}")
    terminal.say(f"use them with: -o data.format={request.form} data.root={folder}")


def _need_vision() -> None:
    remedies.require(VISION, what="mtrain data", extra="vision")


@data.group()
def make() -> None:
    """Make a data set."""


@make.command(examples=(("mtrain data make digits digits/", "handwritten digits as a data set"),))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--train", default=400, show_default=True, type=click.IntRange(min=1), help="Canvases to train on.")
@click.option("--val", default=100, show_default=True, type=click.IntRange(min=1), help="Canvases to evaluate on.")
@click.option("--size", default=320, show_default=True, type=click.IntRange(64, 4096), help="Side in pixels.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the layout.")
@click.option("--png", is_flag=True, help="Write PNG instead of JPEG.")
def digits(directory: Path, *, train: int, val: int, size: int, seed: int, png: bool) -> None:
    """Write handwritten digits on canvases to DIRECTORY, in COCO form."""
    _need_vision()
    from mtrain.tasks.detection.readers import digits as reader

    options = reader.DigitsOptions(train=train, val=val, size=size, seed=seed, suffix="png" if png else "jpg")
    reader.make_digits(directory, options)
    terminal.say(f"{train} train and {val} val canvases of {size} x {size} px: {directory}")
    terminal.say(f"use them with: -o data.format=coco -o {shlex.quote(f'data.root={directory}')}")


def check_data(request: SpecRequest, *, images: int, out: Path) -> Iterator["Table | Remark"]:
    """Yield counts, histograms and what is wrong with a data set; then save images with their labels, also augmented.

    Args:
        request: the spec whose data are read.
        images: number of images in each grid.
        out: folder of the grids.

    Raises:
        UsageError: the spec is wrong, or the data cannot be read.
    """
    from mtrain.core.interfaces import Remark
    from mtrain.data.images.drawing import save_image
    from mtrain.rank.spec.assembly import open_task

    loaded = request.read(request.config)
    opened = open_task(loaded.job, for_model=False)
    verified = opened.verify()
    yield Remark(text=f"{loaded.source}: data.format {loaded.spec.data.format}, {verified}")
    yield from opened.describe()
    for name, view_name, image in opened.views(limit=images):
        file = out / f"data_check_{loaded.name}_{name}.jpg"
        save_image(image, file)
        yield Remark(text=f"{view_name}: {file}")


def convert_data(request: ConvertDataRequest, *, tell: Callable[[str], None]) -> Converted:
    """Write a data set in another format, its images linked or copied; ``tell`` receives the notes on its spec.

    Raises:
        UsageError: the spec is wrong, or the data cannot be read, do not fit the format, or cannot be written.
    """
    from mtrain.tasks.datasets import open_data
    from mtrain.tasks.detection.convert import check_kind
    from mtrain.tasks.detection.convert import convert as write

    loaded = request.spec.read(request.spec.config)
    for note in loaded.notes:
        tell(note)
    opened = open_data(loaded.spec.data, registry=loaded.registry)
    check_kind(opened.kind, loaded.spec.data.format)
    # A data set without a split to evaluate on is converted, too, where the spec says that nothing is evaluated.
    names = ("train", "val") if loaded.spec.evaluate.enabled else ("train",)
    splits = dict(zip(names, opened.both() if len(names) == 2 else [opened.train], strict=True))
    notes = tuple(write(splits, request.folder, request.form, images=request.images))
    labels = sum(len(image.labels) for split in splits.values() for image in split.images)
    return Converted(images={name: len(split) for name, split in splits.items()}, labels=labels, notes=notes)
