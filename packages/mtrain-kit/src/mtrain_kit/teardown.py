"""Check what remains after a backend is left, and what happens when a rank dies."""

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from mtrain.core.interfaces import RankSession
from mtrain_kit import training
from mtrain_kit.check_context import Surroundings, wait_until_settled
from mtrain_kit.checks import Measure, none_of
from mtrain_kit.training import Case

DEATH_UPDATE = 2
DEATH_FILE = "death.txt"


def measure_left(
    job: str, before: Surroundings, *, ranks: Sequence[int], usual_threads: Mapping[str, int]
) -> list[Measure]:
    """Measure the processes and threads that exist after this process has left the backend and did not before it
    entered.

    ``ranks``: process ids of all ranks. ``usual_threads``: names of the threads that the framework itself keeps.
    """

    def processes() -> list[str]:
        new = Surroundings.now(job).processes - before.processes - set(ranks)
        return [f"{pid} {_command(pid)}" for pid in sorted(new)]

    def threads() -> list[str]:
        now = Surroundings.now(job)
        native = [
            n for n, count in now.threads.items() if n and count > before.threads.get(n, 0) and n not in usual_threads
        ]
        python = [f"a Python thread ({ident})" for ident in now.python_threads - before.python_threads]
        return native + python

    return [
        none_of("processes", wait_until_settled(processes)),
        none_of("threads", wait_until_settled(threads)),
    ]


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:60]
    except psutil.Error:
        return "(ended)"


def die(session: RankSession, folder: Path) -> None:
    """Train; the last rank kills itself within the third update, after writing the time to ``DEATH_FILE``."""
    case, c = Case(precision="fp32", accumulate=2), session.collective
    model, optimizer = training.start_training(session, case.recipe(c.size))
    batches = training.batches_of(session, case)
    for update in range(training.UPDATES):
        if update == DEATH_UPDATE and c.rank == c.size - 1:
            with optimizer.micro_batch(last=False):
                optimizer.backward(model(next(batches))["total"])
            (folder / DEATH_FILE).write_text(str(time.time()))
            # No handler of a library or of Python runs, as when the kernel ends a process for lack of memory.
            signal.raise_signal(signal.SIGKILL)
        training.update_once(session, model, optimizer, batches, case, update)
