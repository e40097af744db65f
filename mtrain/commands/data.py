"""``mtrain data``: inspect a data set before training on it, convert it, or make the embedded one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.completing import complete_config
from mtrain.commands.helping import Group
from mtrain.commands.options import JobCommand, spec_options, spec_request
from mtrain.spec import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from mtrain.api.datasets import Remark, Table


VISION = ("cv2", "PIL", "simplejpeg", "lxml", "msgspec", "sklearn")
"""Modules with which data sets of images are read, made and written."""


@click.group(cls=Group)
def data() -> None:
    """Check or convert a data set, or make the embedded one."""


@data.command(cls=JobCommand)
@click.argument("spec", required=False, shell_complete=complete_config)
@spec_options
@click.option("--images", "-n", default=16, show_default=True, type=click.IntRange(min=1), help="Images in the grid.")
@click.option(
    "--out",
    "--output",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Folder of the image grids.",
)
def check(*, spec: str | None, images: int, out: Path, **params: Any) -> None:
    """Print counts, histograms and what is wrong with the data set of SPEC, and save images with their labels, also augmented."""
    _need_vision()
    from rich.console import Console

    from mtrain.api import datasets

    if spec is not None and params["config"] is not None:
        raise click.UsageError(f"{spec} and -c {params['config']} are both given; keep one")
    request = spec_request({**params, "config": spec or params["config"]})
    console = Console(soft_wrap=True)
    for part in datasets.check(request, images=images, out=out):
        print_part(console, part)


def print_part(console: "Console", part: "Table | Remark") -> None:
    """Print a table, or a remark in the colour that says whether it is good."""
    from rich import table as rich_table

    from mtrain.api.datasets import Remark

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


@data.command(cls=JobCommand)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(["coco", "voc", "yolo"]), help="Format to write.")
@click.option("--format", "given", metavar="FORMAT", help="Format to read: data.format.")
@click.option("--root", metavar="FOLDER", help="Data set to read: data.root.")
@click.option(
    "--images", type=click.Choice(["link", "copy"]), default="link", show_default=True, help="Hard links, or copies."
)
@spec_options
def convert(folder: Path, *, form: str, images: str, **params: Any) -> None:
    """Write a data set to FOLDER in another format, its images linked or copied.

    For example: mtrain data convert cells-yolo --to yolo --format voc --root cells
    """
    _need_vision()
    from mtrain.api import datasets

    typed = {"data.format": params.pop("given"), "data.root": params.pop("root")}
    values = [f"{path}={value}" for path, value in typed.items() if value is not None]
    request = datasets.ConvertDataRequest(
        spec=spec_request({**params, "overrides": (*params["overrides"], *values)}),
        folder=folder,
        form=form,  # type: ignore[arg-type]  # one of the choices
        images=images,  # type: ignore[arg-type]
    )
    result = datasets.convert(request, tell=terminal.say)
    for note in result.notes:
        terminal.say(f"note: {note}")
    counts = ", ".join(f"{count} {name}" for name, count in result.images.items())
    terminal.say(f"{counts} images with {result.labels} labels: {folder}")
    terminal.say(f"use them with: -o data.format={form} data.root={folder}")


def _need_vision() -> None:
    from mtrain.spec import remedies

    remedies.need(VISION, what="mtrain data", extra="vision")


@data.group()
def make() -> None:
    """Make a data set."""


@make.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--train", default=400, show_default=True, type=click.IntRange(min=1), help="Canvases to train on.")
@click.option("--val", default=100, show_default=True, type=click.IntRange(min=1), help="Canvases to evaluate on.")
@click.option("--size", default=320, show_default=True, type=click.IntRange(64, 4096), help="Side in pixels.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the layout.")
@click.option("--png", is_flag=True, help="Write PNG instead of JPEG.")
def digits(directory: Path, *, train: int, val: int, size: int, seed: int, png: bool) -> None:
    """Write handwritten digits on canvases to DIRECTORY, in COCO form."""
    _need_vision()
    from mtrain.api import datasets

    datasets.make_digits(directory, train=train, val=val, size=size, seed=seed, suffix="png" if png else "jpg")
    terminal.say(f"{train} train and {val} val canvases of {size} x {size} px: {directory}")
    terminal.say(f"use them with: -o data.format=coco -o {shlex.quote(f'data.root={directory}')}")
