"""Which calls of a script's optimizer may follow which: the states of a model within a batch, and the words for any other order."""

from collections.abc import Mapping, Sequence

from mtrain.core.update.stepping import MADE, Use

_STEPS = {Use.TAKEN: Use.STEPPED, Use.EXCHANGED: Use.STEPPED}
TRANSITIONS: Mapping[str, Mapping[Use, Use]] = {
    "update": {Use.FRESH: Use.STEPPED},
    "backward": {Use.FRESH: Use.TAKEN, Use.TAKEN: Use.TAKEN, Use.SEARCHING: Use.SEARCHED, Use.SEARCHED: Use.SEARCHED},
    "gradients(loss)": dict.fromkeys((Use.FRESH, Use.TAKEN, Use.EXCHANGED), Use.EXCHANGED),
    "gradients": dict.fromkeys((Use.TAKEN, Use.EXCHANGED), Use.EXCHANGED),
    "step": _STEPS,
    "skip": dict.fromkeys(_STEPS, Use.SKIPPED),
    "step(closure)": {Use.FRESH: Use.STEPPED},
}
"""Maps a call to the states in which it is allowed, and each to the state that follows; in a micro batch that is not the last one of its
update, a step is only asked for. The next batch makes every model fresh."""
TAKES_LOSS: Sequence[str] = ("update", "backward", "gradients(loss)")
_WHEN: Mapping[Use, str] = {
    Use.FRESH: "where there is no gradient",
    Use.TAKEN: "twice for one batch",
    Use.EXCHANGED: "after {optimizer}.gradients(), whose gradients are means over the ranks already",
    **dict.fromkeys((Use.ASKED, Use.STEPPED), "after the step of this batch"),
    Use.SKIPPED: "after {optimizer}.skip() for this batch",
    **dict.fromkeys((Use.SEARCHING, Use.SEARCHED), "inside of the closure of {optimizer}.step(closure)"),
}
_LOSS_AFTER: Mapping[Use, str] = {
    Use.TAKEN: "call it once, with the sum of the losses, or prepare the model with overlap=False, and call backward(loss) for each "
    "loss and step() after the last",
    Use.EXCHANGED: "call `backward` for all losses before, or `gradients(loss)` for each, and step() last",
    **dict.fromkeys(
        MADE,
        "a batch has one step: call it once, with the sum of the losses, or move backward(loss) in front of that step",
    ),
}
_STEP_AFTER: Mapping[Use, str] = {
    Use.FRESH: "call {optimizer}.backward(loss) before, once per batch, or {optimizer}.update(loss) in the place of both",
    **dict.fromkeys(MADE, "there is no gradient any more; leave one of the two out"),
}


def describe_refusal(call: str, use: Use, *, optimizer: str) -> str:
    """Return why a call is not allowed in a state of its model, and which line to move; ``optimizer``: how the script names it."""
    when = _WHEN[use]
    if use in (Use.SEARCHING, Use.SEARCHED):
        remedy = "a closure calls backward(loss) alone; move this call behind step(closure)"
    elif call in TAKES_LOSS:
        remedy = _LOSS_AFTER[use]
    elif call == "step(closure)" and use not in MADE:
        when, remedy = "after a loss of this batch was used", "call backward(loss) in the closure alone"
    else:
        remedy = _STEP_AFTER[use]
    return f"called {when}; {remedy}".replace("{optimizer}", optimizer)
