"""Measure how far two traces differ: the first update in which they do, in which quantity, and how the difference
grows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.studies.compare.traces import BUFFERS, EMA, MOMENTS, STATE, WEIGHTS, Trace

START, SAMPLES, LOSS, NORM = "start", "samples", "loss", "norm"
ORDER = (START, SAMPLES, LOSS, NORM, *STATE)
"""Quantities of an update; each stands before those that follow from it."""
MEASURED = (LOSS, NORM, *STATE)
"""Quantities whose difference has a size."""
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
"""Definition of the relative difference of each quantity; lengths are L2 norms over all arrays."""
_NONE = 1e-300
_STILL = 1e-4
"""Smallest movement assumed for a part, as a share of its length: rounding of a part that did not move is not a
difference of 100%."""


def ordinal(update: int) -> str:
    """Return an update in words, counted from 1 as displays count them; ``update`` counts from 0, as records do."""
    return f"update {update + 1}"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference of two jobs in one quantity."""

    first: int | None
    """The first update in which it differs; None: the same bits in all updates."""
    curve: Array
    """(U,) relative difference at each update, see ``MEANING``; empty for a quantity without a size. NaN if only one is
    finite."""

    @property
    def largest(self) -> float:
        """Return the largest difference over all updates; 0 for the same bits, inf if one job was not finite."""
        if self.first is None or not len(self.curve):
            return 0.0
        return float("inf") if np.isnan(self.curve).any() else float(self.curve.max())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences of job b from job a."""

    gaps: Mapping[str, Gap]
    """Gap of each quantity; quantities that neither job has are left out."""

    @property
    def first(self) -> int | None:
        """Return the first update in which the jobs differ; None: the same bits throughout."""
        return min((gap.first for gap in self.gaps.values() if gap.first is not None), default=None)

    @property
    def what(self) -> Sequence[str]:
        """Return the quantities that differ in that update, causes before consequences; empty for the same bits."""
        first = self.first
        return [name for name in ORDER if name in self.gaps and first is not None and self.gaps[name].first == first]


def difference(a: Trace, b: Trace) -> Difference:
    """Compare two traces of the same number of updates."""
    gaps = {START: _start(a, b), SAMPLES: Gap(first=_first(a.samples, b.samples), curve=np.zeros(0))}
    absent = np.full(a.updates, np.nan)  # a loss that only one of them computes differs from the start
    series = [
        (a.losses.get(name, absent), b.losses.get(name, absent)) for name in dict.fromkeys([*a.losses, *b.losses])
    ]
    ours, theirs = zip(*series, strict=True)
    gaps[LOSS] = _gap_of_numbers(ours, theirs, a.losses["total"], b.losses["total"])
    gaps[NORM] = _gap_of_numbers([a.norms], [b.norms], a.norms, b.norms)
    gaps |= {kind: _gap_of_state(a, b, kind) for kind in STATE if a.named(kind) or b.named(kind)}
    return Difference(gaps=gaps)


def same_bits(a: Trace, b: Trace) -> bool:
    """Return whether two traces are identical."""
    return a.updates == b.updates and difference(a, b).first is None


def _start(a: Trace, b: Trace) -> Gap:
    """Compare weights and buffers before the first update; a difference counts for update 0."""
    names = [*a.named(WEIGHTS), *a.named(BUFFERS)]
    same = all(a.digests[name][0] == b.digests.get(name, [""])[0] for name in names)
    return Gap(first=None if same else 0, curve=np.zeros(0))


def _first(a: Sequence[object], b: Sequence[object]) -> int | None:
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), None)


def _gap_of_numbers(a: Sequence[Array], b: Sequence[Array], shown_a: Array, shown_b: Array) -> Gap:
    """Compare the bits of the series ``a`` and ``b``; the size of the gap is that of ``shown_a`` and ``shown_b``."""
    firsts = [_first([x.tobytes() for x in one], [x.tobytes() for x in other]) for one, other in zip(a, b, strict=True)]
    both_nan = np.isnan(shown_a) & np.isnan(shown_b)
    curve = np.where(both_nan, 0.0, np.abs(shown_a - shown_b) / np.maximum(np.abs(shown_a), _NONE))
    return Gap(first=min((first for first in firsts if first is not None), default=None), curve=curve)


def _gap_of_state(a: Trace, b: Trace, kind: str) -> Gap:
    """Compare the state after each update: the state after update ``u`` is entry ``u + 1``."""
    names = sorted({*a.named(kind), *b.named(kind)})
    absent: Sequence[str] = [""] * (a.updates + 1)
    later_digests = [(a.digests.get(name, absent)[1:], b.digests.get(name, absent)[1:]) for name in names]
    first = min((index for one, other in later_digests if (index := _first(one, other)) is not None), default=None)
    one, other = a.sketch(kind), b.sketch(kind)
    lengths = np.linalg.norm(one[1:], axis=1)
    if kind != MOMENTS:
        lengths = np.maximum(np.linalg.norm(one[1:] - one[0], axis=1), _STILL * lengths)
    curve = np.linalg.norm(one[1:] - other[1:], axis=1) / np.maximum(lengths, _NONE)
    curve[: len(curve) if first is None else first] = 0.0
    return Gap(first=first, curve=curve)
