"""``mtrain plugins list``."""

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mtrain.core.plugins import Entry

KIND_NAMES = ("backends", "models", "datasets", "launchers")


@click.group()
def plugins() -> None:
    """List backends, models, data sets and launchers."""


@plugins.command("list")
@click.argument("kind", required=False, type=click.Choice(KIND_NAMES))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_plugins(kind: str | None, *, as_json: bool) -> None:
    """Every plugin that is installed or declared; nothing of it is imported."""
    from mtrain.core import plugins as known

    entries = [entry for each in ([kind] if kind else KIND_NAMES) for entry in known.names(each)]
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


def state(entry: "Entry") -> str:
    """One word or a remedy: ready, disabled, provided twice, or what is missing."""
    if not entry.enabled:
        return "disabled"
    if entry.rivals:
        return f"also in {', '.join(entry.rivals)}"
    if not entry.installed:
        if entry.install is not None:
            return f"needs {entry.library}: {entry.remedy(sys.executable)}"
        return f"needs {entry.needs}" + (f": pip install 'mtrain[{entry.extra}]'" if entry.extra else "")
    return "ready"
