"""Recognise why a job with several models departs from another one: which model differs first, and in what."""

from collections.abc import Iterable, Sequence

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.studies.compare.differences import LOSS, NORM, SAMPLES, START, ordinal
from mtrain.studies.compare.traces import BUFFERS, Trace

EXPLAINED = 0.03
"""Largest remainder that an explanation may leave, as a share of the difference."""


def fit(change: Array, direction: Array) -> tuple[float, float]:
    """Return (share of ``change`` that remains, factor) of the best ``factor * direction``."""
    squared = float(direction @ direction)
    if not squared or not change.any():
        return 1.0, 0.0
    factor = float(change @ direction) / squared
    return float(np.linalg.norm(change - factor * direction) / np.linalg.norm(change)), factor


def named(models: Iterable[str]) -> str:
    """Return how sentences name models."""
    names = list(models)
    return f"model {names[0]}" if len(names) == 1 else f"models {', '.join(names)}"


def other_trained(a: Trace, b: Trace, last: int) -> str:
    """Report the first update up to ``last`` that does not train the same models; empty if there is none."""
    ever: frozenset[str] = frozenset().union(*a.trained)
    for update, (ours, theirs) in enumerate(zip(a.trained[: last + 1], b.trained[: last + 1], strict=True)):
        if never := sorted(theirs - ever):
            return (
                f"in {ordinal(update)} it trains {named(never)}, which the reference never trains: a target network or a teacher is "
                "changed by updates of its own"
            )
        if further := sorted(theirs - ours):
            return f"in {ordinal(update)} it trains {named(further)}, and the reference does not"
        if missing := sorted(ours - theirs):
            return f"in {ordinal(update)} it does not train {named(missing)}, and the reference does"
    return ""


def other_rates(a: Trace, b: Trace, update: int, first: str) -> str:
    """Report other learning rates in the first update that differs, in ``first``; empty if they are the same."""
    if first in (START, SAMPLES, LOSS, NORM) or a.rates.shape != b.rates.shape:
        return ""
    ours, theirs = a.rates[update], b.rates[update]
    places = [int(place) for place in np.flatnonzero(ours != theirs)]
    if not places:
        return ""
    of = f" of {named(dict.fromkeys(a.models[place] for place in places))}" if a.models else ""
    before = "; before, they were the same" if update and np.array_equal(a.rates[:update], b.rates[:update]) else ""
    return (
        f"its learning rate{of} is {theirs[places[0]]:.4g} in {ordinal(update)}, and that of the reference {ours[places[0]]:.4g}{before}: "
        "its schedule is at another place, as where the state of a scheduler was not restored"
    )


def models_apart(a: Trace, b: Trace, update: int, first: str) -> list[str]:
    """Return the models that differ in the quantity ``first`` of an update; empty for an only one."""
    if not a.norms_of:
        return []
    if first == LOSS:
        losses = ((name, a.losses.get(f"loss_{name}"), b.losses.get(f"loss_{name}")) for name in a.norms_of)
        return [name for name, x, y in losses if x is not None and y is not None and x[update] != y[update]]
    if first == NORM:
        pairs = ((name, norms[update], b.norms_of[name][update]) for name, norms in a.norms_of.items())
        return [name for name, x, y in pairs if x != y and not (np.isnan(x) and np.isnan(y))]
    parts = [part for part in a.named(first) if part in b.digests]
    apart = [part for part in parts if a.digests[part][update + 1] != b.digests[part][update + 1]]
    return list(dict.fromkeys(a.model_of(part) for part in apart))


def unlike_models(a: Trace, b: Trace, update: int, first: str, models: Sequence[str]) -> str:
    """Explain a difference that only some of several models have; empty where that explains nothing."""
    others = [name for name in a.norms_of if name not in models]
    if first == LOSS and len(models) == 1 and (source := _loss_besides(a, b, update, models[0])):
        return (
            f"the loss of {named(models)} is larger by that of model {source}, whose gradient is left in it: give each loss to the "
            "optimizer of its own model alone"
        )
    if first == NORM and models and others:
        pairs = [(b.norms_of[name][update], a.norms_of[name][update]) for name in models]
        sizes = ", ".join(f"{theirs:.4g} instead of {ours:.4g}" for theirs, ours in pairs)
        return (
            f"the losses are the same and the gradient of {named(models)} is not ({sizes}), that of {named(others)} is: the gradient of "
            "another model's loss is left in it, or one of its own losses is missing"
        )
    never = {name for name in models if not any(name in trained for trained in a.trained)}
    if first == BUFFERS and models and never == set(models):
        return _untrained(a, b, update, models)
    return ""


def _loss_besides(a: Trace, b: Trace, update: int, model: str) -> str:
    """Return another model whose loss is added to that of ``model``; empty if there is none."""
    added = b.losses[f"loss_{model}"][update] - a.losses[f"loss_{model}"][update]
    for name in a.norms_of:
        loss = a.losses[f"loss_{name}"][update]
        if name != model and loss and abs(added - loss) <= 1e-4 * abs(loss):
            return name
    return ""


def _untrained(a: Trace, b: Trace, update: int, models: Sequence[str]) -> str:
    """Explain other weights of models that no update trains, such as targets and slow averages."""
    parts = [part for part in a.named(BUFFERS) if part in b.sketches and a.model_of(part) in models]
    ours, theirs, before = (
        np.concatenate([trace.sketches[part][place] for part in parts])
        for trace, place in ((a, update + 1), (b, update + 1), (a, update))
    )
    which = f"the trained models are the same, and {named(models)}, which no update trains,"
    if np.array_equal(theirs, before):
        return f"{which} is not: nothing moves it"
    remainder, factor = fit(theirs - ours, ours - before)
    if remainder <= EXPLAINED:
        return f"{which} moves {1 + factor:.4g} times as far: it follows its source at another rate"
    return f"{which} is not: it follows another model, or at another moment of the update"
