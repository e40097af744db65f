"""``mtrain data``: look at a data set before training on it, and make the embedded one."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from mtrain.data.sample import Annotations


@click.group()
def data() -> None:
    """Check a data set, or make the embedded one."""


@data.command()
@click.argument("spec", required=False)
@click.option("-c", "--config", help="The spec, as `mtrain train -c` takes it.")
@click.option("-o", "--override", "overrides", multiple=True, metavar="PATH=VALUE", help="Set a value of the spec.")
@click.option(
    "--pictures", "-n", default=16, show_default=True, type=click.IntRange(min=1), help="Pictures in the grid."
)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), default=Path("."), help="Folder of the picture grids."
)
def check(spec: str | None, config: str | None, overrides: tuple[str, ...], pictures: int, output: Path) -> None:
    """Print counts, bad boxes and histograms of the data set of SPEC, and save pictures with their boxes, also augmented."""
    from rich.console import Console

    from mtrain.core.config import load
    from mtrain.data import open_data
    from mtrain.data.check import verify_pictures
    from mtrain.data.draw import annotations_grid, inputs_grid, save_picture
    from mtrain.data.source import open_sources

    loaded = load(spec or config, overrides=list(overrides))
    console = Console(soft_wrap=True)
    opened = open_data(loaded.spec.data)
    splits = dict(zip(("train", "val"), opened.both(), strict=True))
    verified = verify_pictures(*splits.values())
    console.print(f"{loaded.source}: data.format {loaded.spec.data.format}, {verified} picture files, all whole")
    print_report(console, splits)
    for split, annotations in splits.items():
        file = output / f"data_check_{loaded.name}_{split}.jpg"
        save_picture(annotations_grid(annotations, limit=pictures), file)
        console.print(f"{split} pictures with their boxes: {file}", highlight=False)
    settings = loaded.spec.data.model_copy(update={"cache": "none"})
    train = open_sources(settings, splits["train"], None, seed=loaded.spec.train.seed)["train"]
    file = output / f"data_check_{loaded.name}_augmented.jpg"
    save_picture(inputs_grid(train, opened.class_names, limit=pictures), file)
    console.print(f"train pictures as the network is given them: {file}", highlight=False)


def print_report(console: "Console", splits: "dict[str, Annotations]") -> None:
    """Counts per split, histograms of classes and sizes, and what is wrong with the boxes."""
    from rich.table import Table

    from mtrain.data.statistics import class_histogram, picture_sizes, size_histogram

    counts = {split: class_histogram(annotations) for split, annotations in splits.items()}
    sizes = {split: size_histogram(annotations) for split, annotations in splits.items()}
    table = Table("", *splits)
    table.add_row("pictures", *(str(len(a.samples)) for a in splits.values()))
    table.add_row("  without a box", *(str(sum(not len(s.boxes) for s in a.samples)) for a in splits.values()))
    table.add_row("boxes", *(str(sum(c.values())) for c in counts.values()))
    table.add_row("crowd boxes", *(str(sum(int(s.crowd.sum()) for s in a.samples)) for a in splits.values()))
    table.add_section()
    for size, range_ in (("small", "< 32 x 32 px"), ("medium", "between"), ("large", "> 96 x 96 px")):
        table.add_row(f"{size} ({range_})", *(str(s[size]) for s in sizes.values()))
    console.print(table)
    _print_classes(console, counts)
    for split, annotations in splits.items():
        common = list(picture_sizes(annotations).items())
        listing = ", ".join(f"{w} x {h}: {count}" for (w, h), count in common[:4])
        more = f" and {len(common) - 4} other sizes" if len(common) > 4 else ""
        console.print(f"{split} picture sizes: {listing}{more}")
        for sentence in annotations.report() or ["no bad boxes"]:
            console.print(f"{split}: {sentence}", style="yellow" if annotations.report() else "green")


def _print_classes(console: "Console", counts: dict[str, dict[str, int]]) -> None:
    from rich.table import Table

    table = Table("label", "class", *(f"{split} boxes" for split in counts), "")
    first = next(iter(counts.values()))
    largest = max([*first.values(), 1])
    for label, name in enumerate(first):
        bar = "█" * round(30 * first[name] / largest)
        table.add_row(str(label), name, *(str(split[name]) for split in counts.values()), bar)
    console.print(table)


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
    from mtrain.data.digits import DigitsOptions, make_digits

    options = DigitsOptions(train=train, val=val, size=size, seed=seed, suffix="png" if png else "jpg")
    make_digits(directory, options)
    click.echo(f"{train} train and {val} val canvases of {size} x {size} px: {directory}")
    click.echo(f"use them with: -o data.format=coco -o data.root={directory}")
