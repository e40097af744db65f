"""How far two traces are apart: the first update at which they part, in what, and how the gap grows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.comparing.traces import BUFFERS, EMA, MOMENTS, STATE, WEIGHTS, Trace
from mtrain.core.interfaces import Array

START, SAMPLES, LOSS, NORM = "start", "samples", "loss", "norm"
ORDER = (START, SAMPLES, LOSS, NORM, *STATE)
"""Quantities of an update, each before those that follow from it."""
MEASURED = (LOSS, NORM, *STATE)
"""Those with a size."""
WORDS: Mapping[str, str] = {
    START: "start weights",
    SAMPLES: "samples",
    LOSS: "loss",
    NORM: "gradient norm",
    MOMENTS: "moments",
    WEIGHTS: "weights",
    BUFFERS: "buffers",
    EMA: "averaged weights",
}
MEANING: Mapping[str, str] = {
    LOSS: "|a - b| / |a|",
    NORM: "|a - b| / |a|",
    MOMENTS: "length of the difference / length",
    WEIGHTS: "length of the difference / way moved by training",
    BUFFERS: "length of the difference / way moved by training",
    EMA: "length of the difference / way moved by training",
}
"""How a relative difference is taken; lengths are L2 over all arrays."""
_NONE = 1e-300
_STILL = 1e-4
"""Share of its length by which a part is taken to have moved at least: rounding is not a difference of 100% of no way at all."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One quantity of two jobs."""

    first: int | None
    """The update in which it differs first; None: the same bits in all of them."""
    curve: Array
    """(U,) relative difference at each update, see ``MEANING``; empty for what has no size. NaN where only one is finite."""

    @property
    def largest(self) -> float:
        """Over all updates; 0 for the same bits, inf where one job was not finite."""
        if self.first is None or not len(self.curve):
            return 0.0
        return float("inf") if np.isnan(self.curve).any() else float(self.curve.max())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Job b against job a."""

    gaps: Mapping[str, Gap]
    """By quantity; those that neither job has are left out."""

    @property
    def first(self) -> int | None:
        """The update in which they part; None: the same bits throughout."""
        return min((gap.first for gap in self.gaps.values() if gap.first is not None), default=None)

    @property
    def what(self) -> Sequence[str]:
        """The quantities that differ in that update, causes before consequences; empty for the same bits."""
        first = self.first
        return [name for name in ORDER if name in self.gaps and first is not None and self.gaps[name].first == first]


def difference(a: Trace, b: Trace) -> Difference:
    """Compare two traces of the same number of updates."""
    gaps = {START: _start(a, b), SAMPLES: Gap(first=_first(a.samples, b.samples), curve=np.zeros(0))}
    gaps[LOSS] = _of_numbers(
        list(a.losses.values()), [b.losses[name] for name in a.losses], a.losses["total"], b.losses["total"]
    )
    gaps[NORM] = _of_numbers([a.norms], [b.norms], a.norms, b.norms)
    gaps |= {kind: _of_state(a, b, kind) for kind in STATE if a.named(kind) or b.named(kind)}
    return Difference(gaps=gaps)


def same_bits(a: Trace, b: Trace) -> bool:
    """Whether nothing tells the two apart."""
    return a.updates == b.updates and difference(a, b).first is None


def _start(a: Trace, b: Trace) -> Gap:
    """Weights and buffers before the first update; a difference belongs to update 0."""
    names = [*a.named(WEIGHTS), *a.named(BUFFERS)]
    same = all(a.digests[name][0] == b.digests.get(name, [""])[0] for name in names)
    return Gap(first=None if same else 0, curve=np.zeros(0))


def _first(a: Sequence[object], b: Sequence[object]) -> int | None:
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), None)


def _of_numbers(a: Sequence[Array], b: Sequence[Array], shown_a: Array, shown_b: Array) -> Gap:
    """``a`` and ``b``: series whose bits are compared; the sizes are those of the ``shown``."""
    firsts = [_first([x.tobytes() for x in one], [x.tobytes() for x in other]) for one, other in zip(a, b, strict=True)]
    both_bad = np.isnan(shown_a) & np.isnan(shown_b)
    curve = np.where(both_bad, 0.0, np.abs(shown_a - shown_b) / np.maximum(np.abs(shown_a), _NONE))
    return Gap(first=min((first for first in firsts if first is not None), default=None), curve=curve)


def _of_state(a: Trace, b: Trace, kind: str) -> Gap:
    """What update ``u`` leaves behind is entry ``u + 1``."""
    names = sorted({*a.named(kind), *b.named(kind)})
    absent: Sequence[str] = [""] * (a.updates + 1)
    behind = [(a.digests.get(name, absent)[1:], b.digests.get(name, absent)[1:]) for name in names]
    first = min((found for one, other in behind if (found := _first(one, other)) is not None), default=None)
    one, other = a.sketch(kind), b.sketch(kind)
    lengths = np.linalg.norm(one[1:], axis=1)
    if kind != MOMENTS:
        lengths = np.maximum(np.linalg.norm(one[1:] - one[0], axis=1), _STILL * lengths)
    curve = np.linalg.norm(one[1:] - other[1:], axis=1) / np.maximum(lengths, _NONE)
    curve[: len(curve) if first is None else first] = 0.0
    return Gap(first=first, curve=curve)
