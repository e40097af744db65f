"""Check that updates whose metrics are read later are those of updates that are read at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Array, RankSession
from mtrain_kit import training
from mtrain_kit.check_context import Site
from mtrain_kit.checks import Measure, none_of
from mtrain_kit.training import Case

CASES: Sequence[Case] = (
    Case(batchnorm="synced", accumulate=2),
    Case(rule="adamw", clip_norm=math.inf),
    Case(rule="rmsprop"),
)
UPDATES, BROKEN = 5, (0, 3)
"""Number of updates, and those in which the gradient of one rank is not finite."""


def same_bits_later(site: Site) -> list[Measure]:
    """Check that ``step_later`` gives weights, averages, moments, norms and losses of ``step``, bit for bit."""
    changed = []
    for case in (replace(case, precision=site.precision) for case in CASES):
        prompt, _ = _train_late(site.session, case, later=False)
        later, was_late = _train_late(site.session, case, later=True)
        if not was_late:
            detail = "metrics are read at once here: Capabilities.late is False"
            return [Measure(what="updates that are read later", value=0.0, bound=0.0, detail=detail)]
        changed += [f"{name} ({case.rule})" for name in training.differing_names(prompt, later)]
    return [none_of("arrays of late updates that are not those of prompt ones", changed)]


def _train_late(session: RankSession, case: Case, *, later: bool) -> tuple[dict[str, Array], bool]:
    """Return norms, mean losses, counters and the state after ``UPDATES``, and whether metrics were read later."""
    c = session.collective
    model, optimizer = training.start_training(session, case.recipe(c.size))
    later = later and session.capabilities.late
    batches = training.batches_of(session, case, updates=UPDATES)
    unread: list[Callable[[], tuple[float, Array]]] = []
    metrics = []
    for update in range(UPDATES):
        poisoned = update in BROKEN and c.rank == c.size - 1
        loss = 0.0
        for i in range(case.accumulate):
            with optimizer.micro_batch(last=i == case.accumulate - 1):
                part = model(next(batches))["total"]
                optimizer.backward(part * math.nan if poisoned else part)
            loss = loss + part.detach() / case.accumulate
        rates = training.rates(update)
        if later:
            unread.append(optimizer.step_later(rates, [float(c.rank)], [loss]))
            # One update is always unread, as in a job with late metrics.
            metrics += [read() for read in unread[:-1]]
            del unread[:-1]
        else:
            own = np.array([float(c.rank), float(ops.to_numpy(loss))])
            metrics.append((optimizer.step(rates), c.all_reduce(own, "mean")))
    metrics += [read() for read in unread]
    state = session.state(model, optimizer)
    learnt = {
        "norms": np.array([norm for norm, _ in metrics]),
        "metrics": np.array([means for _, means in metrics]),
        "counters": np.array([state.counters[name] for name in sorted(state.counters)]),
    }
    return training.flat(state) | learnt, later
