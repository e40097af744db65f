"""Update rules on parts of arrays, with the rounding of the rule on whole arrays.

torch's fused kernels for CPU round the last elements of an array differently from the others: what does not fill a vector
register goes through scalar code, which multiplies and adds in one step where the vector code takes two, or the other way
round. Where an array is cut, other elements would be the last ones, and a job on shards would drift from one on whole
arrays. So each element is here given to the kernel in the way in which it would meet it in the whole array.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from mtrain.backends._torch import rules
from mtrain.backends._torch.shards import Part, memory_order

_WIDEST = 64
"""Elements; no CPU has wider registers (512 bits of bytes)."""
_TRIALS = 32
"""Registers' worth of random elements; about one in ten is rounded differently."""


@dataclass(slots=True)
class _Copy:
    """Some elements of a part, copied for the kernel: where they are in the part, and their places in the rule's lists."""

    part: int
    source: Tensor | slice
    place: int


class ShardRule:
    """A ``rules.Rule`` of one group on the parts that this rank holds."""

    def __init__(
        self, rule: str, parts: Sequence[Part], rank: int, options: Mapping[str, float], *, channels_last: bool
    ) -> None:
        self._held = [part.held.detach() for part in parts]
        width = vector_width(rule, self._held[0]) if parts else 1
        self._places: list[list[int]] = []
        self._copies: list[list[_Copy]] = []
        tensors: list[Tensor] = []
        sources: list[tuple[int, slice] | None] = []
        for i, part in enumerate(parts):
            body, copies = _split(part, rank, width, channels_last=channels_last)
            self._places.append([len(tensors)] if body else [])
            self._copies.append([])
            if body:
                tensors.append(self._held[i][:body])
                sources.append((i, slice(0, body)))
            for source in copies:
                length = width if isinstance(source, slice) else source.numel()
                self._copies[i].append(_Copy(i, source, len(tensors)))
                tensors.append(self._held[i].new_zeros(length))
                sources.append(None)
        self._tensors = tensors
        self._rule = rules.make(rule, tensors, options)
        self.moments = {name: [torch.zeros_like(held) for held in self._held] for name in self._rule.moments}
        for name, lists in self._rule.moments.items():
            for place, found in enumerate(sources):
                if found is not None:
                    lists[place] = self.moments[name][found[0]][found[1]]

    def apply(self, taken: Sequence[int], grads: Sequence[Tensor], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        places: list[int] = []
        parts: list[Tensor] = []
        copies = [copy for i in taken for copy in self._copies[i]]
        by_part = dict(zip(taken, grads, strict=True))
        for i in taken:
            for place in self._places[i]:
                places.append(place)
                parts.append(by_part[i][: self._tensors[place].numel()])
        for copy in copies:
            grad = torch.zeros_like(self._tensors[copy.place])
            _bring(grad, by_part[copy.part], copy.source)
            places.append(copy.place)
            parts.append(grad)
            for whole, scratch in self._pairs(copy):
                _bring(scratch, whole, copy.source)
        if places:
            self._rule.apply(places, parts, rate=rate, momentum=momentum)
        for copy in copies:
            for whole, scratch in self._pairs(copy):
                _take_back(whole, scratch, copy.source)

    def _pairs(self, copy: _Copy) -> Iterator[tuple[Tensor, Tensor]]:
        """A part and the copy for the kernel: weights, then each moment."""
        yield self._held[copy.part], self._tensors[copy.place]
        for name, lists in self._rule.moments.items():
            yield self.moments[name][copy.part], lists[copy.place]

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._rule.set_updates(updates)


def _bring(scratch: Tensor, part: Tensor, source: Tensor | slice) -> None:
    chosen = part[source]
    scratch[: chosen.numel()] = chosen


def _take_back(part: Tensor, scratch: Tensor, source: Tensor | slice) -> None:
    part[source] = scratch[: part[source].numel()]


def _split(part: Part, rank: int, width: int, *, channels_last: bool) -> tuple[int, list[Tensor | slice]]:
    """(elements from the start that the kernel takes as they are, elements to copy).

    A slice is copied to a full register, so that vector code meets it; places are those which scalar code meets: the last
    ones of the whole array in the order of its memory. They come last: what they give holds.
    """
    first, end = part.spans[rank]
    length = end - first
    whole = prod(part.shape)
    body = length - length % width
    copies: list[Tensor | slice] = []
    if body < length:
        copies.append(slice(body, length))
    if whole % width:
        order = memory_order(part.shape) if channels_last else torch.arange(whole)
        scalar = order[whole - whole % width :]
        scalar = scalar[(scalar >= first) & (scalar < end)] - first
        if scalar.numel():
            copies.append(scalar.to(part.held.device))
    return body, copies


def vector_width(rule: str, like: Tensor) -> int:
    """Elements of the type of ``like`` that the kernel of ``rule`` takes at once; 1 where all elements are rounded alike."""
    return 1 if like.device.type != "cpu" else _measured_width(rule, like.dtype)


@cache
def _measured_width(rule: str, dtype: torch.dtype) -> int:
    """The smallest power of two such that arrays of that length are rounded as one long array is."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(_TRIALS * _WIDEST, generator=generator, dtype=torch.float64).to(dtype)

    weights, grads, start = draw(), draw(), draw().abs()

    def stepped(width: int) -> list[Tensor]:
        held = weights.clone()
        pieces = list(held.split(width))
        chosen = rules.make(rule, pieces, {"weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0})
        moments = {name: start.clone() for name in chosen.moments}
        for name, whole in moments.items():
            chosen.moments[name][:] = whole.split(width)
        for _ in range(2):
            chosen.apply(range(len(pieces)), grads.split(width), rate=0.1, momentum=None)
        return [held, *moments.values()]

    expected = stepped(weights.numel())
    width = 1
    while width < _WIDEST and not all(torch.equal(a, b) for a, b in zip(stepped(width), expected, strict=True)):
        width *= 2
    return width
