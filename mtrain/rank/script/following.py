"""What ``session.follow`` can do: move a model that no update trains, a target network or a teacher, towards another one."""

from typing import Any

from mtrain.errors import ScriptError
from mtrain.rank.script.models import ScriptModel


def check_follow(target: ScriptModel, source: ScriptModel, tau: Any) -> None:
    """Refuse what ``session.follow`` cannot do.

    Raises:
        ScriptError: the target is trained or is the source, the two differ in their arrays, or ``tau`` is no share.
    """
    if target is source:
        raise ScriptError("session.follow: the target and the source are the same model; give two")
    if target.trained:
        name = repr(target.name) if target.name else "the model"
        raise ScriptError(
            f"session.follow: {name} has an optimizer, which trains it; prepare the target with a name and without one: "
            'session.prepare(build, name="target")'
        )
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau <= 1:
        raise ScriptError(
            f"session.follow: tau={tau!r} given; expected a number above 0 and at most 1, which copies the source"
        )
    if target.shapes != source.shapes:
        both = sorted(target.shapes.keys() | source.shapes.keys())
        name = next(name for name in both if target.shapes.get(name) != source.shapes.get(name))
        shapes = (str(x.shapes.get(name, "absent")) for x in (target, source))
        raise ScriptError(
            "session.follow: the target and the source have different arrays: {} is {} in the one and {} in the other; build both "
            "alike".format(name, *shapes)
        )
