"""``mtrain plugins new`` and ``mtrain plugins test``: write a new plugin, test one."""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.helping import Command
from mtrain.commands.options import JobCommand
from mtrain.errors import UsageError
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain_kit.jobs import PluginTestRequest
    from mtrain_kit.kit import Conformance
    from mtrain_kit.plugin_kit import PluginConformance

TESTED = ("backends", "models", "datasets", "tasks", "launchers")
"""Kinds of plugins that can be tested; of several with one name, the first is meant."""


@click.command("new", cls=Command, examples=(("mtrain plugins new backend mine", "a package in ./mtrain-mine"),))
@click.argument("kind", type=click.Choice(("backend", "model", "dataset", "task", "launcher")))
@click.argument("name")
@click.option("--out", "--output", "out", type=click.Path(path_type=Path), help="Its folder.  [default: mtrain-NAME]")
def new_plugin(kind: str, name: str, out: Path | None) -> None:
    """Write the skeleton of a plugin of your own as a distribution that installs, trains and passes its tests."""
    from mtrain_kit import skeleton

    folder = skeleton.write(kind, name, out)
    terminal.say(f"{folder}: written; install it and test it:")
    terminal.say(f"  {sys.executable} -m pip install --no-deps --no-build-isolation -e {folder}")
    terminal.say(f"  mtrain plugins test {name} --kind {skeleton.KINDS[kind]}")


@click.command(
    "test", cls=JobCommand, examples=(("mtrain plugins test ddp --ranks 2", "prove that it trains as solo does"),)
)
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(TESTED), help="Where several plugins have that name.  [default: backends first]"
)
@click.option(
    "--ranks", type=click.IntRange(min=1), help="Ranks of its jobs, on this machine: 1, 2, 3, 4 or 6.  [default: 2]"
)
@click.option("--only", multiple=True, metavar="ID", help="Only checks whose id begins so; can be repeated.")
@click.option(
    "-o",
    "--opt",
    "--override",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="A value of the spec, such as backend.options.timeout_s=60.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write what was found there."
)
@click.option(
    "--out",
    "--output",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep logs in this folder.  [default: a temporary one]",
)
@click.option(
    "--limit", "limit_s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds for one check."
)
def test_plugin(name: str, **params: Any) -> int:
    """Test plugin NAME with real jobs: that a backend trains as solo does; that a model, data set or task can be repeated,
    resumed and trained on both frameworks; that a launcher starts and ends ranks.

    Exit code 0: every check passed; 1: some failed, or the job on solo did; 2: it could not be tested.
    """
    from mtrain_kit import wording
    from mtrain_kit.jobs import PluginTestRequest

    conformance = run_tests(PluginTestRequest(name=name, tell=lambda text: terminal.say(text, err=True), **params))
    terminal.say(wording.report(conformance))
    return 0 if conformance.has_passed else 1


def run_tests(request: "PluginTestRequest") -> "Conformance | PluginConformance":
    """Test a plugin with real jobs.

    Raises:
        UsageError: it could not be tested, or a file cannot be written.
    """
    from mtrain.core.record_files import write_json
    from mtrain_kit import kit, plugin_kit

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
    if conformance.has_passed and request.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    return conformance


def _kind_of(name: str, overrides: Sequence[str]) -> str:
    """Return the kind of the plugin to test: the first that has the name. An unknown name is taken for a backend's."""
    from mtrain.spec.registry import Registry

    files = [text.partition("=")[2] for text in overrides if text.startswith("plugins=")]
    registry = Registry.read(files[-1] if files else None)
    kinds = (kind for kind in TESTED if any(entry.name == name for entry in registry.names(kind)))
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
