"""``mtrain checkpoint``: list checkpoints, verify that they are intact, and show their content."""

from pathlib import Path

import click

from mtrain.commands.helping import Group
from mtrain.spec import terminal

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


class FolderOrAddress(click.ParamType):  # type: ignore[type-arg] # generic in newer versions of click alone
    """A folder that exists, or an address of copies such as ``s3://bucket/prefix/run``."""

    name = "folder"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """Return a path, or the address as it is."""
        from mtrain.spec.addresses import is_address

        if is_address(value):
            return value
        path: Path = FOLDER.convert(value, param, ctx)
        return path


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify or show checkpoints."""


@checkpoint.command("list")
@click.argument("folder", type=FolderOrAddress())
def list_(folder: Path | str) -> None:
    """List the checkpoints of a run in the order of writing, or its copies at an address. Reads no array."""
    from mtrain.api import checkpoints

    rows = list(checkpoints.copies(folder) if isinstance(folder, str) else checkpoints.checkpoints(folder))
    terminal.say(f"{'checkpoint':<20}{'update':>10}{'score':>10}{'size':>12}  state")
    for row in rows:
        score = f"{row.score:.4f}" if row.score > float("-inf") else "-"
        size = "-" if row.size_bytes is None else f"{row.size_bytes / 2**20:.1f} MiB"
        terminal.say(f"{row.name:<20}{row.update:>10}{score:>10}{size:>12}  {row.state}")


@checkpoint.command()
@click.argument("folder", type=FolderOrAddress())
@click.pass_context
def verify(context: click.Context, folder: Path | str) -> None:
    """Read every byte of one checkpoint or copy, or of all of a run, and compare. Exit code 1: damaged."""
    from mtrain.api import checkpoints

    damaged = False
    for name, problem in checkpoints.problems(folder):
        damaged = damaged or bool(problem)
        terminal.say(f"{name}: {problem or 'intact'}")
    context.exit(1 if damaged else 0)


@checkpoint.command()
@click.argument("address")
@click.option("--best", is_flag=True, help="The copy with the best score instead of the newest.")
@click.option(
    "--to",
    "base",
    default="runs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Where run folders are. Default: runs.",
)
def fetch(address: str, *, best: bool, base: Path) -> None:
    """Restore a run from its copies at ADDRESS, without training: for `mtrain evaluate`, `predict` or `export`."""
    from mtrain.api import checkpoints

    terminal.say(str(checkpoints.fetch(address, base, best=best)))


@checkpoint.command()
@click.argument("folder", type=FOLDER)
@click.option("--arrays", is_flag=True, help="Name every array with its shape.")
def show(folder: Path, *, arrays: bool) -> None:
    """Show what one checkpoint holds; of a run, its newest intact one."""
    from mtrain.api import checkpoints

    for line in checkpoints.description(folder, arrays=arrays):
        terminal.say(line)
