"""Update rules on parts of arrays that round every element as the rule on whole arrays would.

torch's fused CPU kernels round the last elements of an array differently from the others: elements that do not fill a
vector register go through scalar code, which multiplies and adds in one step where the vector code takes two, or the
other way round. In a part of an array other elements would be the last ones, so a job on shards would drift from one on
whole arrays. The rules here therefore pass each element to the same code, vector or scalar, that it meets in the whole
array.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from mtrain.backends._torch import rules
from mtrain.backends._torch.sharded.shards import Boxes, Part, memory_order

_WIDEST = 64
"""Upper bound of the vector width, in elements: 512-bit registers of one-byte elements."""
_TRIALS = 32
"""Number of full registers of random elements in the measurement; about one element in ten is rounded differently."""


@dataclass(slots=True)
class _Copy:
    """Elements of a part that are copied into a scratch tensor for the kernel."""

    part: int
    """Number of the part in its group."""
    source: Tensor | slice
    """Which elements of the part: a slice, or their indices."""
    place: int
    """Number of the scratch tensor in the lists of the rule."""


class ShardRule:
    """A ``rules.Rule`` for the parts that this rank holds of one group's parameters."""

    def __init__(
        self,
        rule: str,
        parts: Sequence[Part],
        rank: int,
        options: Mapping[str, float],
        *,
        shapes: Sequence[torch.Size],
        channels_last: bool,
    ) -> None:
        """Make the rule; ``shapes``: those in which gradients come, and in which moments are shown."""
        self._held = [part.local.detach() for part in parts]
        width = vector_width(rule, self._held[0]) if parts else 1
        self._places: list[list[int]] = []
        self._copies: list[list[_Copy]] = []
        tensors: list[Tensor] = []
        views: list[tuple[int, slice] | None] = []
        for i, part in enumerate(parts):
            body_length, copies = _cut_for_kernel(part, rank, width, channels_last=channels_last)
            self._places.append([len(tensors)] if body_length else [])
            self._copies.append([])
            if body_length:
                tensors.append(self._held[i][:body_length])
                views.append((i, slice(0, body_length)))
            for source in copies:
                length = width if isinstance(source, slice) else source.numel()
                self._copies[i].append(_Copy(i, source, len(tensors)))
                tensors.append(self._held[i].new_zeros(length))
                views.append(None)
        self._tensors = tensors
        # The rule gets the moments below in place of its own, which would take their memory a second time.
        parameters = [x if view is None else x[:0] for x, view in zip(tensors, views, strict=True)]
        self._rule = rules.make(rule, parameters, options)
        parameters[:] = tensors
        self._flat = {name: [torch.zeros_like(x) for x in self._held] for name in self._rule.moments}
        self.moments = {
            name: [x.view(shape) for x, shape in zip(flat, shapes, strict=True)] for name, flat in self._flat.items()
        }
        for name, lists in self._rule.moments.items():
            for place, view in enumerate(views):
                if view is not None:
                    lists[place] = self._flat[name][view[0]][view[1]]

    def leave_out(self, skip: Tensor | None) -> None:
        """See ``Rule.leave_out``: scratch copies that are left as they are come back as they were."""
        self._rule.leave_out(skip)

    def apply(
        self, part_numbers: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``."""
        places: list[int] = []
        rule_grads: list[Tensor] = []
        copies = [copy for i in part_numbers for copy in self._copies[i]]
        grads_by_part = {i: grad.reshape(-1) for i, grad in zip(part_numbers, grads, strict=True)}
        for i in part_numbers:
            for place in self._places[i]:
                places.append(place)
                rule_grads.append(grads_by_part[i][: self._tensors[place].numel()])
        for copy in copies:
            grad = torch.zeros_like(self._tensors[copy.place])
            _copy_in(grad, grads_by_part[copy.part], copy.source)
            places.append(copy.place)
            rule_grads.append(grad)
            for whole, scratch in self._pairs(copy):
                _copy_in(scratch, whole, copy.source)
        if places:
            self._rule.apply(places, rule_grads, learning_rate=learning_rate, momentum=momentum)
        for copy in copies:
            for whole, scratch in self._pairs(copy):
                _copy_out(whole, scratch, copy.source)

    def _pairs(self, copy: _Copy) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (part, its scratch copy for the kernel): first for the weights, then for each moment."""
        yield self._held[copy.part], self._tensors[copy.place]
        for name, lists in self._rule.moments.items():
            yield self._flat[name][copy.part], lists[copy.place]

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._rule.set_updates(updates)


def _copy_in(scratch: Tensor, part: Tensor, source: Tensor | slice) -> None:
    """Copy the elements ``source`` of ``part`` to the start of ``scratch``."""
    elements = part[source]
    scratch[: elements.numel()] = elements


def _copy_out(part: Tensor, scratch: Tensor, source: Tensor | slice) -> None:
    """Copy the start of ``scratch`` back to the elements ``source`` of ``part``."""
    part[source] = scratch[: part[source].numel()]


def _cut_for_kernel(part: Part, rank: int, width: int, *, channels_last: bool) -> tuple[int, list[Tensor | slice]]:
    """Return (number of leading elements that the kernel processes in place, elements to copy for it).

    A slice is copied into a full register, so that vector code processes it. A tensor of indices names the elements
    that scalar code processes: the last ones of the whole array in its memory order. It comes last, so that its results
    overwrite those of the slice where both contain an element.
    """
    if isinstance(part.layout, Boxes):
        return part.local.numel(), []  # a mesh does not have the bits of whole arrays anyway
    first, end = part.spans[rank]
    length = end - first
    whole_length = prod(part.shape)
    body_length = length - length % width
    copies: list[Tensor | slice] = []
    if body_length < length:
        copies.append(slice(body_length, length))
    if whole_length % width:
        element_order = memory_order(part.shape) if channels_last else torch.arange(whole_length)
        scalar_indices = element_order[whole_length - whole_length % width :]
        scalar_indices = scalar_indices[(scalar_indices >= first) & (scalar_indices < end)] - first
        if scalar_indices.numel():
            copies.append(scalar_indices.to(part.local.device))
    return body_length, copies


def vector_width(rule: str, like: Tensor) -> int:
    """Return how many elements of ``like``'s type the rule's kernel processes at once; 1 if it rounds all alike."""
    return 1 if like.device.type != "cpu" else _measured_width(rule, like.dtype)


@cache
def _measured_width(rule: str, dtype: torch.dtype) -> int:
    """Measure the smallest power of two such that arrays of that length are rounded like one long array."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(_TRIALS * _WIDEST, generator=generator, dtype=torch.float64).to(dtype)

    weights, grads, moment_start = draw(), draw(), draw().abs()

    def make_updates(width: int) -> list[Tensor]:
        stepped_weights = weights.clone()
        pieces = list(stepped_weights.split(width))
        trial_rule = rules.make(rule, pieces, {"weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0})
        moments = {name: moment_start.clone() for name in trial_rule.moments}
        for name, whole in moments.items():
            trial_rule.moments[name][:] = whole.split(width)
        for _ in range(2):
            trial_rule.apply(range(len(pieces)), grads.split(width), learning_rate=0.1, momentum=None)
        return [stepped_weights, *moments.values()]

    expected = make_updates(weights.numel())
    width = 1
    while width < _WIDEST and not all(torch.equal(a, b) for a, b in zip(make_updates(width), expected, strict=True)):
        width *= 2
    return width
