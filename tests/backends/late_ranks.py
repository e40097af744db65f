"""Run one rank of the tests of late updates: ``late_ranks STUDIES BACKEND OUT OPTIONS`` (see ``rank_main``).

BACKEND is ddp, deepspeed or fsdp.
"""

import sys
from dataclasses import replace
from typing import Any

from mtrain.backends._torch import nn, ops
from mtrain.core.binding import bind
from mtrain.core.interfaces import Recipe
from mtrain_kit import training
from mtrain_kit.training import Case
from tests.backends.host_reads import counted
from tests.backends.rank_main import main

UPDATES = 5


def reads(session: Any) -> Any:
    """Return what two updates in mid-job read, by rule: each reads its own figures when the next one was started."""
    bind(nn, ops)
    return {rule: reads_of(session, rule) for rule in ("sgd", "rmsprop")}


def reads_of(session: Any, rule: Any) -> Any:
    """Return the reads of the last two of ``UPDATES``, and whether the session is late."""
    case = Case(rule=rule, precision="fp32")
    # Statistics of BatchNorm over ranks are exchanged by layers that only the CPU uses.
    recipe: Recipe = replace(case.recipe(session.collective.size), frozen=())
    model, optimizer = training.start_training(session, recipe)
    batches = [next(training.batches_of(session, case)) for _ in range(UPDATES)]
    unread, by_update = [], []
    with counted("torch") as seen:
        for update, batch in enumerate(batches):
            seen.calls.clear()
            with optimizer.micro_batch(last=True):
                loss = model(batch)["total"]
                optimizer.backward(loss)
            if session.late:
                unread.append(optimizer.step_later(training.rates(update), [0.0], [loss.detach()]))
                former = unread.pop(0) if update else None
                former and former()
            else:
                optimizer.step(training.rates(update))
            by_update.append(dict(seen.calls))
    return {"late": session.late, "reads": by_update[-2:]}


if __name__ == "__main__":
    if sys.argv[2] == "deepspeed":
        from mtrain.backends.deepspeed import DeepSpeed as Kind
    elif sys.argv[2] == "fsdp":
        from mtrain.backends.fsdp import Fsdp as Kind  # type: ignore[assignment]
    else:
        from mtrain.backends.ddp import DDP as Kind  # type: ignore[assignment]
    main(Kind, globals(), sys.argv[1:])
