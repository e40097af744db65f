"""Makes reporters of a user's own objects and functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.core.interfaces.reporter import METHOD_NAMES, Record, ReportedRun, Reporter
from mtrain.errors import ScriptError

FORM = f"with at least one of the methods {', '.join(METHOD_NAMES)}"


class FunctionReporter:
    """An object with the methods of a reporter, each of which calls one function with the record."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> None:
        self.every_rank = bool(getattr(function, "every_rank", False))
        self.fatal = bool(getattr(function, "fatal", False))

        def tell(record: Record) -> None:
            function(record, **(options or {}))

        self.start = self.update = self.evaluation = self.checkpoint = self.copied = tell
        self.image = self.histogram = self.message = self.end = self.failure = tell


class Adapted(Reporter):
    """Calls the methods that an object has, and leaves out those that it lacks."""

    def __init__(self, told: Any, run: ReportedRun) -> None:
        super().__init__(None, run)
        self.fatal = bool(getattr(told, "fatal", False))
        self.draws_images = bool(getattr(told, "draws_images", False))
        self.inspect_every = getattr(told, "inspect_every", None)
        # Set on the object, where they hide the methods of the class, which do nothing.
        for method in METHOD_NAMES:
            if callable(getattr(told, method, None)):
                setattr(self, method, getattr(told, method))


def refusal(told: Any) -> str:
    """Return why an object can be no reporter; empty if it can."""
    if isinstance(told, type):
        return f"the class {told.__name__} was given; give an object of it, {told.__name__}()"
    if any(callable(getattr(told, method, None)) for method in METHOD_NAMES):
        return ""
    return f"an object of type {type(told).__name__} was given; expected one {FORM}"


def of_objects(objects: Sequence[Any], run: ReportedRun) -> list[tuple[str, Reporter]]:
    """Return the reporters of this rank among a script's objects and functions, each with a name.

    Raises:
        ScriptError: an object is no reporter.
    """
    reporters: list[tuple[str, Reporter]] = []
    # An object with `__call__` and methods of a reporter counts as the latter.
    for number, given in enumerate(objects):
        is_function = callable(given) and not isinstance(given, type) and bool(refusal(given))
        told = FunctionReporter(given) if is_function else given
        if problem := refusal(told):
            raise ScriptError(f"mtrain.session: reporters[{number}]: {problem}, or a function that takes a record")
        if getattr(told, "inspect_every", None) is not None:
            raise ScriptError(
                f"mtrain.session: reporters[{number}]: inspect_every is for jobs of a spec; a script has its own model to look at"
            )
        name = getattr(given, "__name__", type(given).__name__)
        if run.rank == 0 or getattr(told, "every_rank", False):
            reporters.append((f"{name} {number}" if name in dict(reporters) else name, Adapted(told, run)))
    return reporters
