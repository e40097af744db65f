"""Check the results of training: equality with one rank of ``solo``, the norm before clipping, and skipped updates."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mtrain.core.collective import broadcast
from mtrain.core.interfaces import Array, Module, Precision, RankSession, Rates, State
from mtrain.errors import SpecError, TrainingError
from mtrain_kit import training
from mtrain_kit.check_context import CLIPPED, Site
from mtrain_kit.checks import Measure, none_of
from mtrain_kit.convnet import build
from mtrain_kit.training import Case

CASES: Mapping[str, Case] = {
    "sgd": Case(),
    "accumulation": Case(accumulate=2),
    "sync_batchnorm": Case(batchnorm="synced"),
    "sync_batchnorm_accumulation": Case(batchnorm="synced", accumulate=2),
    "unclipped": Case(clip_norm=math.inf, accumulate=2),
    "adam": Case(rule="adam", accumulate=2),
    "adamw": Case(rule="adamw", batchnorm="synced"),
    "rmsprop": Case(rule="rmsprop", accumulate=2),
    "quantised": Case(quantised=True, accumulate=2),
    "taught": Case(taught=True, batchnorm="synced", accumulate=2),
    "masked": Case(masked=True, batchnorm="synced", accumulate=2),
}
ROUNDED_BOUND = 0.05
"""Largest relative difference in float32 between two jobs that round weights and inputs to 8 bits."""
PARTS = ("weights", "ema", "moments", "norms", "losses")


def learns(name: str) -> Callable[[Site], list[Measure]]:
    """Return the check that ranks learn what one rank learns, for one of ``CASES``."""

    def check(site: Site) -> list[Measure]:
        case = replace(CASES[name], precision=site.precision)
        try:
            learnt = training.train(site.session, case)
        except SpecError as error:
            if not case.masked:
                raise
            return [Measure(what="masks are refused before a model is built", value=0.0, bound=0.0, detail=str(error))]
        expected = site.reference.learnt(case)
        differences = training.differences(expected, learnt)
        # In float32 the last bits of two jobs differ, so some values round to neighbouring integers.
        bound = ROUNDED_BOUND if case.quantised and site.precision == "fp32" else site.bound
        remark = _ratio(expected["norms"], learnt["norms"], size=site.ranks, accumulate=case.accumulate)
        measures = []
        for part in PARTS:
            arrays = {key: value for key, value in differences.items() if key.split("/")[0] == part}
            worst = max(arrays, key=lambda key: (math.isnan(arrays[key]), arrays[key]), default="")
            value = arrays.get(worst, math.inf)
            detail = worst.partition("/")[2] if worst else "there are none"
            if part == "norms" and remark and not value <= bound:
                detail = remark
            measures.append(_relative(part, value, bound, detail))
        return measures

    return check


def _relative(part: str, value: float, bound: float, detail: str = "") -> Measure:
    return Measure(what=f"{part}: largest relative difference", value=value, bound=bound, detail=detail)


def _ratio(expected: Array, norms: Array, *, size: int, accumulate: int) -> str:
    """Describe a constant factor between norms."""
    if expected.shape != norms.shape or not np.isfinite(norms).all():
        return ""
    ratio = float(norms[0] / expected[0])
    if math.isclose(ratio, 1, rel_tol=1e-6):
        return "the first is that of solo"
    text = f"the first is {ratio:.4g} times that of solo"
    # Only the first norm counts: those of later updates depend on weights that already differ.
    for number, word in ((size, "the number of ranks"), (accumulate, "the number of micro batches per update")):
        if number > 1 and math.isclose(ratio, number, rel_tol=1e-6):
            return f"{text}, which is {word}: summed, not averaged"
        if number > 1 and math.isclose(ratio, 1 / number, rel_tol=1e-6):
            return f"{text}, which is 1 / {word}: divided once too often"
    return text


def starts_equal(site: Site) -> list[Measure]:
    """Check that all ranks hold the start weights, and that a rank with other weights cannot continue."""
    session, case = site.session, Case(precision=site.precision)
    model, optimizer = training.start_training(session, case.recipe(site.ranks))
    weights = session.state(model, optimizer).weights
    mismatches = training.differing_names(training.weights_for(site.precision), weights)
    return [
        none_of("arrays that are not the start weights", mismatches),
        none_of("ranks that differ", _unequal(site, case)),
    ]


def _unequal(site: Site, case: Case) -> list[str]:
    """Give the last rank another bias. Return the ranks whose outcome differs from rank 0's."""
    session, c = site.session, site.session.collective
    model, optimizer = session.prepare(build, case.recipe(site.ranks))
    weights = training.weights_for(site.precision)
    if c.rank == c.size - 1:
        # One number on one rank: the smallest difference that a comparison of ranks must find.
        weights["head.bias"] = weights["head.bias"] + weights["head.bias"].dtype.type(1e-3)
    try:
        session.restore(model, optimizer, State(weights=weights))
    except TrainingError:
        outcomes = c.all_gather("refused")
    else:
        outcomes = c.all_gather(infer(session, model)["logits"].tobytes().hex())
    return [f"rank {rank}" for rank, outcome in enumerate(outcomes) if outcome != outcomes[0]]


def infer(session: RankSession, model: Module, count: int = 4) -> dict[str, Array]:
    """Return the model's output in evaluation mode for the first images."""
    model.eval()
    try:
        (batch,) = session.batches([training.image_batch(count)])
        return session.infer(model, batch)
    finally:
        model.train()


def recomputes(site: Site) -> list[Measure]:
    """Check that blocks computed again in the backward pass give the bits of blocks that keep their results."""
    measures = []
    for what, case in (("", Case(batchnorm="synced", accumulate=2)), (" with rounded layers", Case(quantised=True))):
        kept, again = (
            training.train(site.session, replace(case, precision=site.precision, recomputed=recomputed), updates=4)
            for recomputed in (False, True)
        )
        measures.append(none_of(f"arrays that recomputing changes{what}", training.differing_names(kept, again)))
    return measures


def clipped_updates(session: RankSession, precision: Precision) -> dict[str, Array]:
    """Return for each update the norm that ``step`` returns, and the movement of the weights / (learning rate x smaller of norm
    and limit).

    Plain SGD: without momentum and decay the length of the step is the length of the clipped gradient.
    """
    case, c = Case(precision=precision, accumulate=2), session.collective
    recipe = replace(case.recipe(c.size), groups=(("", {"momentum": 0.0, "weight_decay": 0.0}),), ema_decay=0.0)
    model, optimizer = training.start_training(session, recipe)
    batches = training.batches_of(session, case)
    learning_rate, norms, moved = 0.05, [], []
    for _ in range(training.UPDATES):
        before = session.state(model, optimizer).weights
        for i in range(case.accumulate):
            with optimizer.micro_batch(last=i == case.accumulate - 1):
                optimizer.backward(model(next(batches))["total"])
        norm = optimizer.step(Rates(learning_rates=(learning_rate,)))
        after = session.state(model, optimizer).weights
        # Running statistics move without the optimizer.
        trained = [name for name in before if "running" not in name and "tracked" not in name]
        squares = sum(float(np.square(after[n].astype(np.float64) - before[n]).sum()) for n in trained)
        norms.append(norm)
        moved.append(math.sqrt(squares) / (learning_rate * min(norm, case.clip_norm)))
    return {"norms": np.array(norms), "moved": np.array(moved)}


def clips(site: Site) -> list[Measure]:
    """Check that norms are those before clipping, longer gradients are cut to the limit, and shorter ones are
    unchanged."""
    updates = clipped_updates(site.session, site.precision)
    expected = site.reference.arrays(CLIPPED)
    difference = training.differences({"norms": expected["norms"]}, {"norms": updates["norms"]})["norms"]
    limit = Case().clip_norm
    bound = 1e-5 if site.precision == "fp64" else 1e-3  # 1e-6 is added to the norm before the division
    measures = [
        _relative(
            "norms", difference, site.bound, _ratio(expected["norms"], updates["norms"], size=site.ranks, accumulate=2)
        )
    ]
    for what, chosen in (("cut", expected["norms"] > limit), ("short", expected["norms"] <= limit)):
        errors = np.abs(updates["moved"][chosen] - 1)
        measures.append(Measure(what=f"error of the step of {what} gradients", value=float(errors.max()), bound=bound))
    return measures


def skips_nonfinite(site: Site) -> list[Measure]:
    """Check the third of four updates, in which one rank's gradient is not a number."""
    session, c, case = site.session, site.session.collective, Case(precision=site.precision)
    model, optimizer = training.start_training(session, case.recipe(c.size))
    batches = training.batches_of(session, case)
    finite, changed_arrays = [], [""]
    for update in range(4):
        before = training.flat(session.state(model, optimizer))
        with optimizer.micro_batch(last=True):
            loss = model(next(batches))["total"]
            # One rank alone: the others must learn of it from the exchange.
            poisoned = update == 2 and c.rank == c.size - 1
            optimizer.backward(loss * math.nan if poisoned else loss)
        finite.append(math.isfinite(optimizer.step(training.rates(update))))
        if update == 2:
            changed_arrays = training.differing_names(before, training.flat(session.state(model, optimizer)))
    counters = session.state(model, optimizer).counters
    expected = {"updates": 3.0, "skipped": 1.0, "skipped_in_a_row": 0.0}
    wrong_counters = [
        f"{n} is {counters.get(n)}, expected {x:.0f}" for n, x in expected.items() if counters.get(n) != x
    ]
    mistaken_norms = [
        f"update {i}" for i, (a, b) in enumerate(zip(finite, (True, True, False, True), strict=True)) if a != b
    ]
    return [
        none_of("arrays that the broken update changed", changed_arrays),
        none_of("norms that do not show it", mistaken_norms),
        none_of("wrong counters", wrong_counters),
    ]


def averages(site: Site) -> list[Measure]:
    """Check that inside ``averaged`` every rank uses rank 0's averages, and afterwards its own weights, bit for bit."""
    session, c = site.session, site.session.collective
    # Statistics that are not synchronised differ between ranks: the averages of buffers must be rank 0's.
    case = Case(batchnorm="synced", precision=site.precision)
    recipe = replace(case.recipe(c.size), sync_batchnorm=False)
    model, optimizer = training.start_training(session, recipe)
    batches = training.batches_of(session, case)
    for update in range(3):
        training.update_once(session, model, optimizer, batches, case, update)
    before = infer(session, model)
    with optimizer.averaged():
        inside = infer(session, model)
    after = infer(session, model)
    first = broadcast(c, inside)
    state = session.state(model, optimizer)
    # A second model that is filled with the averages tells what `averaged` must compute.
    fresh, other = session.prepare(build, recipe)
    session.restore(fresh, other, State(weights={**state.weights, **state.ema}))
    expected = training.differences(infer(session, fresh), inside)["logits"]
    return [
        none_of("outputs that are not as before", training.differing_names(before, after)),
        none_of("outputs inside that are not those of rank 0", training.differing_names(first, inside)),
        _relative("outputs inside, to those of the averages of the state", expected, site.bound),
        none_of(
            "outputs that the averages leave as they were",
            [] if training.differing_names(before, inside) else ["logits"],
        ),
    ]
