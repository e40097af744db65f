"""Read from the environment which rank this process is, as Paddle's launcher has set it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtrain.errors import LaunchError
from mtrain.system import job_secret

NEEDED = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS")


@dataclass(frozen=True, slots=True)
class OwnRank:
    """The place of one rank among all ranks of the job."""

    rank: int
    local_rank: int
    """Number among the ranks of this host, and number of the device among those that the host's ranks see."""
    size: int
    """Number of ranks."""
    first: tuple[str, int]
    """Address and port that the launcher has reserved for rank 0."""
    secret: str = field(default="", repr=False)
    """See ``system.job_secret``; empty where the ranks were not started by mtrain."""


def of_this_rank(environ: Mapping[str, str] = os.environ) -> OwnRank:
    """Read the place of this rank from ``environ``.

    Raises:
        LaunchError: A variable is missing, so this process was not started by Paddle's launcher.
    """
    missing = [name for name in NEEDED if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"backend fleet was not started by Paddle's launcher: {', '.join(missing)} not set; use "
            "`mtrain -c SPEC --backend fleet`, or `python -m paddle.distributed.launch --master IP:PORT`"
        )
    host, _, port = environ["PADDLE_TRAINER_ENDPOINTS"].partition(",")[0].rpartition(":")
    return OwnRank(
        rank=int(environ["PADDLE_TRAINER_ID"]),
        local_rank=int(environ.get("PADDLE_LOCAL_RANK") or environ.get("PADDLE_RANK_IN_NODE") or 0),
        size=int(environ["PADDLE_TRAINERS_NUM"]),
        first=(host, int(port)),
        secret=environ.get(job_secret.VARIABLE, ""),
    )


def announce(environ: dict[str, str]) -> None:
    """Set variables that Paddle reads while it connects the ranks."""
    os.environ.update(environ)
