"""Models that no update trains: target networks and teachers, which follow another model or stay as they are."""

from collections.abc import Iterator
from typing import Any

from mtrain.errors import ScriptError
from mtrain.rank.script.models import ScriptModel


def check_untrained(name: str, **settings: Any) -> None:
    """Refuse settings of an optimizer for a model that has none.

    Raises:
        ScriptError: one of ``settings`` is given.
    """
    if given := [f"{setting}=" for setting, value in settings.items() if value is not None]:
        raise ScriptError(
            f"session.prepare: {', '.join(given)} given for {name!r}, which has no optimizer, so nothing trains it; give optimizer= too, "
            f"or leave {given[0]} out"
        )


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


def submodules(module: Any) -> Iterator[Any]:
    """Yield a module of torch or Paddle and all modules in it, each of which is in training or in evaluation mode."""
    yield module
    for child in module.children():
        yield from submodules(child)
