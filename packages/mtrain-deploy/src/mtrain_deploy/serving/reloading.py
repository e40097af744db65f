"""Notices that the file of the served model was replaced, and serves the new one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.predictor import Predictor

POLL_S = 1.0
"""Seconds between two looks at the file, and for which a new file must have stayed the same."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """The file of a served model."""

    path: Path
    open: Callable[[], Predictor]
    """Opens the file as it is now."""


async def reload_when_new(
    watched: Watched, replace: Callable[[Predictor], Awaitable[None]], metrics: Metrics, *, poll_s: float = POLL_S
) -> None:
    """Serve each new file that appears at the path, until cancelled. One that cannot be served changes nothing."""
    served = _mark(watched.path)
    while True:
        await asyncio.sleep(poll_s)
        seen = _mark(watched.path)
        if seen is None or seen == served:
            continue
        await asyncio.sleep(poll_s)
        if _mark(watched.path) != seen:
            continue  # it is still being written
        served = seen
        try:
            await replace(await asyncio.to_thread(watched.open))
        except Exception as error:  # the file may be anything
            metrics.reloads.labels("failed").inc()
            logger.error("%s: the new file is not served, the former model stays: %s", watched.path, error)
        else:
            metrics.reloads.labels("done").inc()
            logger.warning("%s: the new file is served", watched.path)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
