"""Host micro batches onto the device."""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from mtrain.core.interfaces import Array, HostBatch

DeviceBatch = dict[str, Tensor]


def _tensor(array: Array) -> Tensor:
    """Zero copy where the array can be written to: torch has no read-only tensors."""
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else np.array(array))


def on_host(loader: Iterable[HostBatch]) -> Iterator[DeviceBatch]:
    """Tensors that share the memory of the loader's arrays."""
    for host in loader:
        yield {name: _tensor(array) for name, array in host.items()}


class _Stage:
    """One slot of the pipeline: pinned memory, and the event after which it may be written again."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def upload(self, host: HostBatch, device: torch.device, stream: torch.cuda.Stream) -> DeviceBatch:
        """Start copying; the caller's stream must wait for ``copied`` before it reads the result."""
        if self._copied is not None:
            self._copied.synchronize()
        batch = {}
        with torch.cuda.stream(stream):
            for name, array in host.items():
                source = _tensor(array)
                batch[name] = self._pin(name, source).to(device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        return batch

    def _pin(self, name: str, source: Tensor) -> Tensor:
        kept = self._pinned.get(name)
        if kept is None or kept.dtype != source.dtype or kept.numel() < source.numel():
            kept = torch.empty(max(source.numel(), 1), dtype=source.dtype, pin_memory=True)
            self._pinned[name] = kept
        view = kept[: source.numel()].view(source.shape)
        return view.copy_(source)

    def ready(self) -> torch.cuda.Event:
        """The event after the last upload."""
        assert self._copied is not None
        return self._copied


def on_cuda(loader: Iterable[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    """Tensors on ``device``; the next micro batch is copied on a side stream while this one is used."""
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
            # The allocator must not give this memory away while the compute stream reads it.
            tensor.record_stream(current)
        yield batch


def upload(loader: Iterable[HostBatch], device: torch.device) -> Iterator[DeviceBatch]:
    """Micro batches on ``device``, prefetched where it helps."""
    return on_cuda(loader, device) if device.type == "cuda" else on_host(loader)
