"""``mtrain hello``."""

from pathlib import Path

import click


@click.command()
@click.option("--name", default="world", show_default=True, help="Who is greeted.")
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs."
)
def hello(name: str, runs: Path) -> None:
    """Greet, and count the runs of a folder."""
    found = sum((folder / "spec.yml").is_file() for folder in runs.iterdir()) if runs.is_dir() else 0
    click.echo(f"Hello, {name}: {runs} has {found} run{'' if found == 1 else 's'}.")
