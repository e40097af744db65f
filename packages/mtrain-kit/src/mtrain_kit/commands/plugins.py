"""``mtrain plugins new`` and ``mtrain plugins test``: write a new plugin, test one."""

import sys
from pathlib import Path
from typing import Any

import click

from mtrain.commands.options import JobCommand
from mtrain.spec import terminal

TESTED = ("backends", "models", "datasets", "tasks", "launchers")
"""Kinds of plugins that can be tested."""


@click.command("new")
@click.argument("kind", type=click.Choice(("backend", "model", "dataset", "task", "launcher")))
@click.argument("name")
@click.option("--out", "--output", "out", type=click.Path(path_type=Path), help="Its folder.  [default: mtrain-NAME]")
def new_plugin(kind: str, name: str, out: Path | None) -> None:
    """Write the skeleton of a plugin of your own as a distribution that installs, trains and passes its tests."""
    from mtrain_kit import skeleton as skeleton

    folder = skeleton.write(kind, name, out)
    terminal.say(f"{folder}: written; install it and test it:")
    terminal.say(f"  {sys.executable} -m pip install --no-deps --no-build-isolation -e {folder}")
    terminal.say(f"  mtrain plugins test {name} --kind {skeleton.KINDS[kind]}")


@click.command("test", cls=JobCommand)
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
    from mtrain_kit.plugin_tests import PluginTestRequest, run_tests

    result = run_tests(PluginTestRequest(name=name, tell=lambda text: terminal.say(text, err=True), **params))
    terminal.say(result.report)
    return 0 if result.passed else 1
