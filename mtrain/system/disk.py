"""Check that the disk of a run folder has room for the files of a job."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import UsageError

if TYPE_CHECKING:
    from mtrain.spec.model import CheckpointSpec

AMPLE_BYTES = 32 << 30
"""Free space that counts as enough for any job, so that the size of the model, which takes a second, is not
computed."""
RECORDS_BYTES = 16 << 20
"""Space that is reserved for the records, logs and images of a run."""
FULL_BYTES = 1 << 20
"""Free space below which a disk counts as full, because writing has failed or soon will."""


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the file system of ``folder``, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def is_full(folder: Path) -> bool:
    """Return whether the file system of ``folder`` is full; False if its free space cannot be determined."""
    try:
        return free_bytes(folder) < FULL_BYTES
    except OSError:
        return False


def needed_bytes(rule: "CheckpointSpec", *, each_bytes: int, existing_bytes: int) -> int:
    """Return the free bytes that the files of a job need; the arguments are those of ``check_room``."""
    return _copies(rule) * each_bytes - existing_bytes + RECORDS_BYTES


def _copies(rule: "CheckpointSpec") -> int:
    """Return how many checkpoints there are while one is written."""
    return rule.keep_last + rule.keep_best + 1


def check_room(folder: Path, rule: "CheckpointSpec", *, each_bytes: int, existing_bytes: int) -> None:
    """Refuse a job whose checkpoints do not fit on the disk of ``folder``.

    Args:
        folder: folder of the checkpoints, or the one in which it will be created.
        rule: tells how many checkpoints are kept.
        each_bytes: size of one checkpoint.
        existing_bytes: size of what is there already and new checkpoints will take the place of.

    Raises:
        UsageError: there is too little room; the message says how much is needed.
    """
    copies, free = _copies(rule), free_bytes(folder)
    needed = needed_bytes(rule, each_bytes=each_bytes, existing_bytes=existing_bytes)
    if free < needed:
        raise UsageError(
            f"{folder}: {in_words(free)} free on its disk, and the checkpoints of this job need {in_words(needed)}"
            f"{' more' if existing_bytes else ''}: {copies} of {in_words(each_bytes)} (checkpoint.keep_last "
            f"{rule.keep_last}, keep_best {rule.keep_best}, and the one that is being written); make room, keep fewer, or write "
            "to another disk with report.dir"
        )


def in_words(size: int) -> str:
    """Write a number of bytes in a suitable unit, for example ``1.5 GiB``."""
    unit, name = next(
        ((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")) if abs(size) >= unit), (1 << 10, "KiB")
    )
    return f"{size / unit:.1f} {name}"
