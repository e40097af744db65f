"""Make the reporters that a spec names."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.core.interfaces.reporter import ReportedRun, Reporter
from mtrain.errors import MtrainError, PluginError, TrainingError
from mtrain.records.reporter import word_error
from mtrain.spec.registry import Registry
from mtrain.system import plugin_packages
from mtrain.system.plugin_packages import TENSORBOARD, can_write_events

log = logging.getLogger(__name__)


def choose_options(report: Any) -> dict[str, Mapping[str, Any]]:
    """Return the options of each reporter that the section ``report`` of a spec names and does not leave out, by name."""
    return {
        name: {} if options is True else options for name, options in report.reporters.items() if options is not False
    }


def make_reporters(
    report: Any, run: ReportedRun, *, registry: Registry
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
    by_default = report.tensorboard and TENSORBOARD not in report.reporters
    # Where its package is missing, the preflight has said so.
    if by_default and registry.policy.allows("reporters", TENSORBOARD) and can_write_events(registry):
        try:
            reporters += _make_reporter(TENSORBOARD, {}, run, registry)
        except Exception as error:  # No spec has named it, so nothing about it ends a job.
            failures.append((TENSORBOARD, error))
    for name, raw_options in choose_options(report).items():
        try:
            reporters += _make_reporter(name, raw_options, run, registry)
        except MtrainError:
            raise
        except Exception as error:  # A foreign class may raise any exception.
            failures.append((name, error))
    return reporters, failures


def write_page(registry: Registry, folder: Path | None, *, code: int, warn: Callable[[str], None]) -> Path | None:
    """Let the reporter ``html`` write the page of a job that has ended; return its path, None where there is none.

    An error becomes one warning, because the job itself is done.

    Args:
        registry: The plugins of the job.
        folder: The run folder; None where another host has it.
        code: Exit code of the job.
        warn: Receives the warning.
    """
    # A job that was asked to end gets no page: who asked may give it seconds.
    is_allowed = registry.policy.allows("reporters", plugin_packages.PAGES)
    # Where its package is missing, the preflight has said so.
    if folder is None or code not in (0, 1) or not is_allowed or plugin_packages.lacking_for_pages(registry):
        return None
    try:
        reporter: type[Reporter] = registry.load("reporters", plugin_packages.PAGES)
        return reporter.write_page(folder)
    except Exception as error:  # A foreign class may raise any exception.
        log.debug("the page of %s could not be written", folder, exc_info=True)
        warn(f"warning: {folder / 'report.html'} could not be written: {error}")
        return None


def _make_reporter(
    name: str, raw_options: Mapping[str, Any], run: ReportedRun, registry: Registry
) -> list[tuple[str, Reporter]]:
    """Return one reporter with its name, or nothing where this rank has none."""
    options = registry.options("reporters", name, raw_options, path=f"report.reporters.{name}")
    target: type[Reporter] = registry.load("reporters", name)
    if not target.is_on(run.rank):
        return []
    try:
        reporter = target(options, run)
    except Exception as error:
        if target.fatal and not isinstance(error, MtrainError):
            raise TrainingError(f"the reporter {name!r} cannot be made: {word_error(error)}") from error
        raise
    every = reporter.inspect_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise PluginError(
            f"report.reporters.{name}: its inspect_every is {every!r}; expected a whole number of updates >= 1, or None"
        )
    return [(name, reporter)]
