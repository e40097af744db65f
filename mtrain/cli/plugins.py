"""``mtrain plugins``: list plugins, show one, write a new one, or test one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.helping import Group
from mtrain.cli.options import JobCommand
from mtrain.spec import remedies, terminal
from mtrain.spec.plugin_kinds import KINDS, REPORTERS, SELECTORS

if TYPE_CHECKING:
    from mtrain.spec.plugins import Entry

TESTED = ("backends", "models", "datasets", "tasks", "launchers")
"""Kinds of plugins that can be tested."""


@click.group(cls=Group)
def plugins() -> None:
    """List plugins of every kind, show one, write a new one, or test one."""


@plugins.command("list")
@click.argument("kind", required=False, type=click.Choice(KINDS))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_plugins(kind: str | None, *, as_json: bool) -> None:
    """List every plugin that is installed or declared, without importing any."""
    from mtrain.spec.registry import Registry

    registry = Registry.read()
    entries = [entry for each in ([kind] if kind else KINDS) for entry in registry.names(each)]
    if as_json:
        import json

        terminal.say(json.dumps([_facts(entry) for entry in entries], indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    last = ""
    for entry in entries:
        if entry.kind != last:
            terminal.say(f"{entry.kind}:")
            last = entry.kind
        provider = str(entry.provider)
        terminal.say(f"  {entry.name:<{width}}  {state(entry):<10}  {entry.about or entry.target}  ({provider})")


def _facts(entry: "Entry") -> dict[str, Any]:
    """Return what is known of a plugin, as JSON has it."""
    of_policy = ("enabled", "needs", "libraries", "extra", "install")
    return {
        **{key: getattr(entry, key) for key in ("kind", "name", "target")},
        "distribution": entry.provider.distribution,
        "version": entry.provider.version,
        **{key: getattr(entry, key) for key in of_policy},
        "summary": entry.about,
        "rivals": [str(rival.provider) for rival in entry.rivals],
        "state": state(entry),
    }


@plugins.command("show")
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), help="Where several plugins have that name.")
def show(name: str, *, kind: str | None) -> None:
    """Show what plugin NAME does, and its options with their defaults."""
    import inspect

    from mtrain.errors import PluginError
    from mtrain.spec.registry import Registry
    from mtrain.spec.suggest import hint

    registry = Registry.read()
    entries = [entry for each in ([kind] if kind else KINDS) for entry in registry.names(each)]
    matches = [entry for entry in entries if entry.name == name]
    if not matches:
        raise PluginError(
            f"no plugin {name!r}{hint(name, [entry.name for entry in entries])}; see `mtrain plugins list`"
        )
    for entry in matches:
        terminal.say(f"{entry.name}: one of the {entry.kind}, {state(entry)} ({entry.provider})")
        section = _OPTIONS_OF.get(entry.kind)
        text = "" if section is None else inspect.cleandoc(registry.load(entry.kind, name).__doc__ or "")
        terminal.say(text.replace("``", "`") or entry.about or entry.target)
        if section is not None:
            terminal.say(f"\n{section.replace('NAME', name)}:")
            for line in registry.option_lines(entry.kind, name):
                terminal.say(f"  {line}")


_OPTIONS_OF = {selector.kind: ".".join(selector.options) for selector in SELECTORS if not selector.planned} | {
    "reporters": ".".join((*REPORTERS, "NAME"))
}
"""Kind of plugin -> where a spec holds its options."""


def state(entry: "Entry") -> str:
    """Return the state of a plugin: ready, disabled, provided twice, or what is missing and how to install it."""
    if not entry.enabled:
        return "disabled"
    if entry.rivals:
        return f"also in {', '.join(str(rival.provider) for rival in entry.rivals)}"
    if not entry.installed:
        if entry.install is not None:
            return f"needs {', '.join(entry.libraries)}: {entry.remedy(sys.executable)}"
        return f"needs {', '.join(entry.missing())}" + (f": {remedies.install(entry.extra)}" if entry.extra else "")
    return "ready"


@plugins.command("new")
@click.argument("kind", type=click.Choice(("backend", "model", "dataset", "task", "launcher")))
@click.argument("name")
@click.option("--out", "--output", "out", type=click.Path(path_type=Path), help="Its folder.  [default: mtrain-NAME]")
def new_plugin(kind: str, name: str, out: Path | None) -> None:
    """Write the skeleton of a plugin of your own as a distribution that installs, trains and passes its tests."""
    from mtrain.cli import plugin_skeleton

    folder = plugin_skeleton.write(kind, name, out)
    terminal.say(f"{folder}: written; install it and test it:")
    terminal.say(f"  {sys.executable} -m pip install --no-deps --no-build-isolation -e {folder}")
    terminal.say(f"  mtrain plugins test {name} --kind {plugin_skeleton.KINDS[kind]}")


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
@click.option(
    "--limit", "limit_s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds for one check."
)
def test_plugin(name: str, **params: Any) -> int:
    """Test plugin NAME with real jobs: that a backend trains as solo does; that a model, data set or task can be repeated,
    resumed and trained on both frameworks; that a launcher starts and ends ranks.

    Exit code 0: every check passed; 1: some failed, or the job on solo did; 2: it could not be tested.
    """
    from mtrain.api.plugin_tests import PluginTestRequest, run_tests

    result = run_tests(PluginTestRequest(name=name, tell=lambda text: terminal.say(text, err=True), **params))
    terminal.say(result.report)
    return 0 if result.passed else 1
