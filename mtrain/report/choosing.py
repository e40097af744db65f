"""Make the reporters that a spec names."""

from collections.abc import Mapping
from typing import Any

from mtrain.core.reporter import ReportedRun, Reporter
from mtrain.errors import TrainingError, UsageError
from mtrain.report.reporter import worded
from mtrain.spec import plugins

TENSORBOARD = "tensorboard"


def chosen(report: Any) -> dict[str, Mapping[str, Any]]:
    """Return the options of each reporter that the section ``report`` of a spec switches on, by name."""
    named = {name: options for name, options in report.reporters.items() if options is not False}
    implied = {TENSORBOARD: True} if report.tensorboard and TENSORBOARD not in report.reporters else {}
    return {name: {} if options is True else options for name, options in {**implied, **named}.items()}


def made(
    report: Any, run: ReportedRun, *, policy: plugins.Policy
) -> tuple[list[tuple[str, Reporter]], list[tuple[str, Exception]]]:
    """Make the reporters of this rank, which the section ``report`` of a spec names.

    Returns:
        The reporters by name, and those that could not be made, with their exceptions: a full disk, for example.

    Raises:
        UsageError: a reporter is unknown or not installed, refuses its options, or says that it is used wrongly.
        TrainingError: one that is ``fatal`` could not be made.
    """
    reporters: list[tuple[str, Reporter]] = []
    failures: list[tuple[str, Exception]] = []
    for name, raw_options in chosen(report).items():
        path = f"report.reporters.{name}"
        options = plugins.options("reporters", name, raw_options, path=path, policy=policy)
        target: type[Reporter] = plugins.load("reporters", name, policy=policy)
        if not target.is_on(run.rank):
            continue
        try:
            reporters.append((name, target(options, run)))
        except UsageError:
            raise
        except Exception as error:  # A foreign class may raise any exception.
            if target.fatal:
                raise TrainingError(f"the reporter {name!r} cannot be made: {worded(error)}") from error
            failures.append((name, error))
    return reporters, failures
