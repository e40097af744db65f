"""``mtrain plugins``: list plugins, show one, write a new one, or test one."""

import sys
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands import verbs
from mtrain.commands.helping import CommandGroup
from mtrain.spec import remedies, terminal
from mtrain.spec.plugin_kinds import KINDS, REPORTERS, SELECTORS

if TYPE_CHECKING:
    from mtrain.spec.plugins import PluginEntry


class Plugins(CommandGroup):
    """The verbs here, and those that entry points ``plugins.NAME`` bring; nobody replaces one that is here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all."""
        return [*super().list_commands(ctx), *self._brought()]

    def lines(self) -> list[tuple[str, str]]:
        """Return name and line of each; none is imported for it."""
        return [*super().lines(), *((name, terminal.printable(verb.line)) for name, verb in self._brought().items())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command of this file, or import one of another package; None where there is none of this name."""
        verb = self._brought().get(cmd_name)
        return super().get_command(ctx, cmd_name) if verb is None else verbs.load(verb)

    def _brought(self) -> dict[str, verbs.Verb]:
        return {name: verb for name, verb in verbs.find_verbs("plugins").items() if name not in self.commands}


@click.group(cls=Plugins)
def plugins() -> None:
    """List plugins of every kind, show one, write a new one, or test one."""


@plugins.command("list", examples=(("mtrain plugins list models", "the models that model.name may name"),))
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


def _facts(entry: "PluginEntry") -> dict[str, Any]:
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


@plugins.command("show", examples=(("mtrain plugins show yolov5n", "its options"),))
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


def state(entry: "PluginEntry") -> str:
    """Return the state of a plugin: ready, disabled, provided twice, or what is missing and how to install it."""
    if not entry.enabled:
        return "disabled"
    if entry.rivals:
        return f"also in {', '.join(str(rival.provider) for rival in entry.rivals)}"
    if not entry.is_installed:
        if entry.install is not None:
            return f"needs {', '.join(entry.libraries)}: {entry.remedy(sys.executable)}"
        return f"needs {', '.join(entry.missing())}" + (f": {remedies.install(entry.extra)}" if entry.extra else "")
    return "ready"
