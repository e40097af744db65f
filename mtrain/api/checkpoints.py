"""Checkpoints of runs and copies at addresses: listed, verified, fetched and described."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.format import manifest_of
from mtrain.errors import CheckpointError


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


def checkpoints(folder: Path) -> Iterator[ListedCheckpoint]:
    """Yield the checkpoints of a run in the order of writing. Reads no array.

    Raises:
        CheckpointError: there is none.
    """
    for path in _paths(folder):
        yield ListedCheckpoint(
            name=path.name,
            update=manifest_of(path).get("update", "-"),
            score=store.score_of(path),
            size_bytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
            state="whole" if store.looks_whole(path) else "damaged",
        )


def copies(address: str) -> Iterator[ListedCheckpoint]:
    """Yield the copies at an address, the damaged ones last.

    Raises:
        CheckpointError: the address cannot be read.
    """
    from mtrain.weights.backup import restoring

    _, found, bad = restoring.states(address)
    for copy in found:
        manifest = copy.manifest
        yield ListedCheckpoint(
            name=copy.name, update=manifest.update, score=manifest.score, size_bytes=manifest.size, state="whole"
        )
    yield from (ListedCheckpoint(name=name, state=why) for name, why in bad.items())


def problems(folder: Path | str) -> Iterator[tuple[str, str]]:
    """Yield each checkpoint of a folder, or each copy at an address, with its problems in words; "" where it is intact.

    Raises:
        CheckpointError: there is none, or the address cannot be read.
    """
    if isinstance(folder, Path):
        yield from ((str(path), "; ".join(store.verify(path))) for path in _paths(folder))
        return
    from mtrain.weights.backup import restoring
    from mtrain.weights.backup.place import PlaceError

    source, found, bad = restoring.states(folder)
    run = source.copies.place.shown
    for copy in found:
        try:
            yield f"{run}/{copy.name}", "; ".join(source.copies.problems(copy))
        except PlaceError as error:
            raise CheckpointError(f"{run}/{copy.name}: cannot be read: {error}") from error
    yield from ((f"{run}/{name}", why) for name, why in bad.items())


def fetch(address: str, base: Path, *, best: bool) -> Path | None:
    """Restore a run from its newest copy at an address, or from its best one, into ``base``; return the checkpoint.

    Raises:
        CheckpointError: there is no intact copy, or the address cannot be read.
    """
    from mtrain.weights.backup import restoring

    return restoring.restored(address, base, best=best).checkpoint


def description(folder: Path, *, arrays: bool) -> list[str]:
    """Return lines that describe a checkpoint or, of a run, its newest intact one; with ``arrays``, one for each array.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
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
    if store.is_checkpoint(folder):
        return [folder]
    found = store.listed(folder) or store.listed(folder / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{folder}: holds no checkpoint; give a run folder such as runs/digits, or one of its checkpoints"
        )
    return [*found, *store.kept(found[0].parent)]


def _newest(folder: Path) -> Path:
    """Return the newest intact checkpoint of a run.

    Raises:
        CheckpointError: none is intact.
    """
    newest = store.newest(_paths(folder)[0].parent)
    if newest is None:
        raise CheckpointError(
            f"{folder}: none of its checkpoints is intact; `mtrain checkpoint verify {shlex.quote(str(folder))}` says why"
        )
    return newest


def _at(spec: Any, section: str, key: str) -> Any:
    return (spec.get(section) or {}).get(key, "?")
