"""Check that the packages of a job's plugins are installed, before anything starts. Imports none of them.

``plugins.toml`` says what a plugin needs and which extra of mtrain installs it. The backend's own packages are checked
by ``interpreter``, which may be another one than that of this process.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.spec.plugins import PluginEntry
from mtrain.spec.registry import Registry
from mtrain.spec.resolved import Resolved

TENSORBOARD = "tensorboard"
PAGES = "html"
"""The reporter that writes a page about a job that has ended."""


def users(job: Resolved, *, is_script: bool = False) -> list[tuple[str, PluginEntry]]:
    """Return the plugins of a job that are loaded in this process and in its ranks: (key and value of the spec, entry).

    A user's script has its own model and data: of the spec only the reporters count.
    """
    spec, find = job.spec, job.registry.find
    found = []
    if not is_script:
        data = f"data.format: {spec.data.format}"
        found = [
            (data, find("tasks", job.registry.task_of("datasets", spec.data.format))),
            (data, find("datasets", spec.data.format)),
        ]
    named = [name for name, options in spec.report.reporters.items() if options is not False]
    return [*found, *((f"report.reporters: {name}", find("reporters", name)) for name in named)]


def check(job: Resolved, *, is_script: bool = False) -> None:
    """Refuse a job whose plugins need packages that are not installed.

    Raises:
        UsageError: some are missing; one line names them, and the extra that installs them.
    """
    text = missing(job, is_script=is_script)
    if text is not None:
        raise UsageError(text)


def missing(job: Resolved, *, is_script: bool = False) -> str | None:
    """Return a sentence on the packages that the plugins of a job need and that are not installed; None: all are."""
    lacking = [(key, entry) for key, entry in users(job, is_script=is_script) if not entry.is_installed]
    if not lacking:
        return None
    keys = " and ".join(dict.fromkeys(key for key, _ in lacking))
    modules = dict.fromkeys(module for _, entry in lacking for module in entry.missing())
    extras = dict.fromkeys(entry.extra for _, entry in lacking if entry.extra)
    return f"{keys}: {_not_installed(modules)}{_remedy(extras)}"


def left_out(job: Resolved) -> list[str]:
    """Return a sentence on each file that a job writes by default and cannot write here, and the extra for it."""
    report, notes = job.spec.report, []
    if report.tensorboard and TENSORBOARD not in report.reporters and not can_write_events(job.registry):
        text = f"report.tensorboard: no events are written: {_not_installed([TENSORBOARD])}"
        notes.append(text + _remedy([TENSORBOARD]))
    if report.plots and (lacking := plots_lacking(job.registry)):
        files, needed, extras = zip(*lacking, strict=True)
        notes.append(f"report.plots: no {' or '.join(files)}: {_not_installed(needed)}{_remedy(extras)}")
    return notes


def plots_lacking(registry: Registry) -> list[tuple[str, str, str]]:
    """Return what ``report.plots`` cannot write here: the file, the package that it needs, and what installs that."""
    lacking = [("results.png", "matplotlib", "report")] if find_spec("matplotlib") is None else []
    pages = lacking_for_pages(registry) if registry.policy.allows("reporters", PAGES) else []
    return lacking + [("report.html", package, "mtrain-ui") for package in pages]


def lacking_for_pages(registry: Registry) -> list[str]:
    """Return the packages that the reporter of pages needs and does not find; the package that brings it, if there is none."""
    return next((entry.missing() for entry in registry.names("reporters") if entry.name == PAGES), ["mtrain-ui"])


def can_write_events(registry: Registry) -> bool:
    """Return whether the reporter ``tensorboard`` finds its package. True if there is none, or it is disabled."""
    return all(entry.is_installed for entry in registry.usable("reporters") if entry.name == TENSORBOARD)


def _not_installed(modules: Iterable[str]) -> str:
    names = list(modules)
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def _remedy(extras: Iterable[str]) -> str:
    names: Sequence[str] = list(extras)
    return f"; install with {remedies.install(','.join(names))}" if names else ""
