"""Change the training of a script as a trial of ``mtrain compare`` asks."""

from typing import Any

from mtrain.core.interfaces import Optimizer, RankSession, State
from mtrain.core.state.nudge import nudge_weights
from mtrain.rank.script.settings import change_values
from mtrain.spec.trial import Trial


def on_trial(spec: Any, trial: Trial | None) -> Any:
    """Return ``spec`` with the precision that ``trial`` asks for."""
    if trial is None or not trial.exact:
        return spec
    return change_values(spec, {"train.precision": "fp64"})


def shorten(total_updates: int, trial: Trial | None) -> int:
    """Return the number of updates that a job makes where the script asks for ``total_updates``."""
    return total_updates if trial is None else min(total_updates, trial.updates)


def nudge(rank: RankSession, model: Any, optimizer: Optimizer) -> None:
    """Move every trained weight by one unit in its last place; every rank must call."""
    weights = rank.state(model, optimizer).weights
    trained = {name for names in optimizer.groups for name in names}
    moved = nudge_weights(weights, trained)
    # A tied weight has an entry for each of its names, of which the groups have one.
    twins = {weights[name].tobytes(): name for name in trained}
    tied = {name: moved[twins[x.tobytes()]] for name, x in weights.items() if x.size > 1 and x.tobytes() in twins}
    same_shape = {name: x for name, x in tied.items() if x.shape == weights[name].shape and name not in trained}
    rank.restore(model, optimizer, State(weights={**moved, **same_shape}))
