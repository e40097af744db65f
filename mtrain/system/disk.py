"""Room on the disk of a run folder."""

import shutil
from pathlib import Path

from mtrain.errors import UsageError
from mtrain.spec.model import CheckpointSpec

AMPLE_BYTES = 32 << 30
"""With so much free nobody asks how large the model is: that costs a second."""
RECORDS_BYTES = 16 << 20
"""For records, logs and pictures of a run."""
FULL_BYTES = 1 << 20
"""With less free, writing has failed or soon will."""


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of ``folder``, which need not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def is_full(folder: Path) -> bool:
    """Whether next to nothing can be written to the file system of ``folder``; False where it does not say."""
    try:
        return free_bytes(folder) < FULL_BYTES
    except OSError:
        return False


def check_room(folder: Path, rule: CheckpointSpec, *, each: int, held: int) -> None:
    """Refuse a job whose checkpoints do not fit on the disk of ``folder``.

    Args:
        folder: where they are written, or will be.
        rule: how many are kept.
        each: bytes of one.
        held: bytes of those that are there; they make room for new ones.

    Raises:
        UsageError: there is too little room; the message says what would fit.
    """
    copies = rule.keep_last + rule.keep_best + 1
    needed, free = copies * each - held + RECORDS_BYTES, free_bytes(folder)
    if free < needed:
        raise UsageError(
            f"{folder}: {in_words(free)} free on its disk, and the checkpoints of this job need {in_words(needed)}"
            f"{' more' if held else ''}: {copies} of {in_words(each)} (checkpoint.keep_last {rule.keep_last}, keep_best "
            f"{rule.keep_best}, and the one that is being written); make room, keep fewer, or write to another disk with "
            "report.dir"
        )


def in_words(size: int) -> str:
    """Bytes in the unit that suits them."""
    unit, name = next(
        ((unit, name) for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")) if abs(size) >= unit), (1 << 10, "KiB")
    )
    return f"{size / unit:.1f} {name}"
