"""``mtrain data``: inspect a data set before training on it, convert it, or make the embedded one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.completing import complete_config
from mtrain.cli.options import JobCommand, load_job, spec_options

if TYPE_CHECKING:
    from rich.console import Console

    from mtrain.core.interfaces import Remark, Table


@click.group()
def data() -> None:
    """Check or convert a data set, or make the embedded one."""


@data.command(cls=JobCommand)
@click.argument("spec", required=False, shell_complete=complete_config)
@spec_options
@click.option(
    "--pictures", "-n", default=16, show_default=True, type=click.IntRange(min=1), help="Pictures in the grid."
)
@click.option(
    "--out",
    "--output",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="Folder of the picture grids.",
)
def check(*, spec: str | None, pictures: int, out: Path, **params: Any) -> None:
    """Print counts, histograms and what is wrong with the data set of SPEC, and save pictures with their labels, also augmented."""
    from rich.console import Console

    from mtrain.data.images.drawing import save_picture
    from mtrain.rank.assembly import open_data_of

    if spec is not None and params["config"] is not None:
        raise click.UsageError(f"{spec} and -c {params['config']} are both given; keep one")
    loaded = load_job({**params, "config": spec or params["config"]})
    console = Console(soft_wrap=True)
    opened = open_data_of(loaded.spec)
    verified = opened.verify()
    console.print(f"{loaded.source}: data.format {loaded.spec.data.format}, {verified}")
    for part in opened.describe():
        print_part(console, part)
    for name, view_name, picture in opened.views(limit=pictures):
        file = out / f"data_check_{loaded.name}_{name}.jpg"
        save_picture(picture, file)
        console.print(f"{view_name}: {file}", highlight=False)


def print_part(console: "Console", part: "Table | Remark") -> None:
    """Print a table, or a remark in the colour that says whether it is good."""
    from rich import table as rich_table

    from mtrain.core.interfaces import Remark

    if isinstance(part, Remark):
        colours = {True: "green", False: "yellow", None: None}
        console.print(part.text, style=colours[part.good])
        return
    table = rich_table.Table(*part.columns)
    for row in part.rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    console.print(table)


@data.command(cls=JobCommand)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(["coco", "voc", "yolo"]), help="Format to write.")
@click.option("--format", "given", metavar="FORMAT", help="Format to read: data.format.")
@click.option("--root", metavar="FOLDER", help="Data set to read: data.root.")
@click.option(
    "--pictures", type=click.Choice(["link", "copy"]), default="link", show_default=True, help="Hard links, or copies."
)
@spec_options
def convert(folder: Path, *, form: str, pictures: str, **params: Any) -> None:
    """Write a data set to FOLDER in another format, its pictures linked or copied.

    For example: mtrain data convert cells-yolo --to yolo --format voc --root cells
    """
    from mtrain.tasks.datasets import open_data
    from mtrain.tasks.detection.convert import check_kind
    from mtrain.tasks.detection.convert import convert as write

    typed = {"data.format": params.pop("given"), "data.root": params.pop("root")}
    values = [f"{path}={value}" for path, value in typed.items() if value is not None]
    loaded = load_job({**params, "overrides": (*(params["overrides"] or ()), *values)})
    for note in loaded.notes:
        click.echo(note)
    opened = open_data(loaded.spec.data, policy=loaded.policy)
    check_kind(opened.kind, loaded.spec.data.format)
    names = ("train", "val") if loaded.spec.evaluate.enabled else ("train",)
    splits = dict(zip(names, opened.both() if len(names) == 2 else [opened.train], strict=True))
    for line in write(splits, folder, form, pictures=pictures):  # type: ignore[arg-type]
        click.echo(f"note: {line}")
    counts = ", ".join(f"{len(split)} {name}" for name, split in splits.items())
    click.echo(
        f"{counts} pictures with {sum(len(p.labels) for s in splits.values() for p in s.pictures)} labels: {folder}"
    )
    click.echo(f"use them with: -o data.format={form} data.root={folder}")


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
    from mtrain.tasks.detection.readers.digits import DigitsOptions, make_digits

    options = DigitsOptions(train=train, val=val, size=size, seed=seed, suffix="png" if png else "jpg")
    make_digits(directory, options)
    click.echo(f"{train} train and {val} val canvases of {size} x {size} px: {directory}")
    click.echo(f"use them with: -o data.format=coco -o {shlex.quote(f'data.root={directory}')}")
