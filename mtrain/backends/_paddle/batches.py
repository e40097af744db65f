"""Host micro batches onto the device."""

from collections.abc import Iterable, Iterator

import numpy as np
import paddle
from paddle import Tensor

from mtrain.core.interfaces import Array, HostBatch

DeviceBatch = dict[str, Tensor]


def _shared(array: Array) -> Tensor:
    """A tensor on the memory of ``array``, which it keeps alive; a copy where Paddle could not write to it or walk it."""
    usable = array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
    return paddle.Tensor(value=usable, place=paddle.CPUPlace(), zero_copy=True, stop_gradient=True)


def on_host(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Tensors that share the memory of the loader's arrays."""
    for host in loader:
        yield {name: _shared(array) for name, array in host.items()}


def on_cuda(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Tensors on this rank's device, from pinned memory; the next micro batch is sent before this one is used."""
    ahead: DeviceBatch | None = None
    for host in loader:
        sent = {
            name: paddle.to_tensor(array, place=paddle.CUDAPinnedPlace()).cuda(blocking=False)
            for name, array in host.items()
        }
        if ahead is not None:
            yield ahead
        ahead = sent
    if ahead is not None:
        yield ahead


def upload(loader: Iterable[HostBatch], device: str) -> Iterator[DeviceBatch]:
    """Micro batches on ``device``."""
    return on_host(loader) if device == "cpu" else on_cuda(loader)
