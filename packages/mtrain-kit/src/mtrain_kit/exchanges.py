"""Check how much ranks send: gradients are exchanged once per update, however many micro batches it has."""

from dataclasses import replace

import numpy as np

from mtrain.core.interfaces import Array, Rates, State
from mtrain.core.ranks.traffic import sent_bytes
from mtrain_kit.check_context import Site
from mtrain_kit.checks import Measure
from mtrain_kit.training import Case

MICRO_BATCHES, MICRO_BATCH, PIXELS, WIDTH = 4, 4, 192, 256
MEASURED_UPDATES = 3
# The ratio tells: an exchange of gradients in every micro batch gives 4, one per update gives 1. Where shards of the weights are
# gathered for every pass and gradients are exchanged once, it is 3.
MOST = 3.5
"""Largest allowed ratio."""


def exchanges_once(site: Site) -> list[Measure]:
    """Compare the bytes of an update of four micro batches with those of an update of one."""
    one, four = (_count_sent(site, accumulate) for accumulate in (1, MICRO_BATCHES))
    what = f"bytes of {MICRO_BATCHES} micro batches / bytes of one"
    if one is None or four is None:
        return [Measure(what=what, value=0.0, bound=MOST, detail="the kernel does not count what is sent")]
    return [Measure(what=what, value=four / one if one else 0.0, bound=MOST, detail=f"{one} and {four} bytes")]


def _count_sent(site: Site, accumulate: int) -> int | None:
    """Return the bytes that this rank sends in a few updates, after a first one in which libraries settle; None: not
    measured."""
    session, c = site.session, site.session.collective
    plain = (("", {"momentum": 0.0, "weight_decay": 0.0}),)
    case = Case(precision=site.precision, accumulate=accumulate)
    recipe = replace(case.recipe(c.size), groups=plain, frozen=(), ema_decay=0.0, micro_batch=MICRO_BATCH)
    model, optimizer = session.prepare(_build, recipe)
    session.restore(model, optimizer, State(weights=_weights(site)))
    updates = 1 + MEASURED_UPDATES
    batches = session.batches([_batch(c.rank) for _ in range(updates * accumulate)])
    before: int | None = 0
    for update in range(updates):
        if update == 1:
            c.all_gather(None)
            # After a collective call, all ranks have sent what belongs to the updates before.
            before = sent_bytes()
        for i in range(accumulate):
            with optimizer.micro_batch(last=i == accumulate - 1):
                optimizer.backward(model(next(batches))["total"])
        optimizer.step(Rates(learning_rates=(1e-3,)))
    c.all_gather(None)
    after = sent_bytes()
    return None if before is None or after is None else after - before


def _build() -> object:
    from mtrain_kit.network import Wide

    return Wide(PIXELS, WIDTH)


def _weights(site: Site) -> dict[str, Array]:
    generator = np.random.default_rng(5)
    dtype = np.float64 if site.precision == "fp64" else np.float32
    shapes = {"hidden.weight": (WIDTH, PIXELS), "hidden.bias": (WIDTH,), "out.weight": (1, WIDTH), "out.bias": (1,)}
    return {name: generator.normal(0, 0.05, shape).astype(dtype) for name, shape in shapes.items()}


def _batch(rank: int) -> dict[str, Array]:
    images = np.random.default_rng([9, rank]).normal(size=(MICRO_BATCH, PIXELS))
    return {"images": images, "index": np.arange(MICRO_BATCH)}
