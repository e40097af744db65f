"""The job of ``mtrain doctor``'s ranks: start a backend as for training, add up numbers, and report the result."""

import socket
import time
from typing import Any

import numpy as np

from mtrain.core import binding, ops
from mtrain.core.completeness import check_session
from mtrain.core.interfaces import Array, RankSession
from mtrain.core.record_files import SUMMARY, write_json
from mtrain.errors import TrainingError
from mtrain.rank import process
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder

VALUES = 1 << 20
"""Number of float32 values in the array that is timed: 4 MiB."""
ROUNDS = 5


def allreduce(resolved: Resolved, run_folder: RunFolder, *, leave: process.Leaving) -> None:
    """Run one rank. Rank 0 writes the summary: ranks, hosts, seconds to the first result, and MiB/s of the timed array.

    Raises:
        TrainingError: The result is not the sum.
    """
    began = time.perf_counter()
    backend = resolved.backend
    binding.bind(backend.nn, backend.ops)
    with backend as session:
        try:
            check_session(session, backend=backend, name=resolved.spec.backend.name)
            summary = _add(session, began=began)
        except BaseException as error:
            leave(error)
            raise
        if session.collective.rank == 0:
            write_json(run_folder.path / SUMMARY, summary)


def _add(session: RankSession, *, began: float) -> dict[str, Any]:
    """Add numbers over ranks on host and device, time a larger array, and return the summary; every rank must call."""
    collective = session.collective
    value = np.full(4, collective.rank + 1.0, dtype=np.float32)
    expected = collective.size * (collective.size + 1) / 2
    # Both ways are checked, because a backend may exchange values of the host by another library than tensors of the device.
    _check(np.asarray(collective.all_reduce(value, "sum")), expected, where="on the host")
    on_device = next(iter(session.batches([{"values": value}])))["values"]
    _check(ops.to_numpy(collective.all_reduce(on_device, "sum")), expected, where="on the device")
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


def _check(values: Array, expected: float, *, where: str) -> None:
    if not np.array_equal(values, np.full(4, expected, dtype=np.float32)):
        raise TrainingError(f"the ranks added up to {values.tolist()} {where}, expected {expected:g} each")
