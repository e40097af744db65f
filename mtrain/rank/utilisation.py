"""Model FLOPs utilisation (MFU): the share of the devices' peak that the operations of the model take."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.core.interfaces import Model, RankSession, Task
from mtrain.spec.model import Spec

log = logging.getLogger(__name__)
# Of NVIDIA's data sheets of the A100, H100 and H200 Tensor Core GPU. Those of H100 and H200 print twice as much, for sparse
# matrices, which training does not have.
PEAKS: Mapping[str, float] = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
}
"""Dense bf16 peak in 10^12 operations per second by a part of the device's name, the more special one first."""
_TERA = 1e12


def peak_of(spec: Spec, *, precision: str, device: str) -> float | None:
    """Return the peak of one device in 10^12 operations per second: that of the spec, else the published one; None: not known."""
    if spec.report.peak_tflops is not None:
        return spec.report.peak_tflops
    if precision != "bf16" or "MIG" in device:  # a part of a device has a part of its peak
        return None
    return next((peak for name, peak in PEAKS.items() if name in device), None)


class Utilisation:
    """Adds ``mfu``, 0 to 1, to the records of updates where the peak of the devices and the operations of the model are known."""

    def __init__(
        self, session: RankSession, plugin: Model, task: Task, *, peak_tflops: float | None, frozen: Sequence[str]
    ) -> None:
        self._peak = 0.0 if peak_tflops is None else peak_tflops * _TERA * session.collective.size
        self._of_sample: int | None = None
        # Rank 0 alone writes the records that have it.
        if peak_tflops is not None and session.collective.rank == 0:
            try:
                self._of_sample = plugin.operations(task, rows=1, frozen=frozen)
            except Exception as error:  # of the model's own code, without values: no reason to end the job
                log.warning("no mfu is recorded: %s could not be counted: %r", type(plugin).__name__, error)

    def of(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return ``mfu`` of the record of an update; empty where it is not known."""
        if not self._of_sample or not self._peak:
            return {}
        return {"mfu": self._of_sample * float(record["samples_per_second"]) / self._peak}
