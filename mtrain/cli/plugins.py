"""``mtrain plugins``: list plugins, show one, write a new one, or test one."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand
from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.spec.plugin_kinds import KINDS, REPORTERS, SELECTORS

if TYPE_CHECKING:
    from mtrain.spec.plugins import Entry

TESTED = ("backends", "models", "datasets", "tasks", "launchers")
"""Kinds of plugins that can be tested."""


@click.group()
def plugins() -> None:
    """List plugins of every kind, show one, write a new one, or test one."""


@plugins.command("list")
@click.argument("kind", required=False, type=click.Choice(KINDS))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_plugins(kind: str | None, *, as_json: bool) -> None:
    """List every plugin that is installed or declared, without importing any."""
    from mtrain.spec import plugins as registry

    entries = [entry for each in ([kind] if kind else KINDS) for entry in registry.names(each)]
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps([{**dataclasses.asdict(entry), "state": state(entry)} for entry in entries], indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    last = ""
    for entry in entries:
        if entry.kind != last:
            click.echo(f"{entry.kind}:")
            last = entry.kind
        provider = f"{entry.distribution} {entry.version}".strip()
        click.echo(f"  {entry.name:<{width}}  {state(entry):<10}  {entry.summary or entry.target}  ({provider})")


@plugins.command("show")
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), help="Where several plugins have that name.")
def show(name: str, *, kind: str | None) -> None:
    """Show what plugin NAME does, and its options with their defaults."""
    import inspect

    from mtrain.errors import PluginError
    from mtrain.spec import plugins as registry
    from mtrain.spec.suggest import hint

    entries = [entry for each in ([kind] if kind else KINDS) for entry in registry.names(each)]
    matches = [entry for entry in entries if entry.name == name]
    if not matches:
        raise PluginError(
            f"no plugin {name!r}{hint(name, [entry.name for entry in entries])}; see `mtrain plugins list`"
        )
    for entry in matches:
        click.echo(f"{entry.name}: one of the {entry.kind}, {state(entry)} ({entry.distribution} {entry.version})")
        section = _OPTIONS_OF.get(entry.kind)
        text = "" if section is None else inspect.cleandoc(registry.load(entry.kind, name).__doc__ or "")
        click.echo(text.replace("``", "`") or entry.summary or entry.target)
        if section is not None:
            click.echo(f"\n{section.replace('NAME', name)}:")
            for line in registry.option_lines(entry.kind, name):
                click.echo(f"  {line}")


_OPTIONS_OF = {selector.kind: ".".join(selector.options) for selector in SELECTORS if not selector.planned} | {
    "reporters": ".".join((*REPORTERS, "NAME"))
}
"""Kind of plugin -> where a spec holds its options."""


def state(entry: "Entry") -> str:
    """Return the state of a plugin: ready, disabled, provided twice, or what is missing and how to install it."""
    if not entry.enabled:
        return "disabled"
    if entry.rivals:
        return f"also in {', '.join(entry.rivals)}"
    if not entry.installed:
        if entry.install is not None:
            return f"needs {entry.library}: {entry.remedy(sys.executable)}"
        return f"needs {entry.needs}" + (f": {remedies.install(entry.extra)}" if entry.extra else "")
    return "ready"


@plugins.command("new")
@click.argument("kind", type=click.Choice(("backend", "model", "dataset", "task", "launcher")))
@click.argument("name")
@click.option("--out", "--output", "out", type=click.Path(path_type=Path), help="Its folder.  [default: mtrain-NAME]")
def new_plugin(kind: str, name: str, out: Path | None) -> None:
    """Write the skeleton of a plugin of your own as a distribution that installs, trains and passes its tests."""
    from mtrain.cli import plugin_skeleton

    folder = plugin_skeleton.write(kind, name, out)
    click.echo(f"{folder}: written; install it and test it:")
    click.echo(f"  {sys.executable} -m pip install --no-deps --no-build-isolation -e {folder}")
    click.echo(f"  mtrain plugins test {name} --kind {plugin_skeleton.KINDS[kind]}")


@plugins.command("test", cls=JobCommand)
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
@click.option("--limit", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds for one check.")
def test_plugin(name: str, **params: Any) -> int:
    """Test plugin NAME with real jobs: that a backend trains as solo does; that a model, data set or task can be repeated,
    resumed and trained on both frameworks; that a launcher starts and ends ranks.

    Exit code 0: every check passed; 1: some failed, or the job on solo did; 2: it could not be tested.
    """
    import json
    import shutil
    import tempfile

    from mtrain.system import environment
    from mtrain.testing import kit, plugin_kit, wording

    kind = params["kind"] or _kind_of(name, params["overrides"])
    order = kit.KitRequest(
        backend=name,
        ranks=params["ranks"],
        overrides=params["overrides"],
        only=params["only"],
        limit_s=params["limit"],
        environ=environment.cleaned(environment.caller()),
        python=sys.executable,
        say=lambda text: click.echo(text, err=True),
    )
    report = params["json_file"]
    if report is not None:
        _check_can_be_written(report)
    folder = params["out"] or Path(tempfile.mkdtemp(prefix=f"mtrain-test-{Path(name).name}-"))
    _make_folder(folder)
    try:
        conformance = kit.run(order, folder) if kind == "backends" else plugin_kit.run(kind, order, folder)
    except UsageError:
        if params["out"] is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if report is not None:
        report.write_text(json.dumps(conformance.as_json(), indent=2) + "\n", encoding="utf-8")
    click.echo(wording.report(conformance))
    if conformance.passed and params["out"] is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if conformance.passed else 1


def _kind_of(name: str, overrides: tuple[str, ...]) -> str:
    """Return the kind of the plugin to test: the first that has the name. An unknown name is taken for a backend's."""
    from mtrain.spec import plugins as registry

    files = [text.partition("=")[2] for text in overrides if text.startswith("plugins=")]
    policy = registry.read_policy(files[-1] if files else None)
    kinds = (kind for kind in TESTED if any(entry.name == name for entry in registry.names(kind, policy=policy)))
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
