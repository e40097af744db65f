"""``mtrain checkpoint``: list checkpoints, verify that they are intact, and show their content."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mtrain.core.checkpoint.store import Saved

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


@click.group()
def checkpoint() -> None:
    """List, verify or show checkpoints."""


HEAD = f"{'checkpoint':<20}{'update':>10}{'score':>10}{'size':>12}  state"


@checkpoint.command("list")
@click.argument("folder", type=FolderOrAddress())
def list_(folder: Path | str) -> None:
    """List the checkpoints of a run in the order of writing, or its copies at an address. Reads no array."""
    from mtrain.core.checkpoint import store
    from mtrain.core.checkpoint.format import manifest_of

    if isinstance(folder, str):
        list_copies(folder)
        return
    paths = checkpoints_of(folder)
    click.echo(HEAD)
    for path in paths:
        manifest, score = manifest_of(path), store.score_of(path)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        shown = f"{score:.4f}" if score > float("-inf") else "-"
        state = "whole" if store.looks_whole(path) else "damaged"
        update = manifest.get("update", "-")
        click.echo(f"{path.name:<20}{update:>10}{shown:>10}{size / 2**20:>8.1f} MiB  {state}")


def list_copies(address: str) -> None:
    """Print the copies at an address."""
    from mtrain.backup import restoring

    _, copies, bad = restoring.states(address)
    click.echo(HEAD)
    for copy in copies:
        manifest = copy.manifest
        shown = f"{manifest.score:.4f}" if manifest.score > float("-inf") else "-"
        click.echo(f"{copy.name:<20}{manifest.update:>10}{shown:>10}{manifest.size / 2**20:>8.1f} MiB  whole")
    for name, why in bad.items():
        click.echo(f"{name:<20}{'-':>10}{'-':>10}{'-':>12}  {why}")


@checkpoint.command()
@click.argument("folder", type=FolderOrAddress())
@click.pass_context
def verify(context: click.Context, folder: Path | str) -> None:
    """Read every byte of one checkpoint or copy, or of all of a run, and compare. Exit code 1: damaged."""
    from mtrain.core.checkpoint import store

    damaged = False
    if isinstance(folder, str):
        for name, problem in problems_at(folder):
            damaged = damaged or bool(problem)
            click.echo(f"{name}: {problem or 'intact'}")
        context.exit(1 if damaged else 0)
    for path in checkpoints_of(folder):
        problems = store.verify(path)
        damaged = damaged or bool(problems)
        click.echo(f"{path}: {'; '.join(problems) if problems else 'intact'}")
    context.exit(1 if damaged else 0)


def problems_at(address: str) -> "Iterator[tuple[str, str]]":
    """Yield each copy at an address with its problems in words, "" if it is intact.

    Raises:
        CheckpointError: the address cannot be read.
    """
    from mtrain.backup import restoring
    from mtrain.backup.place import PlaceError
    from mtrain.errors import CheckpointError

    source, copies, bad = restoring.states(address)
    run = source.copies.place.shown
    for copy in copies:
        try:
            yield f"{run}/{copy.name}", "; ".join(source.copies.problems(copy))
        except PlaceError as error:
            raise CheckpointError(f"{run}/{copy.name}: cannot be read: {error}") from error
    yield from ((f"{run}/{name}", why) for name, why in bad.items())


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
    from mtrain.backup import restoring

    click.echo(str(restoring.restored(address, base, best=best).checkpoint))


@checkpoint.command()
@click.argument("folder", type=FOLDER)
@click.option("--arrays", is_flag=True, help="Name every array with its shape.")
def show(folder: Path, *, arrays: bool) -> None:
    """Show what one checkpoint holds; of a run, its newest intact one."""
    from mtrain.core.checkpoint import store

    single = (folder / "MANIFEST.json").is_file() or folder.name.startswith(store.PREFIX)
    path = folder if single else newest_of(folder)
    for line in described(path, store.load(path), arrays=arrays):
        click.echo(line)


def checkpoints_of(folder: Path) -> list[Path]:
    """Return all checkpoints of a run folder or of its ``checkpoints``; of a checkpoint, the checkpoint itself.

    Raises:
        CheckpointError: there is none.
    """
    from mtrain.core.checkpoint import store
    from mtrain.errors import CheckpointError

    if folder.name.startswith(store.PREFIX):
        return [folder]
    checkpoints = store.listed(folder) or store.listed(folder / "checkpoints")
    if not checkpoints:
        raise CheckpointError(
            f"{folder}: holds no checkpoint; give a run folder such as runs/digits, or one of its checkpoints"
        )
    return checkpoints


def newest_of(folder: Path) -> Path:
    """Return the newest intact checkpoint of a run.

    Raises:
        CheckpointError: none is intact.
    """
    from mtrain.core.checkpoint import store
    from mtrain.errors import CheckpointError

    newest = store.newest(checkpoints_of(folder)[0].parent)
    if newest is None:
        raise CheckpointError(
            f"{folder}: none of its checkpoints is intact; `mtrain checkpoint verify {shlex.quote(str(folder))}` says why"
        )
    return newest


def described(path: Path, saved: "Saved", *, arrays: bool) -> list[str]:
    """Return lines that describe the content of a checkpoint; with ``arrays``, one for each array."""
    progress, spec = saved.progress, saved.spec
    lines = [
        f"checkpoint   {path}",
        f"update       {progress.update} (position {progress.position} of epoch {progress.epoch})",
        f"score        {saved.meta.get('score')}",
        f"model        {_at(spec, 'model', 'name')} on {_at(spec, 'backend', 'name')}",
        "written by   "
        + ", ".join(f"{name} {version}" for name, version in (saved.meta.get("versions") or {}).items()),
        "counters     " + (", ".join(f"{name} {value:g}" for name, value in saved.state.counters.items()) or "-"),
    ]
    for part in ("weights", "ema", "moments"):
        arrays_of_part = getattr(saved.state, part)
        size = sum(array.nbytes for array in arrays_of_part.values())
        lines.append(
            f"{part:<13}{len(arrays_of_part)} arrays, {sum(a.size for a in arrays_of_part.values())} numbers, {size / 2**20:.1f} MiB"
        )
        if arrays:
            lines += [f"  {name}  {array.dtype}  {tuple(array.shape)}" for name, array in arrays_of_part.items()]
    return lines


def _at(spec: Any, section: str, key: str) -> Any:
    return (spec.get(section) or {}).get(key, "?")
