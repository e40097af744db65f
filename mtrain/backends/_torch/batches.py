"""Copy micro batches from host memory to the device."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from mtrain.core.interfaces import Array, HostBatch

DeviceBatch = dict[str, Tensor]


def _tensor(array: Array) -> Tensor:
    """Return ``array`` as a tensor, without copying where torch allows it."""
    # torch has neither read-only tensors nor negative strides: such arrays are copied first.
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else np.array(array))


def on_host(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Yield micro batches as CPU tensors that share the memory of the loader's arrays where possible."""
    for host_batch in loader:
        yield {name: _tensor(array) for name, array in host_batch.items()}


class _Stage:
    """One slot of the upload pipeline: pinned memory, and the event after which that memory may be overwritten."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def upload(self, host_batch: HostBatch, device: torch.device, stream: torch.cuda.Stream) -> DeviceBatch:
        """Start copying on ``stream``; the caller's stream must wait for ``ready()`` before it reads the result."""
        if self._copied is not None:
            self._copied.synchronize()
        batch = {}
        with torch.cuda.stream(stream):
            for name, array in host_batch.items():
                source = _tensor(array)
                batch[name] = self._pin(name, source).to(device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        return batch

    def _pin(self, name: str, source: Tensor) -> Tensor:
        """Copy ``source`` into this slot's pinned memory, which grows to the largest batch."""
        pinned = self._pinned.get(name)
        if pinned is None or pinned.dtype != source.dtype or pinned.numel() < source.numel():
            pinned = torch.empty(max(source.numel(), 1), dtype=source.dtype, pin_memory=True)
            self._pinned[name] = pinned
        view = pinned[: source.numel()].view(source.shape)
        return view.copy_(source)

    def ready(self) -> torch.cuda.Event:
        """Return the event that marks the end of the last upload."""
        assert self._copied is not None
        return self._copied


def on_cuda(loader: Iterable[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    """Yield micro batches on ``device``; the next one is copied on a side stream while the current one is used."""
    stream = torch.cuda.Stream(device)
    stages = [_Stage(), _Stage()]
    source = iter(loader)
    ahead: list[tuple[DeviceBatch, _Stage]] = []
    turn = 0
    while True:
        with suppress(StopIteration):
            stage = stages[turn % 2]
            ahead.append((stage.upload(next(source), device, stream), stage))
            turn += 1
        if not ahead:
            return
        if len(ahead) < 2 and turn == 1:
            continue
        batch, stage = ahead.pop(0)
        current = torch.cuda.current_stream(device)
        current.wait_event(stage.ready())
        for tensor in batch.values():
            # The tensor was allocated on the side stream: without this the allocator could hand its memory to the next
            # upload while the compute stream still reads it.
            tensor.record_stream(current)
        yield batch


def upload(loader: Iterable[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    """Yield micro batches on ``device``, prefetched on CUDA."""
    return on_cuda(search_while_few(loader), device) if device.type == "cuda" else on_host(loader)


_FEW = 4
"""Shapes of images that training and evaluation of one size have, with some to spare."""


def search_while_few(loader: Iterable[HostBatch]) -> Iterator[HostBatch]:
    """Yield the micro batches, and stop cuDNN's search for the fastest algorithm where shapes of images keep changing.

    cuDNN tries all algorithms for each new shape, which takes longer than they save where sizes change all the time, as in
    multi-scale training.
    """
    shapes: set[tuple[tuple[int, ...], ...]] = set()
    for host_batch in loader:
        if len(shapes) <= _FEW:
            shapes.add(tuple(array.shape for array in host_batch.values() if array.ndim >= 4))
            if len(shapes) > _FEW:
                torch.backends.cudnn.benchmark = False
        yield host_batch
