"""Find the run that a job continues, and the checkpoint from which it goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.core.checkpoint import store
from mtrain.core.record_files import METRICS
from mtrain.errors import CheckpointError
from mtrain.system import runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Source

AUTO = "auto"
"""The value of ``--resume`` without a path."""
IF_ANY = "if-any"
"""The value of ``--resume`` for one command that starts a job the first time and continues it each further time."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a job runs: the folder of its run, and the checkpoint that it starts from."""

    run: Path
    """Run folder in which the job was started and goes on, or in which it begins."""
    checkpoint: Path | None
    """None: the job begins; with ``IF_ANY``, because there is no intact one."""
    is_held: bool = False
    """Whether this process has locked the folder."""


def find_resume(requested: str | None, *, base: Path, name: str) -> Where:
    """Find the run to resume and its newest intact checkpoint.

    Args:
        requested: a checkpoint or a run folder; None: the newest run of ``name`` in ``base`` that has an intact
            checkpoint; ``IF_ANY``: the run folder ``name`` itself, with or without a checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint; every folder that was searched is named.
    """
    if requested == IF_ANY:
        return Where(base / name, store.newest(base / name / "checkpoints"))
    given = None if requested is None else runfolder.follow_latest(Path(requested))
    if given is not None and store.is_checkpoint(path := given):
        if problems := store.verify(path):
            raise CheckpointError(
                f"--resume {requested}: {'; '.join(problems)}; give the run folder to use its newest intact one"
            )
        return Where(run_of(path), path)
    runs = _runs_of(base, name) if given is None else [run_of(given)]
    for run in runs:
        if newest := store.newest(run / "checkpoints"):
            return Where(run, newest)
    if requested is not None:
        raise CheckpointError(f"--resume {requested}: {_nothing_in(runs[0], Path(requested))}")
    searched_folders = ", ".join(str(run / "checkpoints") for run in runs) or f"{base / name} (no such run)"
    raise CheckpointError(
        f"--resume: no intact checkpoint in {searched_folders}; give the path of one, or leave --resume out"
    )


def choose_under_lock(find: Callable[[], Where], hold: Callable[[Path], object]) -> Where:
    """Return what ``find`` finds once the run folder is held, so that no other job writes or deletes a checkpoint then.

    Args:
        find: looks for the run and its checkpoint.
        hold: locks a run folder for as long as the job lasts.

    Raises:
        UsageError: another job runs in the folder.
        CheckpointError: there is no intact checkpoint.
    """
    # A job that was ending may have saved its last checkpoint, and deleted older ones, between the first look and the lock.
    resume = find()
    held: set[Path] = set()
    while resume.run not in held:
        runfolder.refuse_running(resume.run)
        if resume.run.is_dir():
            hold(resume.run)
        held.add(resume.run)
        if _is_newest(resume):
            break
        resume = find()
    return resume


def _is_newest(resume: Where) -> bool:
    """Return whether the checkpoint is still there and none is newer, which costs no digests."""
    # Digests of checkpoints of many GiB take minutes, and ``find`` has checked them. A size that fits is enough here.
    whole = [path for path in store.list_all(resume.run / "checkpoints") if store.looks_whole(path)]
    if resume.checkpoint is None or not whole:
        return resume.checkpoint is None and not whole
    return max(whole, key=store.order_of).resolve() == resume.checkpoint.resolve()


def run_of(path: Path) -> Path:
    """Return the run folder of a checkpoint, or of a folder of checkpoints; else ``path`` itself."""
    inside = path.parent if store.is_checkpoint(path) else path
    return inside.parent if inside.name == "checkpoints" else inside


def best_of(run: Path) -> Path | None:
    """Return the best intact checkpoint of a run folder, else its newest intact one, else None."""
    return store.best(run / "checkpoints") or store.newest(run / "checkpoints")


def find_weights(verb: str, *, run: str | None, checkpoint: str | None, weights: str | None) -> Path:
    """Return the weights that a command uses: those it names, else the best checkpoint of a run; no name: of the latest one.

    Raises:
        CheckpointError: there are none.
    """
    folder = Path(run or "runs/latest")
    path = Path(weights or checkpoint or best_of(folder) or folder)
    if path.exists() and path != folder:
        return path
    absent = f"no intact checkpoint in {folder}" if folder.is_dir() else f"no such run folder: {folder}"
    if path != folder:
        absent = f"{path} does not exist"
    raise CheckpointError(f"{verb}: {absent}; give --run FOLDER, --checkpoint PATH or --weights FILE")


def near(path: Path, name: str) -> Path | None:
    """Return the file ``name`` of the run folder that ``path`` is, or in which it is as a checkpoint; None: there is none."""
    folders = (path, path.parent, path.parent.parent)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def latest_run(config: "Source", resume: str | None) -> str | None:
    """Return ``resume``.

    For ``--resume`` without a path and without a spec, the folder of the run that was started last.
    """
    latest = Path("runs") / runfolder.LATEST
    if resume != AUTO or config is not None or Path("mtrain.yml").exists() or not latest.is_dir():
        return resume
    return str(runfolder.follow_latest(latest))


def _nothing_in(run: Path, path: Path) -> str:
    """Say why there is nothing to resume in a path that was given, and what to give."""
    if not path.exists():
        return f"no intact checkpoint there: no such folder{', a link to nothing' if path.is_symlink() else ''}; give that of a run"
    if not path.is_dir():
        folder = path.parent if path.suffix == ".safetensors" else "that of a run"
        return f"no intact checkpoint there: it is a file, and a run folder or the folder of a checkpoint is resumed; give {folder}"
    within = _runs_in(path)
    if within and not _is_folder(run / "checkpoints"):
        names = ", ".join(str(child) for child in within[:3])
        return f"no intact checkpoint in {run / 'checkpoints'}: it is a folder of runs; give one of them: {names}"
    return f"no intact checkpoint in {run / 'checkpoints'}; give the path of one, or leave --resume out"


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders in a folder, as far as this user may look into them."""
    children = sorted(folder.iterdir())
    return [child for child in children if _is_folder(child / "checkpoints") and not child.is_symlink()]


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder; not where this user may not look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _runs_of(base: Path, name: str) -> list[Path]:
    """Return the run folders ``name``, ``name-2`` ..., the most recently written one first."""
    runs = [path for path in base.glob(f"{name}*") if path.is_dir() and runfolder.is_numbered(path.name, name)]
    return sorted(runs, key=_last_written, reverse=True)


def _last_written(run: Path) -> float:
    return max((p.stat().st_mtime for p in (run, run / METRICS, run / "checkpoints") if p.exists()), default=0.0)
