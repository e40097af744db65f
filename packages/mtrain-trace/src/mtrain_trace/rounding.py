"""Tell rounding from a mistake: by its size, by its growth, and by what grows out of one unit in the last place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtrain_trace.differences import BUFFERS, CLIP, GRADIENT, LOSS, MOMENTS, WEIGHTS, Gap
from mtrain_trace.reading import AVERAGE

FIRST = {LOSS: 1e-5, GRADIENT: 1e-3, CLIP: 1e-3, MOMENTS: 1e-3, WEIGHTS: 1e-3, BUFFERS: 1e-4, AVERAGE: 1e-3}
"""Relative differences up to these count as rounding of float32 where all that comes before has the same bits."""
# Later differences may be larger: rules that divide by the size of a gradient make much of the rounding of a small one.
FLOORS = {LOSS: 1e-5, GRADIENT: 1e-3, CLIP: 1e-3, MOMENTS: 1e-2, WEIGHTS: 1e-2, BUFFERS: 1e-4, AVERAGE: 1e-2}
"""The same wherever they appear."""
FIRST_GRADIENT = 2e-4
"""The same of the first gradient in float32, in which nothing has grown yet."""
NARROW_FLOORS = {LOSS: 1e-2, GRADIENT: 0.1, CLIP: 0.1, MOMENTS: 0.3, WEIGHTS: 0.3, BUFFERS: 2e-2, AVERAGE: 0.3}
"""The same where a side computes in bfloat16 or float16."""
JUMP = 30.0
"""Rounding grows by less than this factor over what it had reached before; more is a new cause."""
# A nudge rounds the weights once, a training rounds in each layer.
GROWTH = 10.0
"""A difference up to this multiple of that of a nudged repetition is rounding."""


@dataclass(frozen=True)
class Rounding:
    """How large a difference may be to count as rounding."""

    narrow: bool = False
    """Whether a side computes in bfloat16 or float16."""
    nudged: Mapping[str, Gap] = field(default_factory=dict)
    """The training beside itself with start weights moved by one unit in the last place; empty: it was not recorded."""

    def limit(self, what: str, place: int, seen: Mapping[str, float], *, alike: bool) -> float:
        """Return the largest difference that counts as rounding at an update.

        Args:
            what: the quantity.
            place: index of the update.
            seen: the largest difference of each quantity before.
            alike: whether all that comes before has the same bits.
        """
        floor = (NARROW_FLOORS if self.narrow else FIRST if alike else FLOORS)[what]
        if what == GRADIENT and place == 0 and not self.narrow:
            floor = FIRST_GRADIENT
        gap = self.nudged.get(what)
        if gap is not None and place < len(gap.curve) and not math.isnan(gap.curve[place]):
            return widen(floor, float(gap.curve[place]))
        grown = JUMP * max(seen.values(), default=0.0) if place else 0.0
        return max(floor, min(grown, 1.0))


def widen(bound: float, nudged: float) -> float:
    """Return a bound that also allows what grows out of a nudge."""
    return max(bound, GROWTH * nudged)
