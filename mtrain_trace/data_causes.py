"""Name the likely cause of other start weights, samples or labels."""

from __future__ import annotations

import math

from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import SAMPLES, some
from mtrain_trace.reading import Trace, Update

_ORDER = (
    "{} goes through the data in the same order in every epoch, {} in a new one: one does not shuffle, or sampler.set_epoch(epoch) "
    "is not called"
)


def start(comparison: Comparison, parting: Parting, _ours: Update, _theirs: Update) -> list[str]:
    """Explain start weights that differ."""
    a, b = comparison.a, comparison.b
    ours, theirs = ({*trace.start} if a.measured == b.measured else {*trace.groups} for trace in (a, b))
    missing, further = sorted(ours - theirs), sorted(theirs - ours)
    if missing or further:
        parts = [f"B does not train {some(missing)}"] if missing else []
        parts += [f"B trains {some(further)} besides"] if further else []
        return [
            "the optimizers hold other arrays: "
            + "; ".join(parts)
            + ": frozen or forgotten parts, tied weights, another model"
        ]
    if a.measured != b.measured:
        return ["start weights differ: another seed, other weights loaded; in which arrays, one side does not say"]
    if not parting.arrays:
        return ["trained weights start the same, other parts of the model (statistics, frozen weights) do not"]
    if len(parting.arrays) == len(a.start):
        return [
            "all weights start otherwise: another seed, random numbers drawn before the model is built, other weights loaded"
        ]
    return [
        f"{len(parting.arrays)} of {len(a.start)} arrays start otherwise ({some(parting.arrays)}): weights that were loaded on "
        "one side only, or a part that is initialised on its own"
    ]


def samples(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain samples that differ."""
    a, b = comparison.a, comparison.b
    count_a, count_b = sum(ours.samples.values()), sum(theirs.samples.values())
    for side, update in (("B", theirs), ("A", ours)):
        if len(update.rank_samples) > 1 and all(rank == update.rank_samples[0] for rank in update.rank_samples):
            return [
                f"all ranks of {side} read the same samples: the data is not divided among ranks (no DistributedSampler, or "
                "one that was given no rank)"
            ]
    if count_a != count_b:
        return _sizes(comparison, ours, theirs, count_a, count_b)
    everything_a, everything_b = _all_samples(a), _all_samples(b)
    common = len(everything_a & everything_b) / max(len(set(theirs.samples)), 1)
    shared = len(set(theirs.samples) & everything_a) / max(len(set(theirs.samples)), 1)
    if _repeats_order(b) and not _repeats_order(a):
        return [_ORDER.format("B", "A")]
    if _repeats_order(a) and not _repeats_order(b):
        return [_ORDER.format("A", "B")]
    if parting.update > 1 and len(b.processes[0]["optimizers"]) > 1 and set(theirs.samples) & set(ours.samples):
        return [
            "some samples differ: another model of the training computes them (a generator), and has parted before; see the other "
            "optimizers"
        ]
    if shared > 0.5:
        shift = _shift(a, b, ours.number)
        if shift:
            return [
                f"B is {abs(shift)} update(s) {'ahead' if shift > 0 else 'behind'} in the same order of samples: batches were "
                "skipped or repeated, at a resume, at the end of an epoch (drop_last) or by one that was drawn to look at"
            ]
        return [
            "B sees the same samples in another order: another seed of the shuffle, or another division among ranks"
        ]
    if a.measured.get(SAMPLES):  # an update's samples are known as a whole
        return ["the ranks of B received other samples, in another order, or augmented differently"]
    if common == 0 and parting.update == 1:
        return [
            "no sample of B occurs in A: the data differ, or are prepared otherwise (normalisation, augmentation, dtype)"
        ]
    return [
        "some samples differ: augmentation draws from another state of the random numbers, or samples are prepared otherwise"
    ]


def _sizes(comparison: Comparison, ours: Update, theirs: Update, count_a: int, count_b: int) -> list[str]:
    a, b = comparison.a, comparison.b
    words = f"an update of A has {count_a} samples, of B {count_b}"
    for side, trace, further in (("B", b, theirs.samples - ours.samples), ("A", a, ours.samples - theirs.samples)):
        before = {digest for update in trace.updates[: theirs.number - 1] for digest in update.samples}
        whole = trace.samples_per_update // max(trace.updates[0].micro_batches, 1)
        # The last update may have fewer micro batches than the others; those that it has are full.
        if further and set(further) <= before and max(count_a, count_b) % max(whole, 1) == 0:
            return [
                f"{words}: {side} fills the last, incomplete batch up with samples that it had before (even_batches of Accelerate, a "
                "DistributedSampler without drop_last), which count twice in an epoch"
            ]
    if (theirs.number > 1 and count_b != b.samples_per_update) or count_a != a.samples_per_update:
        return [f"{words}: the last, incomplete batch is kept on one side only (drop_last)"]
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
    for rank, (mine, other) in enumerate(zip(ours.target_sums, theirs.target_sums)):
        if len(theirs.target_sums) > 1 and len(ours.target_sums) == len(theirs.target_sums) and mine != other:
            return [f"the samples are the same, but rank {rank} of B has other labels"]
    if theirs.real_targets and parting.update > 1:
        return [
            "the targets are floating point numbers, and were the same before: another model computes them (a teacher, a target "
            "network); look at its weights and buffers, at how they are averaged or copied, and at its evaluation mode"
        ]
    return ["the samples are the same, but their labels are not: another mapping of classes, padding or shift"]


def _all_samples(trace: Trace) -> set[str]:
    return {digest for update in trace.updates for digest in update.samples}


def _repeats_order(trace: Trace) -> bool:
    """Return whether the samples of the first update come again in another one, followed by those of the second."""
    updates = trace.updates
    for place in range(1, len(updates) - 1):
        if updates[place].samples == updates[0].samples and updates[0].samples:
            return updates[place + 1].samples == updates[1].samples
    return False


def _shift(a: Trace, b: Trace, number: int) -> int:
    """Return by how many updates B is ahead of A in the same order; 0 where it is not."""
    theirs = b.updates[number - 1].samples
    for distance in range(1, 9):
        for shift in (distance, -distance):
            place = number - 1 + shift
            if 0 <= place < len(a.updates) and a.updates[place].samples == theirs:
                return shift
    return 0
