"""The state of a job as a stream of arrays, of which rank 0 alone gets whole ones; see ``core.interfaces.StateStream``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mtrain.backends._torch import state
from mtrain.backends._torch.collective import DistributedCollective
from mtrain.backends._torch.sharded.shards import Layout, held_by, runs, sent_length
from mtrain.core.interfaces import Array, Outline, Part

BUCKET_BYTES = 16 << 20
"""Small arrays are sent together, up to this size; larger ones alone, in pieces of this size."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One array of the state as this rank holds it."""

    tensor: Tensor
    """The whole array; this rank's part, flattened or not, where it is split."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    layout: Layout | None = None
    """The parts of all ranks; None: every rank holds the whole array."""


class Gather:
    """Brings the parts of arrays to rank 0, over a connection of its own: another thread may use it while training goes on."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size
        self._group: Any = None

    def connect(self, timeout: timedelta) -> None:
        """Connect the ranks of torch's default group, the first time; every rank must call, in the thread that trains.

        ``timeout``: a transfer that takes longer fails.
        """
        if self._group is None and self._size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_connected(self) -> bool:
        """Whether there are other ranks to which ``connect`` has connected this one."""
        return self._group is not None

    def exchange(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks; every rank must call."""
        return DistributedCollective(host_group=self._group).all_gather(value)

    def close(self) -> None:
        """Drop the connection."""
        self._group = None

    def arrays(self, entries: Sequence[StateEntry]) -> Iterator[Array | None]:
        """Yield whole arrays on rank 0, None on others. Every rank must call, and go to the end."""
        for batch in _batches(entries):
            if batch[0].layout is not None:
                yield from self._receive_parts(batch) if self.rank == 0 else self._send_parts(batch)
            else:
                yield state.on_host(batch[0].tensor) if self.rank == 0 else None

    def _send_parts(self, batch: Sequence[StateEntry]) -> Iterator[None]:
        pieces = [entry.tensor.detach().reshape(-1)[: self._length(entry, self.rank)].cpu() for entry in batch]
        own = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        for piece in _bytes(own).split(BUCKET_BYTES):
            dist.send(piece, dst=0, group=self._group)
        yield from (None for _ in batch)

    def _receive_parts(self, batch: Sequence[StateEntry]) -> Iterator[Array]:
        wholes = [_room(prod(entry.shape), entry.tensor.dtype).view(entry.shape) for entry in batch]
        for rank in range(self._size):
            lengths = [self._length(entry, rank) for entry in batch]
            places = [
                held_by(rank, entry.layout, whole) if length else whole.reshape(-1)[:0]
                for entry, whole, length in zip(batch, wholes, lengths, strict=True)
                if entry.layout is not None
            ]
            if rank == 0:
                for place, entry in zip(places, batch, strict=True):
                    place.copy_(entry.tensor.detach().reshape(place.shape))
            elif len(batch) == 1 and places[0].is_contiguous():
                self._receive(places[0].reshape(-1), rank)
            else:
                together = _room(sum(lengths), batch[0].tensor.dtype)
                self._receive(together, rank)
                for place, piece in zip(places, together.split(lengths), strict=True):
                    place.copy_(piece.view(place.shape))
        while wholes:
            yield state.on_host(wholes.pop(0))

    def _length(self, entry: StateEntry, rank: int) -> int:
        """Return how many elements ``rank`` sends of an entry."""
        assert entry.layout is not None
        return sent_length(rank, entry.layout)

    def _receive(self, place: Tensor, rank: int) -> None:
        for piece in _bytes(place).split(BUCKET_BYTES):
            dist.recv(piece, src=rank, group=self._group)


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous 1-D tensor as bytes; without any where it is empty."""
    return tensor.contiguous().view(torch.uint8) if len(tensor) else torch.empty(0, dtype=torch.uint8)


def _room(length: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised host memory for ``length`` elements."""
    if not length:
        return torch.empty(0, dtype=dtype)  # numpy gives empty arrays strides that torch cannot view
    return torch.from_numpy(np.empty(length * dtype.itemsize, np.uint8)).view(dtype)


def _batches(entries: Sequence[StateEntry]) -> Iterator[list[StateEntry]]:
    """Group entries that are sent together: split ones of one type up to ``BUCKET_BYTES``; all others alone."""
    batch: list[StateEntry] = []
    batch_bytes = 0
    for entry in entries:
        size_bytes = prod(entry.shape) * entry.tensor.dtype.itemsize
        fits = batch_bytes + size_bytes <= BUCKET_BYTES and entry.layout is not None
        if batch and not (fits and batch[0].layout is not None and batch[0].tensor.dtype == entry.tensor.dtype):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(entry)
        batch_bytes += size_bytes
    if batch:
        yield batch


class TorchStream:
    """See ``core.interfaces.StateStream``."""

    def __init__(
        self,
        entries: Mapping[Part, Mapping[str, StateEntry]],
        counters: dict[str, float],
        gather: Gather,
        *,
        copied: bool,
    ) -> None:
        """Make the stream; ``copied``: see ``Capabilities.stream``."""
        self.counters = counters
        self._gather = gather
        self._entries = _copy_to_host(entries, rank=gather.rank) if copied else entries
        self.outlines: Mapping[Part, Mapping[str, Outline]] = {
            part: {name: Outline(tuple(entry.shape), _type(entry.tensor.dtype)) for name, entry in of_part.items()}
            for part, of_part in entries.items()
        }

    def arrays(self, part: Part, names: Sequence[str]) -> Iterator[Array | None]:
        """See ``StateStream.arrays``."""
        entries = self._entries[part]
        return self._gather.arrays([entries[name] for name in names])


class SplitTorchStream(TorchStream):
    """See ``core.interfaces.SplitStream``; its gather is connected."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self._gather.rank

    def held(self, part: Part, names: Sequence[str]) -> Iterator[tuple[str, int, Array]]:
        """See ``SplitStream.held``."""
        for name in names:
            entry = self._entries[part][name]
            if entry.layout is None:
                if self.rank == 0:
                    yield name, 0, state.on_host(entry.tensor).reshape(-1)
            elif length := sent_length(self.rank, entry.layout):
                values, done = state.on_host(entry.tensor.detach().reshape(-1)[:length]), 0
                for first, end in runs(self.rank, entry.layout, entry.shape):
                    yield name, first, values[done : done + end - first]
                    done += end - first

    def exchange(self, value: Any) -> list[Any]:
        """See ``SplitStream.exchange``."""
        return self._gather.exchange(value)


def _copy_to_host(entries: Mapping[Part, Mapping[str, StateEntry]], *, rank: int) -> dict[Part, dict[str, StateEntry]]:
    """Copy what this rank contributes to the host: its parts, and on rank 0 whole arrays; tied weights once."""
    copies: dict[Any, Tensor] = {}

    def copy(entry: StateEntry) -> StateEntry:
        x = entry.tensor
        if entry.layout is None and rank != 0:
            return entry
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) if x.numel() else id(entry)
        if key not in copies:
            copies[key] = x.detach().to("cpu", copy=True)
        return replace(entry, tensor=copies[key])

    return {part: {name: copy(entry) for name, entry in of_part.items()} for part, of_part in entries.items()}


def _type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the type of the array that ``state.on_host`` makes of a tensor."""
    return state.on_host(torch.empty(0, dtype=dtype)).dtype
