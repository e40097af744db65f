"""Copies of checkpoints, as a training job on its ranks makes them: rank 0 copies, and all wait at the end."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Collective
from mtrain.records.reporter import Report
from mtrain.system.runfolder import RunFolder
from mtrain.weights.backup.copier import Copier, Copies

EVERY_S = 0.2
"""Seconds between two looks at a copy that the end of a job waits for."""


def make_copies(spec: Any, run_folder: RunFolder, collective: Collective) -> Copies:
    """Return what copies the checkpoints of a run: on rank 0, where ``checkpoint.copy_to`` is given."""
    if spec.checkpoint.copy_to is None or collective.rank != 0:
        return Copies()
    return Copier(spec.checkpoint, run_folder.path)


def catch_up(copies: Copies, run_folder: RunFolder) -> None:
    """Begin to copy: the newest checkpoint that an earlier attempt has written, unless that was copied then."""
    copies.start()
    whole = [path for path in store.list_all(run_folder.checkpoints) if store.looks_whole(path)]
    if whole:
        copies.add(whole[-1])


def report(copies: Copies, to: Report) -> None:
    """Report what has happened to copies since the last call. It returns at once."""
    for news in copies.news():
        to.event(news.kind, **news.fields)


def settle(spec: Any, copies: Copies, collective: Collective, to: Report, *, stop: Callable[[], bool]) -> None:
    """Wait until the last copy is made or has failed; every rank must call.

    Two copies may be due: the one under way and the newest. Each is given up once nothing of it has arrived for
    ``checkpoint.copy_timeout_s``. ``stop``: somebody asks for the end, so the copy is given up.
    """
    if spec.checkpoint.copy_to is None:
        return
    told = False
    # All ranks look together again and again: a single collective in which they wait for minutes would time out and end the job.
    while True:
        report(copies, to)
        busy, asked = collective.all_reduce(np.array([float(not copies.is_settled()), float(stop())]), "mean")
        if busy <= 0:
            return
        if asked > 0:
            to.event(
                "warning", message="the copy of the last checkpoint was given up, because the job was asked to end"
            )
            return
        if not told:
            to.event("note", message="waiting for the copy of the last checkpoint")
            told = True
        time.sleep(EVERY_S)
