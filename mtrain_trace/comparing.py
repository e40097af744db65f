"""Find the first thing in which two trainings part, in the order of cause.

At each update the quantities are looked at in the order in which they cause one another: start weights, samples, loss,
gradient, clipping, settings of the optimizer, weights, moments, buffers. A difference of float rounding is told apart
from a mistake by its size and by its growth: rounding grows smoothly from update to update, a mistake jumps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable

from mtrain_trace import mixing
from mtrain_trace.reading import Row, Trace, Update

START, SAMPLES, TARGETS, LOSS, SKIPPED = "start weights", "samples", "targets", "loss", "a skipped update"
GRADIENT, CLIP, SETTINGS = "gradient", "clipping", "optimizer settings"
WEIGHTS, MOMENTS, BUFFERS = "weights", "moments", "buffers"
FLOORS = {LOSS: 1e-5, GRADIENT: 1e-3, CLIP: 1e-3, WEIGHTS: 1e-2, MOMENTS: 1e-2, BUFFERS: 1e-4}
"""Relative differences up to these count as rounding of float32 wherever they appear."""
NARROW_FLOORS = {LOSS: 1e-2, GRADIENT: 0.1, CLIP: 0.1, WEIGHTS: 0.3, MOMENTS: 0.3, BUFFERS: 2e-2}
"""The same where a side computes in bfloat16 or float16."""
JUMP = 30.0
"""Rounding grows by less than this factor over what it had reached before; more is a new cause."""
CALIBRATED = 10.0
"""A difference up to this multiple of that of a nudged repetition is rounding, where a repetition was recorded."""


@dataclass(frozen=True)
class Parting:
    """The first thing in which two trainings part for more than rounding."""

    what: str
    update: int
    size: float
    """Relative difference; infinity where there is no scale."""
    place: int | None = None
    """Index of the update among those that are compared; None before the first one."""
    arrays: list[str] = field(default_factory=list)
    """Names of the arrays that differ most, the largest difference first; empty where they were not recorded."""


@dataclass
class Comparison:
    """What was found out about two trainings."""

    a: Trace
    b: Trace
    updates: int
    """Updates that both have."""
    parting: Parting | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Relative difference of each quantity at each update; NaN where it was not recorded."""
    bits_until: int = 0
    """Updates after which both still had the same bits of weights; 0: not even after the first."""
    sentences: list[str] = field(default_factory=list)
    """The likely cause and the remedy."""
    remarks: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What is wrong among the ranks of B, whether or not it has parted the trainings."""

    @property
    def verdict(self) -> str:
        """Return ``same bits``, ``same up to rounding`` or ``different``."""
        if self.parting is not None:
            return "different"
        begin = {name: row.digest for name, row in self.a.start.items()}
        same = begin == {name: row.digest for name, row in self.b.start.items()} and self.bits_until == self.updates
        same = same and all(not value > 0 for curve in self.curves.values() for value in curve)
        return "same bits" if same else "same up to rounding"


def compare(a: Trace, b: Trace, *, calibration: Trace | None = None) -> Comparison:
    """Compare two trainings, or the same optimizer of both.

    Args:
        a: the training that counts as right.
        b: the training whose differences are explained.
        calibration: ``a`` again with its start weights moved by one unit in the last place, to see how rounding grows.
    """
    a, b, remark = _aligned(a, b)
    updates = min(len(a.updates), len(b.updates))
    result = Comparison(a, b, updates, remarks=[*a.remarks, *b.remarks, *remark, *_not_compared(a, b)])
    allowed = _curves(a, calibration) if calibration is not None else {}
    result.curves = _curves(a, b)
    result.parting = _start(a, b)
    seen: dict[str, float] = {}
    narrow = _is_narrow(a) or _is_narrow(b)
    cast = _is_cast(a, b)
    result.remarks += _formats(a, b, cast=cast)
    for place in range(updates):
        ours, theirs = a.updates[place], b.updates[place]
        parted = result.parting is not None
        if result.bits_until == place and _same_bits(ours, theirs):
            result.bits_until = place + 1
        if parted:
            continue
        result.parting = _exact(ours, theirs, cast=cast)
        for what in (LOSS, SKIPPED, GRADIENT, CLIP, SETTINGS, WEIGHTS, MOMENTS, BUFFERS):
            if result.parting is not None:
                break
            if what in _YES_OR_NO:
                if _YES_OR_NO[what](ours, theirs):
                    result.parting = Parting(what, ours.number, math.inf)
                continue
            size = result.curves[what][place]
            limit = _limit(what, place, seen, allowed, narrow=narrow)
            if size > limit:
                result.parting = Parting(what, ours.number, size, arrays=worst_arrays(ours, theirs, what))
            elif not math.isnan(size):
                seen[what] = max(seen.get(what, 0.0), size)
        if result.parting is not None:
            result.parting = replace(result.parting, place=place)
    return result


def framework_of(trace: Trace) -> str:
    """Return the framework of a training: ``torch``, ``paddle`` or ``tensorflow``."""
    return str(trace.processes[0].get("framework", "torch"))


def is_renamed(a: Trace, b: Trace) -> bool:
    """Return whether two trainings have arrays of the same shapes under other names, of which nothing can be said."""
    if set(a.start) == set(b.start) or (framework_of(a) == framework_of(b) and set(a.start) & set(b.start)):
        return False
    # Arrays that are no weights of `Linear` may be transposed, too.
    mine, other = (sorted(sorted(shape) for shape in trace.described["shapes"].values()) for trace in (a, b))
    return mine == other


def _not_compared(a: Trace, b: Trace) -> list[str]:
    """Say what of two trainings is left out of the comparison."""
    remarks = []
    if is_renamed(a, b):
        remarks.append(
            f"the arrays of the two have other names ({some(sorted(a.start))}; {some(sorted(b.start))}): samples, labels, losses, "
            "norms of gradients and moments, clipping and settings are compared, the arrays themselves are not"
        )
    elif framework_of(a) != framework_of(b) and any(trace.processes[0].get("batch_norms") for trace in (a, b)):
        remarks.append(
            "running variances of BatchNorm are not compared: torch keeps the variance of a sample (divided by n - 1), Paddle that "
            "of the batch (divided by n)"
        )
    return remarks


def _aligned(a: Trace, b: Trace) -> tuple[Trace, Trace, list[str]]:
    """Cut the updates before a resume: where one starts with the bits of weights that the other had after an update."""
    for whole, part, cut_a in ((a, b, True), (b, a, False)):
        begin = _total(part.start)
        if begin is None or _has_start(whole, begin):
            continue
        for place, update in enumerate(whole.updates[:-1]):
            if "weights" in update.parts and update.parts["weights"].digest == begin.digest:
                cut = replace(whole, updates=whole.updates[place + 1 :], start=dict(part.start))
                names = ("B", "A") if cut_a else ("A", "B")
                remark = f"{names[0]} starts with the weights that {names[1]} has after update {update.number}, and is compared from there"
                return (cut, b, [remark]) if cut_a else (a, cut, [remark])
    return a, b, []


def _has_start(trace: Trace, begin: Row) -> bool:
    total = _total(trace.start)
    return total is not None and total.digest == begin.digest


def _limit(what: str, place: int, seen: dict[str, float], allowed: dict[str, list[float]], *, narrow: bool) -> float:
    """Return the largest difference that counts as rounding at an update."""
    floor = (NARROW_FLOORS if narrow else FLOORS)[what]
    if what in allowed and place < len(allowed[what]) and not math.isnan(allowed[what][place]):
        return max(floor, CALIBRATED * allowed[what][place])
    grown = JUMP * max(seen.values(), default=0.0) if place else 0.0
    return max(floor, min(grown, 1.0) if grown else 0.0)


def _curves(a: Trace, b: Trace) -> dict[str, list[float]]:
    """Return the relative difference of each quantity at each update that both have."""
    curves: dict[str, list[float]] = {what: [] for what in FLOORS}
    begin = _total(a.start)
    renamed = is_renamed(a, b)
    apart_of = _norms_apart if renamed else _apart
    buffers_apart = _apart if framework_of(a) == framework_of(b) else _means_apart
    for ours, theirs in zip(a.updates, b.updates):
        curves[LOSS].append(relative(ours.loss, theirs.loss))
        curves[GRADIENT].append(math.inf if _one_has_none(ours, theirs) else apart_of(ours, theirs, "gradients"))
        curves[CLIP].append(_clip_difference(ours, theirs))
        curves[WEIGHTS].append(math.nan if renamed else _moved_apart(ours, theirs, begin))
        curves[MOMENTS].append(apart_of(ours, theirs, "moments"))
        curves[BUFFERS].append(math.nan if renamed else buffers_apart(ours, theirs, "buffers"))
    return curves


def _total(rows: dict[str, Row]) -> Row | None:
    total = None
    for row in rows.values():
        total = row if total is None else total.plus(row)
    return total


def relative(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the larger one; infinity where one alone is no finite number."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return 0.0 if a == b else math.inf
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale else 0.0


def apart(a: Row, b: Row) -> float:
    """Return the distance of two arrays relative to the longer one; 0 for the same bits."""
    if a.digest == b.digest:
        return 0.0
    scale = max(a.norm, b.norm)
    return mixing.distance(a.sketch, b.sketch) / scale if scale else 0.0


def _apart(ours: Update, theirs: Update, part: str) -> float:
    if part not in ours.parts or part not in theirs.parts:
        return math.nan
    return apart(ours.parts[part], theirs.parts[part])


def _norms_apart(ours: Update, theirs: Update, part: str) -> float:
    """Return how the lengths of arrays differ whose names say nothing of each other."""
    if part not in ours.parts or part not in theirs.parts:
        return math.nan
    return relative(ours.parts[part].norm, theirs.parts[part].norm)


def _means_apart(ours: Update, theirs: Update, part: str) -> float:
    """Return how buffers differ that two frameworks compute by the same formula."""
    mine, other = (_without_variances(update.arrays.get(part, {})) for update in (ours, theirs))
    a, b = _total(mine), _total(other)
    return math.nan if a is None or b is None or set(mine) != set(other) else apart(a, b)


def _without_variances(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if not name.endswith("running_var")}


def _one_has_none(ours: Update, theirs: Update) -> bool:
    """Return whether one side alone has no gradient at all in an update that both made and recorded."""
    recorded = "weights" in ours.parts and "weights" in theirs.parts
    return recorded and ("gradients" in ours.parts) != ("gradients" in theirs.parts)


def _moved_apart(ours: Update, theirs: Update, begin: Row | None) -> float:
    """Return the distance of the weights relative to the way that they have gone since the start."""
    if "weights" not in ours.parts or "weights" not in theirs.parts or begin is None:
        return math.nan
    a, b = ours.parts["weights"], theirs.parts["weights"]
    if a.digest == b.digest:
        return 0.0
    # Both ways count: with one alone, a training whose rate is 0 would be infinitely far from its like.
    way = max(mixing.distance(a.sketch, begin.sketch), mixing.distance(b.sketch, begin.sketch))
    distance = mixing.distance(a.sketch, b.sketch)
    return distance / way if way else (math.inf if distance else 0.0)


def _clip_difference(ours: Update, theirs: Update) -> float:
    """Return how differently gradients are clipped; a limit that is not reached changes nothing."""
    mine, other = (
        clip if clip and clip["before"] > clip["limit"] else None for clip in (ours.clips[0], theirs.clips[0])
    )
    if (mine is None) != (other is None):
        return math.inf
    if mine is None or other is None:
        return 0.0
    return math.inf if mine["limit"] != other["limit"] else relative(mine["before"], other["before"])


def _same_bits(ours: Update, theirs: Update) -> bool:
    if "weights" not in ours.parts or "weights" not in theirs.parts:
        return ours.losses == theirs.losses
    return ours.parts["weights"].digest == theirs.parts["weights"].digest


def _start(a: Trace, b: Trace) -> Parting | None:
    """Return how the weights before the first update part; exactly, since nothing has been computed yet."""
    if is_renamed(a, b):
        return None
    if set(a.start) != set(b.start):
        return Parting(START, 0, math.inf, arrays=sorted(set(a.start) ^ set(b.start)))
    unequal = {
        name: apart(a.start[name], b.start[name]) for name in a.start if a.start[name].digest != b.start[name].digest
    }
    # A unit in the last place is the nudge of a calibration, and no other start. Where one side alone has narrow weights,
    # their rounding is no other start either; the difference of precision is named where it shows.
    if not unequal or max(unequal.values()) < (1e-2 if precision_of(a) != precision_of(b) else 1e-6):
        return None
    return Parting(START, 0, max(unequal.values()), arrays=sorted(unequal, key=lambda name: -unequal[name]))


def _is_cast(a: Trace, b: Trace) -> bool:
    """Return whether samples have other bits for their format alone: none occurs on both sides, and the labels do."""
    if precision_of(a) == precision_of(b) or not a.updates or not b.updates:
        return False
    ours, theirs = a.updates[0], b.updates[0]
    return bool(ours.targets) and ours.targets == theirs.targets and not ours.samples & theirs.samples


def _exact(ours: Update, theirs: Update, *, cast: bool) -> Parting | None:
    """Return how the samples or targets of an update part; they are compared bit by bit, in no order."""
    for what, mine, other in ((SAMPLES, ours.samples, theirs.samples), (TARGETS, ours.targets, theirs.targets)):
        if mine and other and mine != other and not (cast and what == SAMPLES):
            share = sum((mine - other).values()) / max(sum(mine.values()), 1)
            return Parting(what, ours.number, share or sum((other - mine).values()) / max(sum(other.values()), 1))
    if ours.samples == theirs.samples and ours.targets and theirs.targets and _pairs(ours) != _pairs(theirs):
        return Parting(TARGETS, ours.number, 1.0)
    return None


def _pairs(update: Update) -> Any:
    """Return the pairs of sample and target, in no order; None where a rank has not one target for each sample."""
    pairs = []
    for samples, targets in zip(update.rank_samples, update.rank_targets):
        if len(samples) != len(targets):
            return None
        pairs += list(zip(samples, targets))
    return sorted(pairs)


def precision_of(trace: Trace) -> str:
    """Return the formats in which a training computes, such as ``float32`` or ``float32, autocast to bfloat16``."""
    dtypes = list(trace.processes[0].get("model_dtypes") or trace.described["dtypes"])
    casts = {f"autocast to {update.autocast}" for update in trace.updates[:1] if update.autocast}
    return ", ".join([*dtypes, *casts])


def _formats(a: Trace, b: Trace, *, cast: bool) -> list[str]:
    """Say where the sides compute in other formats, and what is compared all the same."""
    mine, other = precision_of(a), precision_of(b)
    if cast:
        return [f"the samples are in other formats ({mine} and {other}), and only their labels are compared"]
    words = "differences as large as the rounding of the narrower format are called rounding"
    return [f"A computes in {mine}, B in {other}: {words}"] if mine != other else []


def _is_narrow(trace: Trace) -> bool:
    return any(word in precision_of(trace) for word in ("bfloat16", "float16", "autocast"))


def settings_differences(ours: Update, theirs: Update) -> list[str]:
    """Return in words in which settings two updates treat an array differently, whatever groups the arrays are in."""
    mine, other = settings_by_array(ours), settings_by_array(theirs)
    common = [name for name in mine if name in other]
    if not common and len(ours.rates) == len(theirs.rates):  # the arrays have other names: group by group
        mine, other = ({f"group {n}": options for n, options in enumerate(side.rates)} for side in (ours, theirs))
        common = list(mine)
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in common:
        for key in sorted(set(mine[name]) & set(other[name])):
            if not _equal(mine[name][key], other[name][key]):
                found.setdefault((key, _shown(mine[name][key]), _shown(other[name][key])), []).append(name)
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


def _ranks_differ(update: Update) -> bool:
    """Return whether the ranks of one training use other settings than one another."""
    return any(rates != update.rank_rates[0] for rates in update.rank_rates)


_YES_OR_NO: dict[str, Callable[[Update, Update], bool]] = {
    SKIPPED: lambda ours, theirs: ours.skipped != theirs.skipped,
    SETTINGS: lambda ours, theirs: (
        bool(settings_differences(ours, theirs)) or _ranks_differ(ours) != _ranks_differ(theirs)
    ),
}
"""What two updates have in common or not, without a size; SETTINGS stands where the order of cause has it."""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return relative(a, b) < 1e-9  # a schedule may be computed in another order
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return bool(a == b)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def worst_arrays(ours: Update, theirs: Update, what: str) -> list[str]:
    """Return the names of the arrays that differ, the largest relative difference first; empty if not recorded."""
    part = {GRADIENT: "gradients", CLIP: "gradients"}.get(what, what)
    mine, other = ours.arrays.get(part, {}), theirs.arrays.get(part, {})
    found = {name: apart(mine[name], other[name]) for name in mine if name in other}
    return sorted((name for name in found if found[name] > 0), key=lambda name: -found[name])


def detailed(comparison: Comparison) -> bool:
    """Return whether arrays were recorded at the update in which the trainings part."""
    parting = comparison.parting
    if parting is None or parting.place is None or parting.what in (SAMPLES, TARGETS, SKIPPED, SETTINGS):
        return True
    return bool(comparison.a.updates[parting.place].arrays and comparison.b.updates[parting.place].arrays)
