"""Describe a comparison in plain words."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.compare.referee import ranking
from mtrain.compare.results import Against, BackendRow, Comparison
from mtrain.compare.traces import WORDS, ordinal
from mtrain_trace.differences import GRADIENT, LOSS, WEIGHTS

FEWEST_TIMED = 15
"""Fewest timed updates of each backend from which on one is called the fastest."""
BUSY = 0.25
"""Processes of others that wait or run, for each core, above which none is called the fastest."""
SHOWN = 2
"""Number of violations that a sentence names; the table has the others."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of the report. ``good``: True is good news, False needs attention, None is neither."""

    text: str
    good: bool | None = None
    detail: bool = False
    """Whether it gives numbers behind another sentence, so that a page may fold it."""


def summary(result: Comparison) -> list[Sentence]:
    """Return the results as sentences, the most important first."""
    sentences = [_alike(labels, result) for labels in result.alike() if len(labels) > 1]
    sentences += [
        _apart(row, result) for row in result.rows if row.label in result.against and not result.against[row.label].bits
    ]
    sentences += _against_float64(result)
    sentences += [_describe_drift(row) for row in result.rows if row.has_drifted]
    sentences += [_not_done(row) for row in result.rows if row.outcome != "done"]
    sentences += [
        Sentence(
            f"{row.label} is not reproducible: a second job from the same spec ended with other weights", good=False
        )
        for row in result.rows
        if row.repeats is False
    ]
    return [*sentences, *_speed_sentences(result)]


def headline(result: Comparison) -> str:
    """Return the verdict in one line."""
    finished = [row for row in result.rows if row.outcome == "done"]
    if result.agree and len(finished) > 1:
        if all(against.bits for against in result.against.values()):
            return f"All {len(finished)} backends train alike, bit for bit"
        return f"All {len(finished)} backends agree within the profile {result.profile.name}"
    if len(finished) < 2 and len(result.rows) > 1:
        return "Nothing to compare: " + ("no backend ran" if not finished else f"only {finished[0].label} ran")
    if result.off:
        verb = "is" if len(result.off) == 1 else "are"
        return f"{join_words(list(result.off))} {verb} off: too far from float64 in update 1"
    different = [label for label, against in result.against.items() if against.beyond]
    if different:
        verb = "does" if len(different) == 1 else "do"
        return f"{join_words(different)} {verb} not train like {result.reference.label if result.reference else '?'}"
    drifted = [row.label for row in result.rows if row.has_drifted]
    if drifted:
        return f"The ranks of {join_words(drifted)} do not hold the same weights"
    missing = [row.label for row in result.rows if row.outcome != "done"]
    if missing:
        return f"The backends that ran agree; {join_words(missing)} did not run"
    return "A backend is not reproducible"


def join_words(words: Sequence[str]) -> str:
    """Join words as ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _alike(labels: list[str], result: Comparison) -> Sentence:
    return Sentence(
        f"{join_words(labels)} are the same, bit for bit, in all {result.updates} updates: samples, losses, gradient "
        "norms, weights, "
        "moments, averages",
        good=True,
    )


def _apart(row: BackendRow, result: Comparison) -> Sentence:
    against, profile = result.against[row.label], result.profile
    name = result.reference.label if result.reference else "?"
    why = f": {'; '.join(against.causes)}" if against.causes else ""
    where = parting(against)
    if not against.beyond:
        text = f"{row.label} agrees with {name} within {profile.name}{why}. {where}. {_growth(against, result)}"
        return Sentence(text, good=True)
    # The table has all of them.
    worst, more = against.beyond[:SHOWN], len(against.beyond) - SHOWN
    beyond = "; ".join(worst) + (f"; and {more} more" if more > 0 else "")
    return Sentence(
        f"{row.label} does not train like {name}{why}. {where}. Beyond {profile.name}: {beyond}", good=False
    )


def _against_float64(result: Comparison) -> list[Sentence]:
    """Report which backends are inexact and by how much, where backends differ."""
    if result.referee is None:
        return []
    sentences = [Sentence(f"{label} is off: {'; '.join(what)}", good=False) for label, what in result.off.items()]
    sentences += [
        Sentence(f"Update 1: {text}", detail=not result.off) for text in ranking(result.referee, result.distances)
    ]
    sentences += [
        Sentence(
            f"{label}: in update 1 the predictions for {count} of {len(result.referee.exact[result.referee.label].updates[0].decided)} "
            "samples are compared with other objects than in float64, as roundings at a threshold can have it; so its distance from "
            "float64 is no verdict"
        )
        for label, count in result.decided_otherwise.items()
    ]
    for label in result.against:
        distances = result.referee.otherwise(label)
        if distances:
            sizes = join_words([f"{WORDS[name]} {size:.1e} apart" for name, size in distances.items()])
            text = f"{label} differs from {result.referee.label} in float64 too ({sizes}), so this is not rounding"
            sentences.append(Sentence(text, good=False))
    return sentences


def parting(against: Against) -> str:
    """Describe the first update in which two jobs differ, and the quantities."""
    gap = against.difference
    if gap.first is None:
        return f"Bit for bit the same in every update{'' if against.bits else ' that both made'}"
    names = join_words([WORDS[name] for name in gap.what])
    before = "; before it they are the same, bit for bit" if gap.first else ""
    return f"The first difference is in {ordinal(gap.first)}, in {names}{before}"


def _growth(against: Against, result: Comparison) -> str:
    gaps = against.difference.gaps
    sizes = [f"{WORDS[name]} {gaps[name].largest:.1e}" for name in (LOSS, GRADIENT, WEIGHTS) if name in gaps]
    return f"Largest over {result.updates} updates: {', '.join(sizes)}"


def _describe_drift(row: BackendRow) -> Sentence:
    assert row.trace is not None
    assert row.trace.first_drift is not None
    since = f"after {ordinal(row.trace.first_drift - 1)}" if row.trace.first_drift else "at the start"
    return Sentence(
        f"The ranks of {row.label} do not hold the same weights {since}: it trains several models", good=False
    )


def _not_done(row: BackendRow) -> Sentence:
    how = {"failed": "failed", "refused": "refused the job", "absent": "is not installed"}[row.outcome]
    return Sentence(f"{row.label} {how}: {row.reason}", good=False)


def _speed_sentences(result: Comparison) -> list[Sentence]:
    times = [(row.speed.quartiles_ms, row.label) for row in result.rows if row.speed is not None]
    timed = sorted(times, key=lambda entry: entry[0][1])
    if len(timed) < 2:
        return []
    ((_, fast, fastest_upper), fastest), ((_, slow, _), slowest) = timed[0], timed[-1]
    # None is called the fastest where the measurement leaves a doubt: a table has the numbers anyway.
    doubts = [
        f"the quartiles of {fastest} and {label} overlap" for (low, _, _), label in timed[1:2] if low <= fastest_upper
    ]
    fewest = min(row.speed.updates for row in result.rows if row.speed is not None)
    doubts += [f"{fewest} timed updates are too few (--updates 50)"] if fewest < FEWEST_TIMED else []
    doubts += ["the machine had other work"] if result.load > BUSY else []
    if doubts:
        medians = join_words([f"{label} {median:.0f} ms" for (_, median, _), label in timed])
        return [Sentence(f"none is called the fastest: {join_words(doubts)}. Median update: {medians}")]
    return [
        Sentence(
            f"{fastest} is the fastest here with {fast:.0f} ms an update; {slowest} takes {slow / fast:.2f} times as long"
        )
    ]
