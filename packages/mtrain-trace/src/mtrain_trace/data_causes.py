"""Name the likely cause of other start weights, samples or labels."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from mtrain_trace import differences
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import SAMPLES, some
from mtrain_trace.reading import ArrayRow, Trace, Update

_ORDER = (
    "{} goes through the data in the same order in every epoch, {} in a new one: one does not shuffle, or sampler.set_epoch(epoch) "
    "is not called"
)


MANY = 3
"""Different labels of a rank from which on they may be positions."""


def start(comparison: Comparison, parting: Parting, _ours: Update, _theirs: Update) -> list[str]:
    """Explain start weights that differ."""
    a, b = comparison.a, comparison.b
    ours, theirs = ({*trace.start} if a.measured == b.measured else {*trace.groups} for trace in (a, b))
    missing, further = sorted(ours - theirs), sorted(theirs - ours)
    if missing or further:
        strangers = _strangers("B", b, further) or _strangers("A", a, missing)
        parts = [f"B does not train {some(missing)}"] if missing else []
        parts += [f"B trains {some(further)} besides"] if further else []
        return [
            "the optimizers hold other arrays: "
            + "; ".join(parts)
            + (": frozen or forgotten parts, tied weights, another model" if not strangers else "")
            + strangers
        ]
    if a.measured != b.measured:
        return ["start weights differ: another seed, other weights loaded; in which arrays, one side does not say"]
    if not parting.arrays:
        return ["trained weights start the same, other parts of the model (statistics, frozen weights) do not"]
    alike, shapes = [name for name in a.start if name not in parting.arrays], a.optimizer_facts["shapes"]
    if all(_is_constant(a.start[name], shapes.get(name)) for name in alike):
        which = (
            "all weights start otherwise"
            if not alike
            else "all weights that are drawn start otherwise (the others are zeros or ones)"
        )
        seeds = [next(iter(trace.updates[0].seeds), None) if trace.updates else None for trace in (a, b)]
        if None not in seeds and seeds[0] != seeds[1]:
            return [f"{which}: another seed ({seeds[0]} in A, {seeds[1]} in B)"]
        return [f"{which}: another seed, random numbers drawn before the model is built, or other weights loaded"]
    return [
        f"{len(parting.arrays)} of {len(a.start)} arrays start otherwise ({some(parting.arrays)}): weights that were loaded on "
        "one side only, or a part that is initialised on its own"
    ]


def _is_constant(row: ArrayRow, shape: Sequence[int] | None) -> bool:
    """Return whether an array holds zeros or ones alone, as biases and scales of norms do at the start."""
    return row.norm == 0 or (shape is not None and math.isclose(row.norm**2, math.prod(shape), rel_tol=1e-6))


def _strangers(side: str, trace: Trace, names: Sequence[str]) -> str:
    """Say that an optimizer holds arrays which are no part of the model that is called; empty where it holds none."""
    found = [name for name in names if differences.is_anonymous(name)]
    if not found:
        return ""
    return (
        f". {len(found)} of the arrays that the optimizer of {side} holds are no part of the model that is called: layers were replaced "
        "after the optimizer was made (a new head), so the new ones are not trained, or they belong to another model"
    )


def samples(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain samples that differ."""
    a, b = comparison.a, comparison.b
    count_a, count_b, place = sum(ours.samples.values()), sum(theirs.samples.values()), parting.place or 0
    for side, update in (("B", theirs), ("A", ours)):
        if len(update.rank_samples) > 1 and all(rank == update.rank_samples[0] for rank in update.rank_samples):
            return [
                f"all ranks of {side} read the same samples: the data is not divided among ranks (no DistributedSampler, or "
                "one that was given no rank)"
            ]
    if count_a != count_b:
        return _sizes(comparison, ours, theirs, count_a, count_b, place=place)
    if known := _begun_anew(comparison, place) or _find_repeated(comparison, place) or _own_order(comparison):
        return [known]
    if parting.update > 1 and len(b.processes[0]["optimizers"]) > 1 and set(theirs.samples) & set(ours.samples):
        return [
            "some samples differ: another model of the training computes them (a generator), and has parted before; see the other "
            "optimizers"
        ]
    everything = _all_samples(a)
    if len(set(theirs.samples) & everything) > 0.5 * len(set(theirs.samples)):
        return [_another_order(a, b, place)]
    if a.measured.get(SAMPLES):  # an update's samples are known as a whole
        return ["the ranks of B received other samples, in another order, or augmented differently"]
    if parting.update == 1 and not everything & _all_samples(b):
        return [
            "no sample of B occurs in A: the data differ, or are prepared otherwise (normalisation, augmentation, dtype), or what the "
            "model is given beside them does (labels, masks)"
        ]
    return [
        "some samples differ: augmentation draws from another state of the random numbers, or samples are prepared otherwise"
    ]


def _own_order(comparison: Comparison) -> str:
    """Name a side that alone repeats the order of an epoch, or whose ranks alone share no order; empty where there is none."""
    for (side, trace), (rest, other) in itertools.permutations((("B", comparison.b), ("A", comparison.a))):
        if _repeats_order(trace) and not _repeats_order(other):
            return _ORDER.format(side, rest)
        if _overlaps(trace) and not _overlaps(other):
            return (
                f"a rank of {side} reads samples that another rank has read in the same epoch: each rank divides or shuffles the data for "
                "itself (random_split without a generator, a shuffle or a sampler with another seed on each rank)"
            )
    return ""


def _another_order(a: Trace, b: Trace, place: int) -> str:
    """Explain samples that both sides have, but not in the same updates."""
    if shift := _shift(a, b, place):
        return (
            f"B is {abs(shift)} update(s) {'ahead' if shift > 0 else 'behind'} in the same order of samples: batches were "
            "skipped or repeated, at a resume, at the end of an epoch (drop_last) or by one that was drawn to look at"
        )
    if again := _read_again(a, b):
        return again
    further, missing = len(_all_samples(b) - _all_samples(a)), len(_all_samples(a) - _all_samples(b))
    if (further and _epoch(a)[1]) or (missing and _epoch(b)[1]):
        return (
            f"B sees {further} samples that A never sees, and A {missing} that B never sees: the data are divided otherwise into those "
            "for training and others (random_split without a seed, another seed, another list of files)"
        )
    split = ", or another part of the data (random_split without a seed)" if further else ""
    which = "samples" if further else "the same samples"
    return f"B sees {which} in another order: another seed of the shuffle, another division among ranks{split}"


def _read_again(a: Trace, b: Trace) -> str:
    """Name a side that alone repeats samples before it has read as many as the data have; empty where there is none."""
    for (side, trace), (rest, other) in itertools.permutations((("B", b), ("A", a))):
        found, is_again = _epoch(other)
        # The side that repeats nothing shows how many samples the data have.
        once, read = len(found) - is_again, Counter[str]()
        if a.earlier or b.earlier or once < 0.75 * len(_all_samples(other)):
            continue  # not read from the beginning, or drawn with replacement on the other side, too
        for update in trace.updates:
            if sum((read + update.samples).values()) > once:
                break
            read += update.samples
        if again := sum(read.values()) - len(read):
            return (
                f"{side} reads {again} sample(s) again, in place of others, before it has read as many as {rest} reads without a "
                "repetition: one index is used twice (in a batch, in a list), or samples are drawn with replacement"
            )
    return ""


def _sizes(
    comparison: Comparison, ours: Update, theirs: Update, count_a: int, count_b: int, *, place: int
) -> list[str]:
    a, b = comparison.a, comparison.b
    words = f"an update of A has {count_a} samples, of B {count_b}"
    for side, trace, further in (("B", b, theirs.samples - ours.samples), ("A", a, ours.samples - theirs.samples)):
        before = {digest for update in (*trace.earlier, *trace.updates[:place]) for digest in update.samples}
        whole = trace.samples_per_update // max(trace.updates[0].micro_batches, 1)
        # The last update may have fewer micro batches than the others; those that it has are full.
        if further and set(further) <= before and max(count_a, count_b) % max(whole, 1) == 0:
            return [
                f"{words}: {side} fills the last, incomplete batch up with samples that it had before (even_batches of Accelerate, a "
                "DistributedSampler without drop_last), which count twice in an epoch"
            ]
    if (theirs.number > 1 and count_b != b.samples_per_update) or count_a != a.samples_per_update:
        return [f"{words}: the last, incomplete batch is kept on one side only (drop_last)"]
    if ours.targets and ours.targets == theirs.targets:
        return [
            f"{words}, and both have the same labels: is the first axis of the inputs that of samples, or that of steps, as torch's "
            "recurrent layers have it? If it is that of samples, the batch sizes differ"
        ]
    factor = count_b / count_a
    if math.isclose(factor, b.ranks / a.ranks):
        return [
            f"{words}: the batch size is per rank, and B has {b.ranks} rank(s) where A has {a.ranks}; divide it, or scale the "
            f"learning rate on purpose{_is_scaled(ours, theirs, factor)}"
        ]
    if math.isclose(factor, theirs.micro_batches / ours.micro_batches):
        return [
            f"{words}: B accumulates {theirs.micro_batches} micro batches, A {ours.micro_batches}, of the same size"
        ]
    return [f"{words}: the batch sizes differ"]


def _is_scaled(ours: Update, theirs: Update, factor: float) -> str:
    """Say whether the learning rate has grown with the batch; empty where it is not known."""
    mine, other = (update.rates[0].get("lr") if update.rates else None for update in (ours, theirs))
    if not isinstance(mine, (int, float)) or not isinstance(other, (int, float)) or not mine:
        return ""
    if math.isclose(other / mine, factor, rel_tol=1e-5):
        return f": it is {other:g} in place of {mine:g}, scaled as the batch is"
    if math.isclose(other, mine, rel_tol=1e-5):
        return f": it is {mine:g} in both, not scaled"
    return ""


def targets(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain labels that differ."""
    if ours.targets == theirs.targets:
        return ["the same samples have other labels: labels are shuffled or shifted against their samples"]
    if own := _positions(ours, theirs):
        return [own]
    for rank, (mine, other) in enumerate(zip(ours.target_sums, theirs.target_sums)):
        if len(theirs.target_sums) > 1 and len(ours.target_sums) == len(theirs.target_sums) and mine != other:
            return [f"the samples are the same, but rank {rank} of B has other labels"]
    if theirs.real_targets and parting.update > 1:
        return [
            "the targets are floating point numbers, and were the same before: another model computes them (a teacher, a target "
            "network); look at its weights and buffers, at how they are averaged or copied, and at its evaluation mode"
        ]
    return ["the samples are the same, but their labels are not: another mapping of classes, padding or shift"]


def _positions(ours: Update, theirs: Update) -> str:
    """Name labels that count the samples of one rank, as those of a contrastive loss do; empty where they are none."""
    for side, update, other in (("B", theirs, ours), ("A", ours, theirs)):
        first = Counter(update.rank_targets[0]) if update.rank_targets else Counter[str]()
        alike = all(Counter(targets) == first for targets in update.rank_targets)
        if len(update.rank_targets) < 2 or not alike or len(first) < MANY or len(set(first.values())) > 1:
            continue
        if set(first) < set(other.targets):
            return (
                f"each rank of {side} has the same labels, {len(first)} of the {len(other.targets)} of the other side, each as often: "
                "positions among the samples of one rank, as a contrastive loss counts them. Those of rank r have to begin at r times the "
                "samples of a rank where the outputs of all ranks are gathered; or they are not gathered"
            )
    return ""


def _epoch(trace: Trace) -> tuple[list[tuple[int, str]], bool]:
    """Return (rank, sample) up to the first sample that comes again, and whether one does; the last pair is that sample's."""
    seen: set[str] = set()
    found = []
    for update in (*trace.earlier, *trace.updates):
        for rank, read in enumerate(update.rank_samples):
            for sample in read:
                found.append((rank, sample))
                if sample in seen:
                    return found, True
                seen.add(sample)
    return found, False


def _overlaps(trace: Trace) -> bool:
    """Return whether two ranks read one sample long before the data have been read once."""
    read, is_again = _epoch(trace)
    first = {sample: rank for rank, sample in read[:-1]}
    return is_again and first[read[-1][1]] != read[-1][0] and len(read) < 0.75 * len(_all_samples(trace))


def _all_samples(trace: Trace) -> set[str]:
    return {digest for update in (*trace.earlier, *trace.updates) for digest in update.samples}


def _repeats_order(trace: Trace) -> bool:
    """Return whether the samples of the first update come again in another one, followed by those of the second."""
    updates = trace.updates
    for place in range(1, len(updates) - 1):
        if updates[place].samples == updates[0].samples and updates[0].samples:
            return updates[place + 1].samples == updates[1].samples
    return False


def _begun_anew(comparison: Comparison, place: int) -> str:
    """Name a resume that reads samples again which the training had before it; empty where there is none."""
    for side, other, whole, resumed in (("B", "A", comparison.a, comparison.b), ("A", "B", comparison.b, comparison.a)):
        if not whole.earlier or place:
            continue
        before = [*whole.earlier, *whole.updates]
        for begin, update in enumerate(whole.earlier):
            pairs = list(zip(before[begin:], resumed.updates))
            if not update.samples or any(mine.samples != again.samples for mine, again in pairs[:2]):
                continue
            last, part = whole.earlier[-1].number, ", or this epoch" if begin else ""
            return (
                f"{side} reads again at its resume, after update {last}, what {other} read in update {update.number}: it begins the data "
                f"anew{part}, since the position in the data was not saved, or the batches before it are not skipped"
            )
    return ""


def _find_repeated(comparison: Comparison, place: int) -> str:
    """Name a batch that comes again in the next update on one side only; empty where none does."""
    for side, trace, other in (("B", comparison.b, comparison.a), ("A", comparison.a, comparison.b)):
        if place and _is_read_again(trace, place) and not _is_read_again(other, place):
            return (
                f"{side} has the samples of update {trace.updates[place - 1].number} again: each worker of its DataLoader reads the whole "
                "stream (an IterableDataset that does not ask get_worker_info), or one batch is used for several updates"
            )
    return ""


def _is_read_again(trace: Trace, place: int) -> bool:
    return bool(trace.updates[place].samples) and trace.updates[place].samples == trace.updates[place - 1].samples


def _shift(a: Trace, b: Trace, at: int) -> int:
    """Return by how many updates B is ahead of A in the same order, from the update at an index; 0 where it is not."""
    theirs = b.updates[at].samples
    for distance in range(1, 9):
        for shift in (distance, -distance):
            place = at + shift
            if 0 <= place < len(a.updates) and a.updates[place].samples == theirs:
                return shift
    return 0
