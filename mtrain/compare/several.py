"""Recognise why a job departs from another one; of several models, which one differs first, and in what."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from mtrain.compare.traces import ordinal
from mtrain_trace import causes, steps
from mtrain_trace.comparing import Comparison
from mtrain_trace.differences import BUFFERS, GRADIENT, LOSS, MOMENTS, STATE
from mtrain_trace.reading import Trace


def explain(comparison: Comparison) -> list[str]:
    """Return sentences about job b, the likeliest cause first; empty for the same bits."""
    place, a = comparison.first, comparison.a
    found = causes.explain_bits(comparison)
    if place is None or not a.updates[0].model_norms:
        return found
    if told := _other_trained(a, comparison.b, place):
        return [told]
    # The quantity that differs first tells what went wrong; all later ones follow from it.
    first = comparison.what[0]
    models = _models_apart(comparison, place, first)
    if causes.is_rounding(comparison, first, place) or not models:
        return found
    told = _unlike_models(comparison, place, first, models)
    return [told] if told else [f"{_names_of(models)}: {found[0]}", *found[1:]]


def _names_of(models: Iterable[str]) -> str:
    """Return how sentences name models."""
    names = list(models)
    return f"model {names[0]}" if len(names) == 1 else f"models {', '.join(names)}"


def _trained_names(trace: Trace, place: int) -> frozenset[str]:
    return trace.updates[place].trained or frozenset()


def _other_trained(a: Trace, b: Trace, last: int) -> str:
    """Report the first update up to ``last`` that does not train the same models; empty if there is none."""
    ever = frozenset().union(*(_trained_names(a, place) for place in range(len(a.updates))))
    for place in range(last + 1):
        ours, theirs = _trained_names(a, place), _trained_names(b, place)
        if never := sorted(theirs - ever):
            return (
                f"in {ordinal(place)} it trains {_names_of(never)}, which the reference never trains: a target network or a teacher is "
                "changed by updates of its own"
            )
        if further := sorted(theirs - ours):
            return f"in {ordinal(place)} it trains {_names_of(further)}, and the reference does not"
        if missing := sorted(ours - theirs):
            return f"in {ordinal(place)} it does not train {_names_of(missing)}, and the reference does"
    return ""


def _models_apart(comparison: Comparison, place: int, first: str) -> list[str]:
    """Return the models that differ in the quantity ``first`` of an update."""
    ours, theirs = comparison.a.updates[place], comparison.b.updates[place]
    if first == LOSS:
        pairs = ((name, f"loss_{name}") for name in ours.model_norms)
        return [
            name for name, key in pairs
            if key in ours.loss_parts and key in theirs.loss_parts and ours.loss_parts[key] != theirs.loss_parts[key]
        ]  # fmt: skip
    if first == GRADIENT:
        norms = ((name, norm, theirs.model_norms[name]) for name, norm in ours.model_norms.items())
        return [name for name, x, y in norms if x != y and not (math.isnan(x) and math.isnan(y))]
    if first not in STATE:
        return []
    mine, other = ours.arrays.get(first, {}), theirs.arrays.get(first, {})
    names = sorted(name for name in mine if name in other and mine[name].digest != other[name].digest)
    return list(dict.fromkeys(_model_of(first, name) for name in names))


def _model_of(part: str, name: str) -> str:
    """Return the model to which an array of a part belongs."""
    return name.rpartition(" of ")[2] if part in (MOMENTS, "weights") else name


def _unlike_models(comparison: Comparison, place: int, first: str, models: Sequence[str]) -> str:
    """Explain a difference that only some of several models have; empty where that explains nothing."""
    ours, theirs = comparison.a.updates[place], comparison.b.updates[place]
    others = [name for name in ours.model_norms if name not in models]
    if first == LOSS and len(models) == 1 and (source := _loss_besides(comparison, place, models[0])):
        return (
            f"the loss of {_names_of(models)} is larger by that of model {source}, whose gradient is left in it: give each loss to the "
            "optimizer of its own model alone"
        )
    if first == GRADIENT and others:
        pairs = [(theirs.model_norms[name], ours.model_norms[name]) for name in models]
        sizes = ", ".join(f"{other:.4g} instead of {mine:.4g}" for other, mine in pairs)
        return (
            f"the losses are the same and the gradient of {_names_of(models)} is not ({sizes}), that of {_names_of(others)} is: the "
            "gradient of another model's loss is left in it, or one of its own losses is missing"
        )
    # Models that no update of the reference trains, such as targets, move by another rule.
    never = {name for name in models if not any(name in (update.trained or ()) for update in comparison.a.updates)}
    return _explain_untrained(comparison, place, models) if first == BUFFERS and never == set(models) else ""


def _loss_besides(comparison: Comparison, place: int, model: str) -> str:
    """Return another model whose loss is added to that of ``model``; empty if there is none."""
    ours, theirs = comparison.a.updates[place].loss_parts, comparison.b.updates[place].loss_parts
    added = theirs[f"loss_{model}"] - ours[f"loss_{model}"]
    for name in comparison.a.updates[place].model_norms:
        loss = ours[f"loss_{name}"]
        if name != model and loss and abs(added - loss) <= 1e-4 * abs(loss):
            return name
    return ""


def _explain_untrained(comparison: Comparison, place: int, models: Sequence[str]) -> str:
    """Explain other weights of models that no update trains, such as targets and slow averages."""
    ours, theirs, before = (
        np.concatenate([trace.rows(BUFFERS, at)[model].sketch for model in models])
        for trace, at in ((comparison.a, place), (comparison.b, place), (comparison.a, place - 1))
    )
    which = f"the trained models are the same, and {_names_of(models)}, which no update trains,"
    if np.array_equal(theirs, before):
        return f"{which} is not: nothing moves it"
    remainder, factor = steps.fit(theirs - ours, ours - before)
    if remainder <= steps.EXPLAINED:
        return f"{which} moves {1 + factor:.4g} times as far: it follows its source at another rate"
    return f"{which} is not: it follows another model, or at another moment of the update"
