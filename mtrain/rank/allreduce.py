"""The job of ``mtrain doctor``'s ranks: start a backend as for training, add up numbers, and report the result."""

import socket
import time
from typing import Any

import numpy as np

from mtrain.core import binding, ops
from mtrain.core.interfaces import RankSession
from mtrain.core.ranks.arithmetic import check_ranks
from mtrain.core.record_files import SUMMARY, write_json
from mtrain.rank import process
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder

VALUES = 1 << 20
"""Number of float32 values in the array that is timed: 4 MiB."""
ROUNDS = 5


def allreduce(resolved: Resolved, run_folder: RunFolder, *, leave: process.Leaving) -> None:
    """Run one rank. Rank 0 writes the summary: ranks, hosts, seconds to the first result, and MiB/s of the timed array.

    Raises:
        LaunchError: A result is wrong.
    """
    began = time.perf_counter()
    backend = resolved.backend
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            check_ranks(session, backend=backend, name=resolved.spec.backend.name)
            summary = _time_sums(session, began=began)
        except BaseException as error:
            leave(error)
            raise
        if session.collective.rank == 0:
            write_json(run_folder.path / SUMMARY, summary)


def _time_sums(session: RankSession, *, began: float) -> dict[str, Any]:
    """Time sums of a larger array over the ranks, and return the summary; every rank must call."""
    collective = session.collective
    seconds = time.perf_counter() - began
    hosts = collective.all_gather(socket.gethostname())
    large = next(iter(session.batches([{"values": np.zeros(VALUES, dtype=np.float32)}])))["values"]
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        ops.to_numpy(collective.all_reduce(large, "sum"))
        times.append(time.perf_counter() - start)
    # The median: the first rounds still open connections, and a busy machine may delay one of them.
    return {
        "reason": "done",
        "ranks": collective.size,
        "hosts": list(dict.fromkeys(hosts)),
        "seconds": round(seconds, 3),
        "mib_per_s": round(VALUES * 4 / (1 << 20) / sorted(times)[ROUNDS // 2], 1),
    }
