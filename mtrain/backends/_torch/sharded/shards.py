"""Record which rank holds which part of each array, and gather whole arrays from the parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mtrain.backends._torch import internals
from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.state.checks import aliases
from mtrain.errors import SpecError

Spans = tuple[tuple[int, int], ...]
"""For each rank, [first, end) of its part of a flattened array; the two are equal where a rank holds nothing."""

Box = tuple[tuple[int, int], ...]
"""[first, end) along each axis of an array."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Parts that are boxes of an array, as a mesh cuts them. Several ranks may hold the same one."""

    held: tuple[Box, ...]
    """The box of each rank."""
    first: tuple[bool, ...]
    """Whether a rank is the first that holds its box; that rank contributes it to the whole array."""


Layout = Spans | Boxes
"""Where the parts of all ranks lie in an array."""


def held_by(rank: int, layout: Layout, whole: Tensor) -> Tensor:
    """Return the part of ``rank``, as a view of ``whole`` where that is contiguous."""
    if isinstance(layout, Boxes):
        return whole[tuple(slice(first, end) for first, end in layout.held[rank])]
    first, end = layout[rank]
    return whole.reshape(-1)[first:end]


def sent_length(rank: int, layout: Layout) -> int:
    """Return how many elements ``rank`` contributes to the whole array."""
    if isinstance(layout, Boxes):
        return prod(end - first for first, end in layout.held[rank]) if layout.first[rank] else 0
    first, end = layout[rank]
    return end - first


def runs(rank: int, layout: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield [first, end) in the flattened array of the stretches that ``rank`` contributes, in the order of its elements."""
    if not sent_length(rank, layout):
        return
    if not isinstance(layout, Boxes):
        yield layout[rank]
        return
    box = layout.held[rank]
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = max((axis for axis, span in enumerate(box) if span != (0, shape[axis])), default=0)
    length = (box[cut][1] - box[cut][0]) * steps[cut] if box else 1
    for places in product(*(range(first, end) for first, end in box[:cut])):
        first = sum(place * step for place, step in zip((*places, box[cut][0]) if box else (), steps, strict=False))
        yield first, first + length


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an array that this rank holds, and where all ranks' parts lie."""

    shape: tuple[int, ...]
    """Shape of the whole array."""
    layout: Layout
    local: Tensor
    """This rank's elements, 1-D. The tensor lives as long as the job and is changed in place."""

    @property
    def spans(self) -> Spans:
        """The layout of an array that is cut when it is flattened."""
        assert not isinstance(self.layout, Boxes), "a mesh cuts arrays into boxes"
        return self.layout

    @property
    def owner(self) -> int | None:
        """Rank that holds the whole array; None where it is split over several."""
        holders = [rank for rank, (first, end) in enumerate(self.spans) if first < end]
        return holders[0] if len(holders) == 1 else None


def first_element(part: Part, rank: int) -> int:
    """Return the number, in the flattened array, of the element with which the part of ``rank`` begins."""
    if not isinstance(part.layout, Boxes):
        return part.layout[rank][0]
    box, first = part.layout.held[rank], 0
    for (start, _), length in zip(box, part.shape, strict=True):
        first = first * length + start
    return first


def find_ties(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that several layers share: alias -> first name."""
    return aliases(dict(model.named_parameters(remove_duplicate=False)))


def refuse_scalars(model: nn.Module, *, splits: str) -> None:
    """Refuse parameters without axes, such as a temperature, before a library fails on them; ``splits``: what splits.

    Raises:
        SpecError: There is one.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if names:
        raise SpecError(
            f"parameter {names[0]} has no axes (shape ()), which {splits} does not take; give it the shape (1,), as "
            "nn.Parameter(torch.zeros(1)), or train with ddp, horovod or solo"
        )


def memory_order(shape: tuple[int, ...]) -> Tensor:
    """Return the indices (int64) of an array's elements in the order in which a channels-last weight stores them."""
    places = torch.arange(prod(shape))
    if len(shape) != 4:
        return places
    return places.view(shape).permute(0, 2, 3, 1).reshape(-1)


def spans_of(length: int, bounds: Sequence[int]) -> Spans:
    """Return the spans of ``length`` elements cut at ``bounds`` (number of ranks + 1), clipped to the array."""
    inside = [min(max(bound, 0), length) for bound in bounds]
    return tuple(pairwise(inside))


class Parts:
    """The arrays of a model that are split over ranks, by name."""

    def __init__(self, parts: Mapping[str, Part], collective: TorchCollective, *, bucket: int) -> None:
        """Describe the ``parts``; whole arrays are gathered about ``bucket`` elements at a time."""
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
        """Return this rank's part of a whole array, as a view where the array is contiguous."""
        return held_by(self._collective.rank, self._parts[name].layout, whole)

    def whole(self, held: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole array) from the parts ``held`` by all ranks; every rank must pass the same names."""
        for names in self._batches(held):
            yield from self._gather({name: held[name].detach() for name in names}, device)

    def norm(self, held: Mapping[str, Tensor], device: torch.device, *, channels_last: bool) -> Tensor:
        """Return the L2 norm of the whole arrays, a number on ``device``; every rank must call with the same names.

        Each array's norm is taken in its memory order and all are added up in the order of ``held``: norms of parts
        would be rounded differently. An array is measured by the rank that holds it; a split one by one rank that gets it
        whole. On a mesh, whose products are rounded differently anyway, squares of parts are added up instead.
        """
        if not held:
            return torch.zeros((), device=device)
        if any(isinstance(self._parts[name].layout, Boxes) for name in held):
            return self._norm_of_boxes(held, device)
        dtype = next(iter(held.values())).dtype
        norms = torch.zeros(len(held), dtype=dtype, device=device)
        places = {name: i for i, name in enumerate(held)}
        owners = {name: self._parts[name].owner for name in held}
        for name, owner in owners.items():
            if owner == self._collective.rank:
                whole = held[name].to(device).view(self._parts[name].shape)
                norms[places[name]] = _norm(whole, channels_last=channels_last)
        for name, whole in self._deal({name: x for name, x in held.items() if owners[name] is None}, device):
            norms[places[name]] = _norm(whole, channels_last=channels_last)
        return torch.linalg.vector_norm(self._collective.all_reduce(norms, "sum"))

    def _deal(self, held: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole array) of this rank's share of split arrays; every rank must call with the same names."""
        own, size = self._collective.rank, self._collective.size
        loads = [0] * size
        for names in self._batches(held):
            shares: list[list[str]] = [[] for _ in range(size)]
            for name in names:
                rank = loads.index(min(loads))
                shares[rank].append(name)
                loads[rank] += prod(self._parts[name].shape)
            own_share, shares[own] = shares[own], []  # what stays here is not sent
            lengths = [[sent_length(rank, self._parts[name].layout) for name in own_share] for rank in range(size)]
            given = [held[name].reshape(-1) for share in shares for name in share]
            sent = torch.cat([held[names[0]].new_empty(0), *given]).to(device)
            counts = [0 if rank == own else sum(of) for rank, of in enumerate(lengths)]
            received = sent.new_empty(sum(counts))
            dist.all_to_all_single(received, sent, counts, [sum(held[name].numel() for name in x) for x in shares])
            lengths[own] = [0] * len(own_share)
            pieces = [list(x.split(of)) for x, of in zip(received.split(counts), lengths, strict=True)]
            pieces[own] = [held[name].reshape(-1).to(device) for name in own_share]
            for name, parts in zip(own_share, zip(*pieces, strict=True), strict=True):
                yield name, torch.cat(parts).view(self._parts[name].shape)

    def _norm_of_boxes(self, held: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return the norm from the squares of parts, each taken once however many ranks hold it."""
        rank = self._collective.rank
        own = [x for name, x in held.items() if sent_length(rank, self._parts[name].layout)]
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if own:
            squares = torch.stack([x.double() for x in internals.norms(own)]).square().sum().to(device)
        dtype = next(iter(held.values())).dtype
        return self._collective.all_reduce(squares.reshape(1), "sum")[0].sqrt().to(dtype)

    def _batches(self, held: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Group the names so that each group's arrays fill a bucket and have one dtype."""
        batch: list[str] = []
        batch_length = 0
        for name, part in held.items():
            length = prod(self._parts[name].shape)
            if batch and (batch_length + length > self._bucket or held[batch[-1]].dtype != part.dtype):
                yield batch
                batch, batch_length = [], 0
            batch.append(name)
            batch_length += length
        if batch:
            yield batch

    def _gather(self, held: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        size = self._collective.size
        layouts = {name: self._parts[name].layout for name in held}
        lengths = [sum(sent_length(rank, layout) for layout in layouts.values()) for rank in range(size)]
        own = self._collective.rank
        pieces = [part.reshape(-1)[: sent_length(own, layouts[name])].to(device) for name, part in held.items()]
        own_parts = torch.cat(pieces)
        padded = own_parts.new_zeros(max(lengths))
        padded[: own_parts.numel()] = own_parts
        gathered = self._collective.all_gather_tensor(padded)
        offsets = [0] * size
        for name, layout in layouts.items():
            whole = gathered.new_empty(self._parts[name].shape)
            for rank in range(size):
                if length := sent_length(rank, layout):
                    place = held_by(rank, layout, whole)
                    place.copy_(gathered[rank, offsets[rank] : offsets[rank] + length].view(place.shape))
                    offsets[rank] += length
            yield name, whole


def _norm(whole: Tensor, *, channels_last: bool) -> Tensor:
    if channels_last and whole.dim() == 4 and prod(whole.shape[2:]) > 1:
        whole = whole.contiguous(memory_format=torch.channels_last)
    return internals.norms([whole])[0]
