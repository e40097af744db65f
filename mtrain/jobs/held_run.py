"""Choose the checkpoint of a resumed job while it holds its run folder, so that no other job writes or deletes one then."""

from collections.abc import Callable
from pathlib import Path

from mtrain.core.checkpoint import store
from mtrain.system import runfolder
from mtrain.system.resuming import Resume


def choose(find: Callable[[], Resume], hold: Callable[[Path], object]) -> Resume:
    """Return what ``find`` finds once the run folder is held.

    A job that was ending may have saved its last checkpoint, and deleted older ones, between the first look and the lock.

    Args:
        find: looks for the run and its checkpoint.
        hold: locks a run folder for as long as the job lasts.

    Raises:
        UsageError: another job runs in the folder.
        CheckpointError: there is no intact checkpoint.
    """
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


def _is_newest(resume: Resume) -> bool:
    """Return whether the checkpoint is still there and none is newer, which costs no digests."""
    whole = [path for path in store.list_all(resume.run / "checkpoints") if store.looks_whole(path)]
    if resume.checkpoint is None or not whole:
        return resume.checkpoint is None and not whole
    return max(whole, key=store.order_of).resolve() == resume.checkpoint.resolve()
