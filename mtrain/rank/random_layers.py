"""Random layers of a user's own module: torch and Paddle seed them for each shard of an update."""

from collections.abc import Mapping
from typing import Any

KEY = "random_shards"
"""Key in ``extra`` of a checkpoint: number of parts of an update that draw random numbers of their own."""


def changed_since(extra: Mapping[str, Any] | None, shards: int) -> str:
    """Return a warning if a job draws other random numbers than the one that it continues; else an empty text.

    ``extra``: that of the checkpoint; None: the job starts anew. ``shards``: ranks times micro batches of this job.
    """
    before = None if extra is None else extra.get(KEY)
    if before in (None, shards):
        return ""
    return (
        f"the checkpoint was trained with updates in {before} parts (ranks x micro batches), this job divides them into {shards}: "
        "dropout and other random layers of your module draw other numbers from here on; to continue exactly, keep the product"
    )
