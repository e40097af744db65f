"""Tests of plugins with real jobs: ``mtrain plugins test``."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.core.record_files import write_json
from mtrain.errors import UsageError
from mtrain.spec.registry import Registry
from mtrain_kit import kit, plugin_kit, wording
from mtrain_kit.jobs import PluginTestRequest

__all__ = ["PluginTestRequest", "PluginTested", "run_tests"]

KINDS = ("backends", "models", "datasets", "tasks", "launchers")
"""Kinds of plugins that can be tested; of several with one name, the first is meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginTested:
    """The result of the tests of a plugin."""

    passed: bool
    report: str
    """What was found, as text."""


def run_tests(request: PluginTestRequest) -> PluginTested:
    """Test a plugin with real jobs.

    Raises:
        UsageError: it could not be tested, or a file cannot be written.
    """
    kind = request.kind or _kind_of(request.name, request.overrides)
    if request.json_file is not None:
        _check_can_be_written(request.json_file)
    folder = request.out or Path(tempfile.mkdtemp(prefix=f"mtrain-test-{Path(request.name).name}-"))
    _make_folder(folder)
    try:
        conformance = kit.run(request, folder) if kind == "backends" else plugin_kit.run(kind, request, folder)
    except UsageError:
        if request.out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if request.json_file is not None:
        write_json(request.json_file, conformance.as_json())
    if conformance.passed and request.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    return PluginTested(passed=conformance.passed, report=wording.report(conformance))


def _kind_of(name: str, overrides: Sequence[str]) -> str:
    """Return the kind of the plugin to test: the first that has the name. An unknown name is taken for a backend's."""
    files = [text.partition("=")[2] for text in overrides if text.startswith("plugins=")]
    registry = Registry.read(files[-1] if files else None)
    kinds = (kind for kind in KINDS if any(entry.name == name for entry in registry.names(kind)))
    return next(kinds, "backends")


def _check_can_be_written(file: Path) -> None:
    """Refuse a file that cannot be written, before minutes are spent on its content."""
    if not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(
            f"--json {file}: cannot be written; name a file in a folder that exists and that you may write to"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be made ({error.strerror}); name another folder") from error
