"""Find the run that a job continues, and the checkpoint from which it goes on."""

from dataclasses import dataclass
from pathlib import Path

from mtrain.core.record_files import METRICS
from mtrain.errors import CheckpointError
from mtrain.system.runfolder import is_numbered

IF_ANY = "if-any"
"""The value of ``--resume`` for one command that starts a job the first time and continues it each further time."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The run that a job continues, and the checkpoint that it starts from."""

    run: Path
    """Run folder in which the job was started and goes on."""
    checkpoint: Path | None
    """None with ``IF_ANY``: there is no intact one, so the job begins."""


def find_resume(requested: str | None, *, base: Path, name: str) -> Resume:
    """Find the run to resume and its newest intact checkpoint.

    Args:
        requested: a checkpoint or a run folder; None: the newest run of ``name`` in ``base`` that has an intact
            checkpoint; ``IF_ANY``: the run folder ``name`` itself, with or without a checkpoint.

    Raises:
        CheckpointError: there is no intact checkpoint; every folder that was searched is named.
    """
    from mtrain.core.checkpoint import store as checkpoint

    if requested == IF_ANY:
        return Resume(base / name, checkpoint.newest(base / name / "checkpoints"))
    if requested is not None:
        path = Path(requested)
        if checkpoint.is_checkpoint(path):
            problems = checkpoint.verify(path)
            if problems:
                raise CheckpointError(
                    f"--resume {requested}: {'; '.join(problems)}; give the run folder to use its newest intact one"
                )
            return Resume(path.parent.parent if path.parent.name == "checkpoints" else path.parent, path)
        runs = [path.parent if path.name == "checkpoints" else path]
    else:
        runs = _runs_of(base, name)
    for run in runs:
        newest = checkpoint.newest(run / "checkpoints")
        if newest is not None:
            return Resume(run, newest)
    if requested is not None:
        raise CheckpointError(f"--resume {requested}: {_nothing_in(runs[0], Path(requested))}")
    searched_folders = ", ".join(str(run / "checkpoints") for run in runs) or f"{base / name} (no such run)"
    raise CheckpointError(
        f"--resume: no intact checkpoint in {searched_folders}; give the path of one, or leave --resume out"
    )


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
    runs = [path for path in base.glob(f"{name}*") if path.is_dir() and is_numbered(path.name, name)]
    return sorted(runs, key=_last_written, reverse=True)


def _last_written(run: Path) -> float:
    return max((p.stat().st_mtime for p in (run, run / METRICS, run / "checkpoints") if p.exists()), default=0.0)
