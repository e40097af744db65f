"""``mtrain checkpoint``: list checkpoints, verify that they are intact, and show their content."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mtrain.commands.helping import CommandGroup
from mtrain.errors import CheckpointError
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


@click.group(cls=CommandGroup)
def checkpoint() -> None:
    """List, verify or show checkpoints."""


@checkpoint.command("list", examples=(("mtrain checkpoint list runs/digits", "in the order of writing"),))
@click.argument("folder", type=FolderOrAddress())
def list_(folder: Path | str) -> None:
    """List the checkpoints of a run in the order of writing, or its copies at an address. Reads no array."""
    rows = list(list_copies(folder) if isinstance(folder, str) else list_checkpoints(folder))
    terminal.say(f"{'checkpoint':<20}{'update':>10}{'score':>10}{'size':>12}  state")
    for row in rows:
        score = f"{row.score:.4f}" if row.score > float("-inf") else "-"
        size = "-" if row.size_bytes is None else f"{row.size_bytes / 2**20:.1f} MiB"
        terminal.say(f"{row.name:<20}{row.update:>10}{score:>10}{size:>12}  {row.state}")


@checkpoint.command(examples=(("mtrain checkpoint verify runs/digits", "read every byte"),))
@click.argument("folder", type=FolderOrAddress())
@click.pass_context
def verify(context: click.Context, folder: Path | str) -> None:
    """Read every byte of one checkpoint or copy, or of all of a run, and compare. Exit code 1: damaged."""
    damaged = False
    for name, problem in find_problems(folder):
        damaged = damaged or bool(problem)
        terminal.say(f"{name}: {problem or 'intact'}")
    context.exit(1 if damaged else 0)


@checkpoint.command()
@click.argument("address")
@click.option("--best", is_flag=True, help="The copy with the best score instead of the newest.")
@click.option(
    "--to", "base", default="runs", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Where run folders are. Default: runs.",
)  # fmt: skip
def fetch(address: str, *, best: bool, base: Path) -> None:
    """Restore a run from its copies at ADDRESS, without training: for `mtrain evaluate`, `predict` or `export`."""
    from mtrain.jobs.resume import fetch

    terminal.say(str(fetch.restore_run(address, base, best=best).checkpoint))


@checkpoint.command(examples=(("mtrain checkpoint show runs/digits --arrays", "names and shapes"),))
@click.argument("folder", type=FOLDER)
@click.option("--arrays", is_flag=True, help="Name every array with its shape.")
def show(folder: Path, *, arrays: bool) -> None:
    """Show what one checkpoint holds; of a run, its newest intact one."""
    for line in describe_checkpoint(folder, arrays=arrays):
        terminal.say(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """A checkpoint or a copy of one, as a list shows it."""

    name: str
    update: int | str = "-"
    score: float = float("-inf")
    """Minus infinity: it has none."""
    size_bytes: int | None = None
    """None: unknown."""
    state: str


def list_checkpoints(folder: Path) -> Iterator[ListedCheckpoint]:
    """Yield the checkpoints of a run in the order of writing. Reads no array.

    Raises:
        CheckpointError: there is none.
    """
    from mtrain.core.checkpoint import store
    from mtrain.core.checkpoint.format import manifest_of

    for path in _paths(folder):
        yield ListedCheckpoint(
            name=path.name,
            update=manifest_of(path).get("update", "-"),
            score=store.score_of(path),
            size_bytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
            state="whole" if store.looks_whole(path) else "damaged",
        )


def list_copies(address: str) -> Iterator[ListedCheckpoint]:
    """Yield the copies at an address, the damaged ones last.

    Raises:
        CheckpointError: the address cannot be read.
    """
    from mtrain.jobs.resume import fetch

    _, found, bad = fetch.states(address)
    for copy in found:
        manifest = copy.manifest
        yield ListedCheckpoint(
            name=copy.name, update=manifest.update, score=manifest.score, size_bytes=manifest.size, state="whole"
        )
    yield from (ListedCheckpoint(name=name, state=why) for name, why in bad.items())


def find_problems(folder: Path | str) -> Iterator[tuple[str, str]]:
    """Yield each checkpoint of a folder, or each copy at an address, with its problems in words; "" where it is intact.

    Raises:
        CheckpointError: there is none, or the address cannot be read.
    """
    if isinstance(folder, Path):
        from mtrain.core.checkpoint import store

        yield from ((str(path), "; ".join(store.verify(path))) for path in _paths(folder))
        return
    from mtrain.jobs.resume import fetch
    from mtrain.weights.backup.place import PlaceError

    source, found, bad = fetch.states(folder)
    run = source.copies.place.in_words
    for copy in found:
        try:
            yield f"{run}/{copy.name}", "; ".join(source.copies.problems(copy))
        except PlaceError as error:
            raise CheckpointError(f"{run}/{copy.name}: cannot be read: {error}") from error
    yield from ((f"{run}/{name}", why) for name, why in bad.items())


def describe_checkpoint(folder: Path, *, arrays: bool) -> list[str]:
    """Return lines that describe a checkpoint or, of a run, its newest intact one; with ``arrays``, one for each array.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from mtrain.core.checkpoint import store

    is_single = (folder / "MANIFEST.json").is_file() or folder.name.startswith(store.PREFIX)
    path = folder if is_single else _newest(folder)
    saved = store.load(path)
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


def _paths(folder: Path) -> list[Path]:
    """Return all checkpoints of a run folder or of its ``checkpoints``, those kept by name last; of a checkpoint, the checkpoint itself.

    Raises:
        CheckpointError: there is none.
    """
    from mtrain.core.checkpoint import store

    if store.is_checkpoint(folder):
        return [folder]
    found = store.list_all(folder) or store.list_all(folder / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{folder}: holds no checkpoint; give a run folder such as runs/digits, or one of its checkpoints"
        )
    return [*found, *store.list_named(found[0].parent)]


def _newest(folder: Path) -> Path:
    """Return the newest intact checkpoint of a run.

    Raises:
        CheckpointError: none is intact.
    """
    from mtrain.core.checkpoint import store

    newest = store.newest(_paths(folder)[0].parent)
    if newest is None:
        raise CheckpointError(
            f"{folder}: none of its checkpoints is intact; `mtrain checkpoint verify {shlex.quote(str(folder))}` says why"
        )
    return newest


def _at(spec: Any, section: str, key: str) -> Any:
    return (spec.get(section) or {}).get(key, "?")
