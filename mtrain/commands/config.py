"""``mtrain config``: show, explain, validate and import specs, and print the schema."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.completing import complete_config, complete_path
from mtrain.commands.config_import import import_
from mtrain.commands.helping import Group
from mtrain.commands.options import JobCommand, load_job, quiet_job_options, spec_request
from mtrain.commands.plan import read_for_showing
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


@click.group(cls=Group)
def config() -> None:
    """List, show, explain, validate and import specs."""


config.add_command(import_)


@config.command("list")
def list_configs() -> None:
    """List the shipped specs, which -c takes by name, and the specs in this folder."""
    from mtrain.spec.sources import shipped_summaries, specs_in

    shipped, here = shipped_summaries(), specs_in(Path())
    width = max(map(len, shipped))
    terminal.say("shipped with mtrain:")
    for name, summary in shipped.items():
        terminal.say(f"  {name:{width}}  {summary}")
    if here:
        terminal.say("in this folder:")
    for name in here:
        terminal.say(f"  {name}")


@config.command(cls=JobCommand)
@quiet_job_options
@click.option("--origins", is_flag=True, help="Say behind each value where it came from.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(*, origins: bool, as_json: bool, **params: Any) -> None:
    """Print the resolved spec, defaults included.

    Every flag of `mtrain train` is taken too, and becomes part of the spec.
    """
    from mtrain.spec.config import resolved_json

    loaded = read_for_showing(spec_request(params))
    if as_json:
        terminal.say(resolved_json(loaded.spec), nl=False)
        return
    terminal.say(f"# {loaded.source}")
    for line in _yaml_lines(loaded.values, loaded if origins else None):
        terminal.say(line)


@config.command(cls=JobCommand)
@click.argument("path", shell_complete=complete_path)
@quiet_job_options
def explain(path: str, **params: Any) -> None:
    """Say what the value at PATH is, means and may be, where it came from and what it replaced.

    Every flag of `mtrain train` is taken too, and becomes part of the spec.
    """
    from mtrain.spec.provenance import lookup
    from mtrain.spec.schema import describe, dot, field_at, has_value, walk
    from mtrain.spec.suggest import hint

    loaded = read_for_showing(spec_request(params))
    schema = type(loaded.spec)
    keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    field = field_at(schema, keys)
    if field is None and (not has_value(schema, keys) or lookup(loaded.values, keys) is None):
        known_paths = [dot(known_path) for known_path, _ in walk(schema)]
        raise click.UsageError(f"{path}: no such value{hint(path, known_paths)}")
    terminal.say(f"{path} = {_flow(lookup(loaded.values, keys))}")
    if field is not None:
        if field.description:
            terminal.say(f"  {field.description}")
        terminal.say(f"  type     {describe(field.annotation, field.metadata)}")
        terminal.say(f"  default  {_flow(lookup(schema().model_dump(mode='json'), keys))}")
    terminal.say(f"  from     {loaded.origin(path)}")
    for line in _option_lines(loaded, path):
        terminal.say(line)
    for value, origin in reversed(loaded.history.get(path, ())):
        terminal.say(f"  over     {_flow(value)}  from {origin}")


def _option_lines(loaded: "Loaded", path: str) -> list[str]:
    """Return lines about the options of the selected plugin, where ``path`` is its section ``options``; else none."""
    from mtrain.errors import PluginError
    from mtrain.spec.plugin_kinds import SELECTORS
    from mtrain.spec.provenance import lookup

    selector = next((each for each in SELECTORS if ".".join(each.options) == path), None)
    if selector is None:
        return []
    name = lookup(loaded.values, selector.path)
    try:
        lines = loaded.registry.option_lines(selector.kind, name)
    except PluginError as error:
        return [f"  known    {error}"]
    return [f"  of       {'.'.join(selector.path)} {name}:", *(f"    {line}" for line in lines)]


@config.command()
@click.option(
    "-c", "--config", metavar="SPEC", shell_complete=complete_config, help="Only what this spec may hold, for its task."
)
@click.option("--markdown", is_flag=True, help="A reference to read instead of a JSON schema.")
def schema(*, config: str | None, markdown: bool) -> None:
    """Print what a spec may hold: what all of them have, and what each installed task adds."""
    import json

    from mtrain.commands import reference
    from mtrain.spec.building import Tasks

    if config is None:
        schemas = Tasks().schemas
    else:
        spec = load_job({"config": config}).spec
        schemas = {spec.task: type(spec)}
    if not markdown:
        terminal.say(json.dumps(reference.json_schema(schemas), indent=2))
        return
    for line in reference.markdown(schemas):
        terminal.say(line)


@config.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...]) -> None:
    """Check specs and print every mistake of all of them."""
    from mtrain.errors import SpecError
    from mtrain.spec import config as configuration

    problems: list[str] = []
    for file in files:
        try:
            loaded = configuration.load(file)
        except SpecError as error:
            problems.extend(error.problems)
        else:
            terminal.say(f"{file}: valid ({loaded.source})")
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))


def _yaml_lines(values: Mapping[str, Any], loaded: "Loaded | None", prefix: str = "") -> list[str]:
    """Return values as YAML: sections in block style, their values in flow style.

    With ``loaded``, origins as comments.
    """
    lines = []
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_yaml_lines(value, loaded, f"{path}.")]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            lines += [f"{indent}{key}:{_comment(loaded, path)}", *(f"{indent}  - {_flow(item)}" for item in value)]
        else:
            lines.append(f"{indent}{key}: {_flow(value)}{_comment(loaded, path)}")
    return lines


def _comment(loaded: "Loaded | None", path: str) -> str:
    return "" if loaded is None else f"  # {loaded.origin(path)}"


def _flow(value: Any) -> str:
    """Return a value as one line of YAML from which the same value can be read."""
    from mtrain.spec.yaml_reader import flow

    return flow(value)
