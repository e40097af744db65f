"""``mtrain checkpoint``: list checkpoints, verify that they are intact, and show their content."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mtrain.core.checkpoint.store import Saved

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def checkpoint() -> None:
    """List, verify or show checkpoints."""


@checkpoint.command("list")
@click.argument("folder", type=FOLDER)
def list_(folder: Path) -> None:
    """List the checkpoints of a run in the order of writing. Reads no array."""
    from mtrain.core.checkpoint import store
    from mtrain.core.checkpoint.format import manifest_of

    paths = checkpoints_of(folder)
    click.echo(f"{'checkpoint':<20}{'update':>10}{'score':>10}{'size':>12}  state")
    for path in paths:
        manifest, score = manifest_of(path), store.score_of(path)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        shown = f"{score:.4f}" if score > float("-inf") else "-"
        state = "whole" if store.looks_whole(path) else "damaged"
        update = manifest.get("update", "-")
        click.echo(f"{path.name:<20}{update:>10}{shown:>10}{size / 2**20:>8.1f} MiB  {state}")


@checkpoint.command()
@click.argument("folder", type=FOLDER)
@click.pass_context
def verify(context: click.Context, folder: Path) -> None:
    """Read every byte of one checkpoint, or of all of a run, and compare. Exit code 1: damaged."""
    from mtrain.core.checkpoint import store

    damaged = False
    for path in checkpoints_of(folder):
        problems = store.verify(path)
        damaged = damaged or bool(problems)
        click.echo(f"{path}: {'; '.join(problems) if problems else 'intact'}")
    context.exit(1 if damaged else 0)


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
