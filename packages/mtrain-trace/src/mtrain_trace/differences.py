"""Measure how far two trainings are apart at each update, and from which update on their bits differ.

Quantities are in the order in which an update computes them, so the first one that differs is the cause of those after it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from mtrain_trace import mixing
from mtrain_trace.reading import AVERAGE, ArrayRow, Trace, Update

START, SAMPLES, TARGETS, LOSS, SKIPPED = "start weights", "samples", "targets", "loss", "a skipped update"
GRADIENT, CLIP, SETTINGS = "gradient", "clipping", "optimizer settings"
MOMENTS, WEIGHTS, BUFFERS = "moments", "weights", "buffers"
STATE = (MOMENTS, WEIGHTS, BUFFERS, AVERAGE)
"""Parts of what an update leaves, in the order in which it computes them."""
ORDER = (START, SAMPLES, TARGETS, LOSS, SKIPPED, GRADIENT, CLIP, SETTINGS, *STATE)
MEASURED = (LOSS, GRADIENT, CLIP, *STATE)
"""Quantities whose difference has a size."""
MEANING = {
    LOSS: "difference / the larger",
    GRADIENT: "difference / the larger",
    CLIP: "difference / the larger",
    MOMENTS: "length of the difference / the larger length",
    WEIGHTS: "length of the difference / way moved by training",
    BUFFERS: "length of the difference / way moved by training",
    AVERAGE: "length of the difference / way moved by training",
}
"""Definition of the relative difference of each quantity; lengths are L2 norms over all arrays."""
FRAMEWORKS = ("torch", "paddle", "tensorflow")
# Without it, rounding of a part that did not move would be a difference of 100%.
STILL = 1e-4
"""Smallest movement assumed for a part, as a share of its length."""


@dataclass(frozen=True)
class Gap:
    """The difference of two trainings in one quantity."""

    first: int | None
    """Index of the first update after which the bits differ; None: they never do, or were not recorded."""
    curve: Any
    """(U,) relative difference at each update, see ``MEANING``; NaN where it was not recorded, infinity where one side alone
    is no finite number; empty for a quantity without a size."""

    @property
    def largest(self) -> float:
        """Return the largest difference over all updates; 0 for the same bits and for what was not recorded."""
        known = self.curve[~np.isnan(self.curve)]
        return float(known.max()) if len(known) else 0.0


def gaps(a: Trace, b: Trace) -> dict[str, Gap]:
    """Return the gap of each quantity over the updates that both have; those that neither has recorded are left out."""
    pairs = list(zip(a.updates, b.updates))
    found = {START: Gap(None if _same_start(a, b) else 0, np.zeros(0))}
    for what, differ in EXACT.items():
        if what == SAMPLES and not comparable(a, b, SAMPLES):
            continue
        found[what] = Gap(_first(differ(ours, theirs) for ours, theirs in pairs), np.zeros(0))
    found[LOSS] = Gap(
        _first(_other_loss(ours, theirs) for ours, theirs in pairs),
        np.array([relative(ours.loss, theirs.loss) for ours, theirs in pairs], dtype=float),
    )
    found[GRADIENT] = _gap_of_gradients(pairs, alike=not is_renamed(a, b))
    clips = np.array([_clip_difference(ours, theirs) for ours, theirs in pairs], dtype=float)
    found[CLIP] = Gap(_first(clips > 0), clips)
    for part in STATE:
        if comparable(a, b, part):
            found[part] = _gap_of_state(a, b, pairs, part)
    if AVERAGE in found and np.isnan(found[AVERAGE].curve).all():
        del found[AVERAGE]  # the recorder of foreign scripts knows none
    return found


def comparable(a: Trace, b: Trace, part: str) -> bool:
    """Return whether a part was measured alike on both sides, and under the same names, on which digests depend."""
    return a.measured.get(part) == b.measured.get(part) and (part == SAMPLES or not is_renamed(a, b))


def is_renamed(a: Trace, b: Trace) -> bool:
    """Return whether both train arrays of the same shapes under other names: a model that is wrapped or was renamed."""
    if not a.groups or not b.groups or set(a.groups) == set(b.groups) or len(a.groups) != len(b.groups):
        return False
    strangers = [sum(map(is_anonymous, trace.groups)) for trace in (a, b)]
    if strangers[0] != strangers[1] and max(strangers) < len(a.groups):
        return False  # arrays of one side alone are none of the model that is called
    shapes = [list(trace.optimizer_facts["shapes"].values()) for trace in (a, b)]
    if across_frameworks(
        a, b
    ):  # which may list arrays in another order; those that are no weights of `Linear` may be transposed, too
        shapes = [sorted(sorted(shape) for shape in side) for side in shapes]
    return not all(shapes) or shapes[0] == shapes[1]


def is_anonymous(name: str) -> bool:
    """Return whether a recorder has found an array in no model that was called, and named it by its place in the optimizer."""
    return re.fullmatch(r"group\d+\.\d+", name) is not None


def across_frameworks(a: Trace, b: Trace) -> bool:
    """Return whether two frameworks are known to have trained, whose layouts and definitions may differ."""
    return a.framework != b.framework and {a.framework, b.framework} <= set(FRAMEWORKS)


def total(rows: dict[str, ArrayRow]) -> ArrayRow | None:
    """Return the row of all arrays together; None for none."""
    result = None
    for row in rows.values():
        result = row if result is None else result.plus(row)
    return result


def whole(trace: Trace) -> ArrayRow:
    """Return the row of all start weights together."""
    return total(trace.start) or ArrayRow(0, 0.0, [0.0] * mixing.LENGTH)


def relative(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the larger one; infinity where one alone is no finite number."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return 0.0 if a == b else math.inf
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale else 0.0


def apart(a: ArrayRow, b: ArrayRow) -> float:
    """Return the distance of two arrays relative to the longer one; 0 for the same bits."""
    if a.digest == b.digest:
        return 0.0
    scale = max(a.norm, b.norm)
    distance = mixing.distance(a.sketch, b.sketch)
    if not math.isfinite(distance):
        return math.inf
    return distance / scale if scale else 0.0


def settings_differences(ours: Update, theirs: Update) -> list[str]:
    """Return in words in which settings two updates treat an array differently, whatever groups the arrays are in."""
    mine, other = settings_by_array(ours), settings_by_array(theirs)
    # By array and not by group: the same settings may be written as other groups.
    common = [name for name in mine if name in other]
    if not common and len(ours.rates) == len(theirs.rates):  # the arrays have other names: group by group
        mine, other = ({f"group {n}": options for n, options in enumerate(side.rates)} for side in (ours, theirs))
        common = list(mine)
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in common:
        for key in sorted(set(mine[name]) & set(other[name])):
            if not _equal(mine[name][key], other[name][key]):
                found.setdefault((key, _show(mine[name][key]), _show(other[name][key])), []).append(name)
    return [
        f"{key} {a} and {b}" + ("" if len(names) == len(common) else f" ({some(names)})")
        for (key, a, b), names in found.items()
    ]


def settings_by_array(update: Update) -> dict[str, dict[str, Any]]:
    """Return the options of the parameter group of each array."""
    return {name: options for names, options in zip(update.groups, update.rates) for name in names}


def some(names: list[str], limit: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _first(differs: Any) -> int | None:
    return next((place for place, one in enumerate(differs) if one), None)


def _same_start(a: Trace, b: Trace) -> bool:
    """Return whether weights and buffers before the first update have the same bits, as far as both were measured alike."""
    if not comparable(a, b, WEIGHTS) or not a.start or not b.start:
        return True
    if a.measured != b.measured:  # of one side, whole groups were measured
        return whole(a).digest == whole(b).digest
    parts = [(a.start, b.start)]
    if comparable(a, b, BUFFERS):
        parts.append((a.before.get(BUFFERS, {}), b.before.get(BUFFERS, {})))
    return all(_digests(mine) == _digests(other) for mine, other in parts)


def _digests(rows: dict[str, ArrayRow]) -> dict[str, int]:
    return {name: row.digest for name, row in rows.items()}


def _other_loss(ours: Update, theirs: Update) -> bool:
    """Return whether losses have other bits; what only one side computes is another loss."""
    names = {*ours.loss_parts, *theirs.loss_parts} if ours.loss_parts and theirs.loss_parts else set()
    both = [
        (ours.loss, theirs.loss),
        *((ours.loss_parts.get(name), theirs.loss_parts.get(name)) for name in sorted(names)),
    ]
    return any(x is None or y is None or (x != y and not (math.isnan(x) and math.isnan(y))) for x, y in both)


def _gap_of_gradients(pairs: list[tuple[Update, Update]], *, alike: bool) -> Gap:
    """Compare the gradients that optimizers use where both are recorded, and their lengths otherwise."""
    bits, curve = [], []
    for ours, theirs in pairs:
        mine, other = ours.parts.get("gradients"), theirs.parts.get("gradients")
        if mine is not None and other is not None and alike:
            bits.append(mine.digest != other.digest)
            curve.append(apart(mine, other))
        elif _one_has_none(ours, theirs):
            bits.append(True)
            curve.append(math.inf)
        elif ours.norm_before is None or theirs.norm_before is None:
            bits.append(False)
            curve.append(math.nan)
        else:
            curve.append(relative(ours.norm_before, theirs.norm_before))
            bits.append(curve[-1] > 0)
    return Gap(_first(bits), np.array(curve, dtype=float))


def _one_has_none(ours: Update, theirs: Update) -> bool:
    """Return whether one side alone has no gradient at all in an update that both made and recorded."""
    recorded = "weights" in ours.parts and "weights" in theirs.parts and ours.told_norm is theirs.told_norm is None
    return recorded and ("gradients" in ours.parts) != ("gradients" in theirs.parts)


def _gap_of_state(a: Trace, b: Trace, pairs: list[tuple[Update, Update]], part: str) -> Gap:
    """Compare what updates have left; a part that has moved is measured by the way that it has gone since the start."""
    begin = total(a.rows(part, -1)) if part != MOMENTS and not (part == BUFFERS and across_frameworks(a, b)) else None
    bits, curve = [], []
    for ours, theirs in pairs:
        mine, other = ours.parts.get(part), theirs.parts.get(part)
        if part == BUFFERS and across_frameworks(a, b):
            mine, other = (total(without_variances(update.arrays.get(part, {}))) for update in (ours, theirs))
        if mine is None or other is None:
            bits.append((mine is None) != (other is None) and bool(a.measured))
            curve.append(math.nan)
            continue
        bits.append(mine.digest != other.digest)
        curve.append(apart(mine, other) if begin is None else _measure_apart(mine, other, begin))
    if part == WEIGHTS and begin is None:
        curve = [math.nan] * len(pairs)
    return Gap(_first(bits), np.array(curve, dtype=float))


def without_variances(rows: dict[str, ArrayRow]) -> dict[str, ArrayRow]:
    """Return the buffers that all frameworks define alike: torch divides running variances by n - 1, Paddle by n."""
    return {name: row for name, row in rows.items() if not name.endswith("running_var")}


def _measure_apart(mine: ArrayRow, other: ArrayRow, begin: ArrayRow) -> float:
    """Return the distance of arrays relative to the way that they have gone since the start."""
    if mine.digest == other.digest:
        return 0.0
    # Both ways count: with one alone, a training whose rate is 0 would be infinitely far from its like.
    way = max(mixing.distance(mine.sketch, begin.sketch), mixing.distance(other.sketch, begin.sketch))
    way = max(way, STILL * mine.norm)
    distance = mixing.distance(mine.sketch, other.sketch)
    if not math.isfinite(distance):
        return math.inf
    return distance / way if way else (math.inf if distance else 0.0)


def _clip_difference(ours: Update, theirs: Update) -> float:
    """Return how differently gradients are clipped; a limit that is not reached changes nothing."""
    if not ours.clips or not theirs.clips:
        return math.nan
    both = (ours.clips[0], theirs.clips[0])
    if both[0] and both[1] and both[0]["limit"] == both[1]["limit"]:  # rounding may reach the limit on one side alone
        exceeded = max(both[0]["before"], both[1]["before"]) > both[0]["limit"]
        return relative(both[0]["before"], both[1]["before"]) if exceeded else 0.0
    mine, other = (clip if clip and clip["before"] > clip["limit"] else None for clip in both)
    if (mine is None) != (other is None):
        return math.inf
    if mine is None or other is None:
        return 0.0
    return math.inf if mine["limit"] != other["limit"] else relative(mine["before"], other["before"])


def other_targets(ours: Update, theirs: Update) -> bool:
    """Return whether the targets of two updates differ; by their sums where those of one side are known as a sum alone.

    As many targets as samples are expected however the ranks share them. Where the numbers differ, each rank makes its own
    (a loss over all pairs of a batch), and nothing is said.
    """
    if not ours.targets or not theirs.targets or other_count(ours, theirs):
        return False
    if ours.targets_summed != theirs.targets_summed:
        return (sum(ours.target_sums) - sum(theirs.target_sums)) & mixing.MASK != 0
    return ours.targets != theirs.targets


def other_count(ours: Update, theirs: Update) -> bool:
    """Return whether two updates have other numbers of targets for the same number of samples."""
    counts = (ours.target_count, theirs.target_count)
    return None not in counts and counts[0] != counts[1] and sum(ours.samples.values()) == sum(theirs.samples.values())


def pairs_of(update: Update) -> Any:
    """Return the pairs of sample and target, in no order; None where a rank has not one target for each sample."""
    pairs = []
    for samples, targets in zip(update.rank_samples, update.rank_targets):
        if len(samples) != len(targets):
            return None
        pairs += list(zip(samples, targets))
    return sorted(pairs)


def ranks_differ(update: Update) -> bool:
    """Return whether the ranks of one training use other settings than one another."""
    return any(rates != update.rank_rates[0] for rates in update.rank_rates)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return relative(a, b) < 1e-9  # a schedule may be computed in another order
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


EXACT: dict[str, Callable[[Update, Update], bool]] = {
    SAMPLES: lambda ours, theirs: bool(ours.samples and theirs.samples) and ours.samples != theirs.samples,
    TARGETS: lambda ours, theirs: other_targets(ours, theirs),
    SKIPPED: lambda ours, theirs: ours.skipped != theirs.skipped,
    SETTINGS: lambda ours, theirs: (
        bool(settings_differences(ours, theirs)) or ranks_differ(ours) != ranks_differ(theirs)
    ),
}
"""Quantities that are the same or not, without a size."""
