"""Copy micro batches from host memory to the device."""

from collections.abc import Iterable, Iterator

import numpy as np
import paddle
from paddle import Tensor

from mtrain.backends._paddle import internals
from mtrain.core.interfaces import Array, HostBatch

DeviceBatch = dict[str, Tensor]


def _share_memory(array: Array) -> Tensor:
    """Return a tensor that shares the memory of ``array`` and keeps it alive; a copy unless writable and contiguous."""
    shareable = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return internals.sharing_array(shareable)


def on_host(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Yield micro batches as CPU tensors that share the memory of the loader's arrays where possible."""
    for host_batch in loader:
        yield {name: _share_memory(array) for name, array in host_batch.items()}


def on_cuda(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Yield micro batches on this rank's device; each is sent, from pinned memory, before the previous one is used."""
    pending: DeviceBatch | None = None
    for host_batch in loader:
        batch = {
            name: paddle.to_tensor(array, place=paddle.CUDAPinnedPlace()).cuda(blocking=False)
            for name, array in host_batch.items()
        }
        if pending is not None:
            yield pending
        pending = batch
    if pending is not None:
        yield pending


def upload(loader: Iterable[HostBatch], device: str) -> Iterator[DeviceBatch]:
    """Yield micro batches on ``device``."""
    return on_host(loader) if device == "cpu" else on_cuda(loader)
