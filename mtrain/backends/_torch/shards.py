"""Who holds which part of each array, and whole arrays made of parts again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from mtrain.backends._torch.collective import TorchCollective

Spans = tuple[tuple[int, int], ...]
"""Per rank: first element and end of its part of a flattened array; equal where it holds none."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of an array."""

    shape: tuple[int, ...]
    spans: Spans
    held: Tensor
    """1-D; lives as long as the job and is changed in place."""

    @property
    def owner(self) -> int | None:
        """The one rank that holds all of it; None where it is split."""
        holders = [rank for rank, (first, end) in enumerate(self.spans) if first < end]
        return holders[0] if len(holders) == 1 else None


def memory_order(shape: tuple[int, ...]) -> Tensor:
    """Places (int64) of the elements of an array of ``shape`` in the order in which a weight channels last holds them."""
    places = torch.arange(prod(shape))
    if len(shape) != 4:
        return places
    return places.view(shape).permute(0, 2, 3, 1).reshape(-1)


def spans_of(length: int, bounds: Sequence[int]) -> Spans:
    """Spans of an array of ``length`` elements that is cut at ``bounds`` (one more than ranks, may lie outside)."""
    inside = [min(max(bound, 0), length) for bound in bounds]
    return tuple(pairwise(inside))


class Parts:
    """The split arrays of a model, by name."""

    def __init__(self, parts: Mapping[str, Part], collective: TorchCollective, *, bucket: int) -> None:
        """``bucket``: arrays are gathered so many elements at a time."""
        self._parts = parts
        self._collective = collective
        self._bucket = bucket

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __len__(self) -> int:
        return len(self._parts)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole array, as a view where it is contiguous."""
        first, end = self._parts[name].spans[self._collective.rank]
        return whole.reshape(-1)[first:end]

    def whole(self, held: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Whole arrays from the parts ``held`` of all ranks, in order; every rank calls with the same names."""
        for names in self._batches(held):
            yield from self._gather({name: held[name].detach() for name in names}, device)

    def norm(self, held: Mapping[str, Tensor], device: torch.device, *, channels_last: bool) -> float:
        """L2 norm of the whole arrays, each taken in the order of its memory and all added up in the order of ``held``.

        Norms of parts would be rounded differently. An array that one rank holds is measured there; one that is split is
        put together for it, a bucket at a time. Every rank calls with the same names.
        """
        if not held:
            return 0.0
        dtype = next(iter(held.values())).dtype
        norms = torch.zeros(len(held), dtype=dtype, device=device)
        owners = {name: self._parts[name].owner for name in held}
        for i, name in enumerate(held):
            if owners[name] == self._collective.rank:
                norms[i] = _norm(held[name].to(device).view(self._parts[name].shape), channels_last=channels_last)
        norms = self._collective.all_reduce(norms, "sum")
        places = {name: i for i, name in enumerate(held)}
        for name, whole in self.whole({name: x for name, x in held.items() if owners[name] is None}, device):
            norms[places[name]] = _norm(whole, channels_last=channels_last)
        return float(torch.linalg.vector_norm(norms))

    def _batches(self, held: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Names whose arrays together fill a bucket; all of one type."""
        batch: list[str] = []
        filled = 0
        for name, part in held.items():
            length = prod(self._parts[name].shape)
            if batch and (filled + length > self._bucket or held[batch[-1]].dtype != part.dtype):
                yield batch
                batch, filled = [], 0
            batch.append(name)
            filled += length
        if batch:
            yield batch

    def _gather(self, held: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        size = self._collective.size
        lengths = [sum(end - first for first, end in (self._parts[n].spans[r] for n in held)) for r in range(size)]
        mine = torch.cat([part.reshape(-1).to(device) for part in held.values()])
        padded = mine.new_zeros(max(lengths))
        padded[: mine.numel()] = mine
        everyone = self._collective.all_gather_tensor(padded)
        places = [0] * size
        for name in held:
            pieces = []
            for rank, (first, end) in enumerate(self._parts[name].spans):
                pieces.append(everyone[rank, places[rank] : places[rank] + end - first])
                places[rank] += end - first
            yield name, torch.cat(pieces).view(self._parts[name].shape)


def _norm(whole: Tensor, *, channels_last: bool) -> Tensor:
    if channels_last and whole.dim() == 4 and prod(whole.shape[2:]) > 1:
        whole = whole.contiguous(memory_format=torch.channels_last)
    return torch._foreach_norm([whole])[0]
