"""All errors that mtrain raises for its users. Every message says what was given, what was expected and what to do.

::

    MtrainError               exit code 1
    ├── UsageError            2    the command line is wrong
    │   ├── SpecError         2    the spec is wrong: one line per problem, all at once
    │   ├── DataError         2    images or annotations are missing, unreadable or disagree with the spec
    │   ├── PluginError       2    a plugin is unknown, disabled, ambiguous or broken
    │   ├── ScriptError       2    a user's own training script uses its session wrongly
    │   └── CheckpointError   2    no intact checkpoint where one is required
    ├── UnboundError          1    a neutral layer or function was used before a backend was loaded
    ├── LaunchError           1    the ranks could not be started, or one of them failed
    ├── CannotTell            3    nothing can be said about two trainings
    ├── TrainingError         1    training cannot go on
    │   └── NonFiniteError    1    too many updates in a row were not finite
    └── Interrupted           143  ended from outside, state saved (130 at the starter for Ctrl-C)
"""

from collections.abc import Sequence

MAX_PROBLEMS = 120
"""Most mistakes of a spec that are listed; the rest are only counted."""


def first_few(names: Sequence[object], limit: int) -> str:
    """Format names for a message: the first ``limit`` of them, then how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + more


class MtrainError(Exception):
    """Base class of all errors that a user may see. They are printed without a traceback."""

    exit_code = 1


class UsageError(MtrainError):
    """The command line, the spec, or what they name is wrong. Nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """The spec is wrong. ``problems`` holds one line per mistake, ``file:line path: message``, ``MAX_PROBLEMS`` at most."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = (problems,) if isinstance(problems, str) else tuple(problems)
        rest = len(lines) - MAX_PROBLEMS
        self.problems = (*lines[:MAX_PROBLEMS], f"... and {rest} more mistakes") if rest > 0 else lines
        super().__init__("\n".join(self.problems))


class DataError(UsageError):
    """Images or annotations are missing, unreadable, or disagree with the spec."""


class PluginError(UsageError):
    """A plugin is unknown, disabled, provided twice, or could not be loaded.

    ``problem`` and ``remedy`` are the two parts of its message, where the error was raised with both.
    """

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class ScriptError(UsageError):
    """A user's own training script uses ``mtrain.session`` wrongly; the message says what to change."""


class CheckpointError(UsageError):
    """There is no intact checkpoint where one is required, or it does not fit the model."""


class UnboundError(MtrainError):
    """A name of ``core.nn`` or ``core.ops`` was used before a backend was loaded."""


class LaunchError(MtrainError):
    """The ranks could not be started, or one of them failed."""


class CannotTell(MtrainError):
    """Nothing can be said about two trainings; an error is never the verdict that they differ, which has exit code 1."""

    exit_code = 3


class TrainingError(MtrainError):
    """Training cannot continue."""


class NonFiniteError(TrainingError):
    """Too many updates in a row had a gradient that is not finite."""


class Interrupted(MtrainError):
    """The job was asked to end; its state is saved."""

    exit_code = 143
