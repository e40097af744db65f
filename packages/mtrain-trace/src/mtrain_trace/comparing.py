"""Find the first thing in which two trainings part, in the order of cause.

At each update the quantities are looked at in the order in which they cause one another: start weights, samples, loss,
gradient, clipping, settings of the optimizer, moments, weights, buffers. A difference of float rounding is told apart
from a mistake by its size and by its growth: rounding grows smoothly from update to update, a mistake jumps.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mtrain_trace import differences
from mtrain_trace.differences import (
    CLIP,
    EXACT,
    GRADIENT,
    LOSS,
    ORDER,
    SAMPLES,
    SETTINGS,
    SKIPPED,
    START,
    STATE,
    TARGETS,
    WEIGHTS,
    Gap,
    apart,
)
from mtrain_trace.reading import AVERAGE, ArrayRow, Trace, Update
from mtrain_trace.rounding import Rounding

LARGE = 1e-4
"""Relative difference of gradients from which on a nudged repetition is advised."""


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
    gaps: dict[str, Gap] = field(default_factory=dict)
    """How far apart the trainings are in each quantity, causes before consequences."""
    bits_until: int = 0
    """Updates after which both still had the same bits of weights; 0: not even after the first."""
    sentences: list[str] = field(default_factory=list)
    """The likely cause and the remedy."""
    remarks: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What is wrong among the ranks of B, whether or not it has parted the trainings."""
    is_partial: bool = False
    """Whether one side holds optimizers that the other one has not."""

    @property
    def curves(self) -> dict[str, list[float]]:
        """Return the relative difference of each quantity with a size at each update; NaN where it was not recorded."""
        return {what: gap.curve.tolist() for what, gap in self.gaps.items() if what not in (START, *EXACT)}

    @property
    def first(self) -> int | None:
        """Return the index of the first update in which the bits of anything differ; None: of nothing in any update."""
        return min((gap.first for gap in self.gaps.values() if gap.first is not None), default=None)

    @property
    def what(self) -> Sequence[str]:
        """Return the quantities whose bits differ in that update, causes before consequences."""
        return [
            name
            for name in ORDER
            if name in self.gaps and self.first is not None and self.gaps[name].first == self.first
        ]

    @property
    def holds_anything(self) -> bool:
        """Return whether both sides have recorded something of an update that can be compared."""
        pairs = zip(self.a.updates, self.b.updates)
        return any(
            (x.parts or x.micro_batches or x.told_norm) and (y.parts or y.micro_batches or y.told_norm)
            for x, y in pairs
        ) or (self.parting is not None)

    @property
    def verdict(self) -> str:
        """Return ``same bits``, ``same up to rounding`` or ``different``."""
        if self.parting is not None:
            return "different"
        same = self.gaps[START].first is None and self.bits_until == self.updates
        same = same and all(not value > 0 for curve in self.curves.values() for value in curve)
        return "same bits" if same else "same up to rounding"


def compare(a: Trace, b: Trace, *, calibration: Trace | None = None) -> Comparison:
    """Compare two trainings, or the same optimizer of both.

    Args:
        a: the training that counts as right.
        b: the training whose differences are explained.
        calibration: ``a`` again with its start weights moved by one unit in the last place, to see how rounding grows.
    """
    # A resumed training is compared from where it goes on.
    a, b, remark = _align(a, b)
    updates = min(len(a.updates), len(b.updates))
    result = Comparison(a, b, updates, gaps=differences.gaps(a, b), remarks=[*a.remarks, *b.remarks, *remark])
    nudged = differences.gaps(a, calibration) if calibration is not None else {}
    rounding = Rounding(bool(narrow_formats(a) or narrow_formats(b)), nudged)
    cast = _is_cast(a, b)
    result.remarks += [*_formats(a, b, cast=cast), *_unseen(a, b)]
    pairs = list(zip(a.updates, b.updates))
    alike = differences.comparable(a, b, WEIGHTS)
    result.bits_until = next((place for place, pair in enumerate(pairs) if not (alike and _same_bits(*pair))), updates)
    result.parting = _start(a, b) or _first_beyond(result, pairs, rounding, cast=cast)
    if result.parting is None and narrow_formats(a) != narrow_formats(b):  # a mistake beyond that would be told
        result.parting = _first_beyond(result, pairs, Rounding(nudged=nudged), cast=cast)
    gap = result.gaps.get(GRADIENT)
    if (
        result.parting is None
        and calibration is None
        and gap is not None
        and not rounding.narrow
        and gap.largest > LARGE
    ):
        result.remarks.append(
            f"gradients that are {gap.largest:.1e} apart are much for float32; record A again with --calibrate, and compare with "
            "--calibration, to see whether it grows out of rounding"
        )
    return result


def _unseen(a: Trace, b: Trace) -> list[str]:
    """Say what is not compared because it was measured otherwise, or is not there on one side alone."""
    if differences.is_renamed(a, b):
        names = [differences.some(sorted(set(x.groups) - set(y.groups)), 2) for x, y in ((a, b), (b, a))]
        return [
            f"arrays have other names ({names[0]}; {names[1]}), so of gradients only the length is compared, of weights nothing"
        ]
    remarks = []
    if differences.across_frameworks(a, b) and any(trace.processes[0].get("batch_norms") for trace in (a, b)):
        remarks.append(
            "running variances of BatchNorm are not compared: torch keeps the variance of a sample (divided by n - 1), Paddle that "
            "of the batch (divided by n)"
        )
    return [*remarks, *_not_held(a, b)]


def _not_held(a: Trace, b: Trace) -> list[str]:
    """Say which parts one side alone has, or has measured otherwise."""
    if not a.updates or not b.updates:
        return []
    parts = (SAMPLES, TARGETS, "gradients", *STATE)
    other = [part for part in parts if part in (SAMPLES, *STATE) and not differences.comparable(a, b, part)]
    for part in parts:
        held = [
            bool(update.targets) if part == TARGETS else part in update.parts for update in (a.updates[0], b.updates[0])
        ]
        mixed = a.measured != b.measured or part == WEIGHTS
        if mixed and part not in other and part not in (SAMPLES, AVERAGE) and held[0] != held[1]:
            other.append(part)
    words = ["gradients (their length is)" if part == "gradients" else part for part in other if part != AVERAGE]
    return (
        [f"not compared, since one side alone holds it or it was measured otherwise: {', '.join(words)}"]
        if words
        else []
    )


def _first_beyond(
    result: Comparison, pairs: list[tuple[Update, Update]], rounding: Rounding, *, cast: bool
) -> Parting | None:
    """Return the first thing that parts for more than rounding, at the first update in which something does."""
    seen: dict[str, float] = {}
    alike = result.gaps[START].first is None
    for place, (ours, theirs) in enumerate(pairs):
        parting = _exact(ours, theirs, cast=cast or SAMPLES not in result.gaps)
        if parting is not None and _is_harmless(result, place, rounding, seen, alike=alike):
            _remark_once(result, parting, ours, theirs)
            parting = None
        if parting is None and _is_written(result, pairs, place):
            parting = Parting(WEIGHTS, ours.number, float(result.gaps[LOSS].curve[place]))
        # The first in the order of cause: what follows from it has parted because of it.
        for what in ORDER[ORDER.index(LOSS) :]:
            if parting is not None:
                return replace(parting, place=place)
            if what in EXACT:
                if EXACT[what](ours, theirs):
                    parting = Parting(what, ours.number, math.inf)
            elif what in result.gaps:
                size = float(result.gaps[what].curve[place])
                if size > rounding.limit(what, place, seen, alike=alike):
                    parting = Parting(what, ours.number, size, arrays=worst_arrays(ours, theirs, what))
                elif not math.isnan(size):
                    # Rounding grows out of rounding, so what it had reached bounds what it may reach.
                    seen[what] = max(seen.get(what, 0.0), size)
                    alike = alike and result.gaps[what].first != place
        if parting is not None:
            return replace(parting, place=place)
    return None


def _is_harmless(result: Comparison, place: int, rounding: Rounding, seen: dict[str, float], *, alike: bool) -> bool:
    """Return whether other bits of samples or targets mean nothing: loss and gradient of the update agree."""
    sizes = {what: float(result.gaps[what].curve[place]) for what in (LOSS, GRADIENT) if what in result.gaps}
    if math.isnan(sizes.get(LOSS, math.nan)):
        return False
    return all(
        math.isnan(size) or size <= rounding.limit(what, place, seen, alike=alike) for what, size in sizes.items()
    )


def _remark_once(result: Comparison, parting: Parting, ours: Update, theirs: Update) -> None:
    words = f"{parting.what} have other bits (first in update {parting.update}), but loss and gradient agree"
    why = "they are computed by the training itself (by a teacher, a generator, a target network) or rounded otherwise"
    ranks = _times_read(theirs, ours) or _times_read(ours, theirs)
    if parting.what == SAMPLES and ranks:
        words = f"{parting.what} are those of the other side {ranks} times (first in update {parting.update})"
        why = f"each of the {ranks} ranks reads the whole batch, so {ranks} ranks do the work of one"
    if not any(remark.startswith(parting.what) for remark in result.remarks):
        result.remarks.append(f"{words}: {why}")


def _times_read(update: Update, other: Update) -> int:
    """Return how many ranks have each read all samples of the other side; 0 where they have not."""
    ranks = len(update.rank_samples)
    return ranks if ranks > 1 and all(Counter(rank) == other.samples for rank in update.rank_samples) else 0


def _is_written(result: Comparison, pairs: list[tuple[Update, Update]], place: int) -> bool:
    """Return whether something writes to the weights of one side alone between its updates, again and again.

    Once may be an evaluation with averaged weights that are put back; other stacks and ranks may write for their own reasons.
    """
    (a, b), further = (result.a, result.b), pairs[place : place + 2]
    if a.ranks != b.ranks or a.framework != b.framework or a.measured != b.measured or len(further) < 2:
        return False
    if any(a.processes[0].get(key) != b.processes[0].get(key) for key in ("wrapped", "stacks")):
        return False
    size = float(result.gaps[LOSS].curve[place]) if LOSS in result.gaps else 0.0
    return size > 0 and all(ours.changed_outside != theirs.changed_outside for ours, theirs in further)


def _align(a: Trace, b: Trace) -> tuple[Trace, Trace, list[str]]:
    """Cut the updates before a resume: where one starts with the bits of weights that the other had after an update."""
    for whole, part, cut_a in ((a, b, True), (b, a, False)):
        begin = differences.total(part.start)
        if begin is None or _has_start(whole, begin):
            continue
        for place, update in enumerate(whole.updates[:-1]):
            if "weights" in update.parts and update.parts["weights"].digest == begin.digest:
                earlier = whole.updates[: place + 1]
                cut = replace(whole, updates=whole.updates[place + 1 :], start=dict(part.start), earlier=earlier)
                names = ("B", "A") if cut_a else ("A", "B")
                remark = f"{names[0]} starts with the weights that {names[1]} has after update {update.number}, and is compared from there"
                return (cut, b, [remark]) if cut_a else (a, cut, [remark])
    return a, b, []


def _has_start(trace: Trace, begin: ArrayRow) -> bool:
    total = differences.total(trace.start)
    return total is not None and total.digest == begin.digest


def _same_bits(ours: Update, theirs: Update) -> bool:
    if "weights" not in ours.parts or "weights" not in theirs.parts:
        return ours.losses == theirs.losses
    return ours.parts["weights"].digest == theirs.parts["weights"].digest


def _start(a: Trace, b: Trace) -> Parting | None:
    """Return how the weights before the first update part; exactly, since nothing has been computed yet."""
    if not differences.comparable(a, b, WEIGHTS) or not a.start or not b.start:
        return None
    if a.measured != b.measured and set(a.groups) == set(b.groups):
        size = apart(differences.whole(a), differences.whole(b))
        return Parting(START, 0, size) if size >= 1e-6 else None
    if a.measured != b.measured:
        return Parting(START, 0, math.inf, arrays=sorted(set(a.groups) ^ set(b.groups)))
    if set(a.start) != set(b.start):
        names = sorted(set(a.start) ^ set(b.start))
        return Parting(START, 0, math.inf, arrays=names)
    unequal = _unequal(a, b)
    # A unit in the last place is the nudge of a calibration, and no other start. Where one side alone has narrow weights,
    # their rounding is no other start either; the difference of precision is named where it shows.
    if not unequal or max(unequal.values()) < (1e-2 if precision_of(a) != precision_of(b) else 1e-6):
        return None
    return Parting(START, 0, max(unequal.values()), arrays=sorted(unequal, key=lambda name: -unequal[name]))


def _unequal(a: Trace, b: Trace) -> dict[str, float]:
    """Return how far the start weights are apart that have other bits, by name."""
    common = [name for name in a.start if name in b.start and a.start[name].digest != b.start[name].digest]
    return {name: apart(a.start[name], b.start[name]) for name in common}


def unlike_starts(comparison: Comparison) -> list[str]:
    """Return the names of the weights that start otherwise, the largest difference first."""
    unequal = _unequal(comparison.a, comparison.b)
    return sorted(unequal, key=lambda name: -unequal[name])


def _is_cast(a: Trace, b: Trace) -> bool:
    """Return whether samples have other bits for their format alone: none occurs on both sides, and the labels do."""
    if precision_of(a) == precision_of(b) or not a.updates or not b.updates:
        return False
    ours, theirs = a.updates[0], b.updates[0]
    return bool(ours.targets) and ours.targets == theirs.targets and not ours.samples & theirs.samples


def _exact(ours: Update, theirs: Update, *, cast: bool) -> Parting | None:
    """Return how the samples or targets of an update part; they are compared bit by bit, in no order."""
    for what, mine, other in ((SAMPLES, ours.samples, theirs.samples), (TARGETS, ours.targets, theirs.targets)):
        if EXACT[what](ours, theirs) and not (cast and what == SAMPLES):
            share = sum((mine - other).values()) / max(sum(mine.values()), 1)
            return Parting(what, ours.number, share or sum((other - mine).values()) / max(sum(other.values()), 1))
    if (
        ours.samples == theirs.samples
        and ours.targets
        and theirs.targets
        and differences.pairs_of(ours) != differences.pairs_of(theirs)
    ):
        return Parting(TARGETS, ours.number, 1.0)
    return None


def precision_of(trace: Trace) -> str:
    """Return the formats in which a training computes, such as ``float32`` or ``float32, autocast to bfloat16``."""
    dtypes = list(trace.processes[0].get("model_dtypes") or trace.optimizer_facts["dtypes"])
    casts = {f"autocast to {update.autocast}" for update in trace.updates[:1] if update.autocast}
    sharded = [f"cast to {name} by FSDP" for name in trace.processes[0].get("fsdp_dtypes") or ()]
    return ", ".join([*dtypes, *casts, *sharded])


def _formats(a: Trace, b: Trace, *, cast: bool) -> list[str]:
    """Say where the sides compute in other formats, and what is compared all the same."""
    mine, other = precision_of(a), precision_of(b)
    if mine == other:
        return []
    words = "where they part for no more than the rounding of the narrower format, that is the cause that is told"
    labels = ["the samples are in these formats too, so only their labels are compared"] if cast else []
    return [f"A computes in {mine}, B in {other}: {words}", *labels]


def narrow_formats(trace: Trace) -> set[str]:
    """Return the formats of fewer digits than float32 in which a training computes."""
    return set(re.findall(r"\bb?float(?:16|8\w*)", precision_of(trace)))


def worst_arrays(ours: Update, theirs: Update, what: str) -> list[str]:
    """Return the names of the arrays that differ, the largest relative difference first; empty if not recorded."""
    part = {GRADIENT: "gradients", CLIP: "gradients"}.get(what, what)
    mine, other = ours.arrays.get(part, {}), theirs.arrays.get(part, {})
    found = {name: apart(mine[name], other[name]) for name in mine if name in other}
    return sorted((name for name in found if found[name] > 0), key=lambda name: -found[name])


def has_details(comparison: Comparison) -> bool:
    """Return whether arrays were recorded at the update in which the trainings part."""
    parting = comparison.parting
    if parting is None or parting.place is None or parting.what in (SAMPLES, TARGETS, SKIPPED, SETTINGS):
        return True
    return not without_details(comparison)


def without_details(comparison: Comparison) -> list[Trace]:
    """Return the trainings of which no arrays were recorded at the update in which they part."""
    place = comparison.parting.place if comparison.parting is not None else None
    return [trace for trace in (comparison.a, comparison.b) if place is not None and not trace.updates[place].arrays]
