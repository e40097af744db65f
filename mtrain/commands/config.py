"""``mtrain config``: show, explain, validate and import specs, and print the schema."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.helping import CommandGroup
from mtrain.commands.options import JobCommand, load_job, quiet_job_options, spec_argument, spec_request
from mtrain.commands.plan import read_for_showing
from mtrain.spec import outputs, terminal

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded
    from mtrain.spec.model import Spec


@click.command("import", cls=JobCommand)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--to", metavar="OUT.yml", type=click.Path(path_type=Path), help="Write the spec here instead of printing it."
)
@click.option("--force", is_flag=True, help="Replace the file of --to.")
@click.option(
    "--from", "importer", metavar="IMPORTER",
    help="The plugin that reads FILE: see `mtrain plugins list importers`. Without it, mtrain's own are tried.",
)  # fmt: skip
@click.option(
    "--cards", type=click.IntRange(min=1), metavar="N",
    help="Cards that PaddleDetection's batch per card and learning rate are meant for; 8 where it is not given.",
)  # fmt: skip
@click.option(
    "-o", "--opt", "--override", "--set", "overrides", multiple=True, metavar="PATH=VALUE ...",
    help="Set values of the spec that results, for example -o data.root=coco.",
)  # fmt: skip
def import_(*, files: tuple[Path, ...], to: Path | None, force: bool, **params: Any) -> None:
    """Turn FILE, PaddleDetection's YAML or YOLOv5's model, hyp and data YAML, into a spec.

    The spec goes to --to, or is printed; what became of every key of FILE is told beside it.
    """
    from mtrain.errors import UsageError
    from mtrain.spec.importers.conversion import convert

    # Before the conversion, whose result would be lost.
    if to is not None:
        _check_target(to, force=force)
    imported = convert(files, **params)
    for line in imported.lines():
        terminal.say(line, err=True)
    if to is None:
        terminal.say(imported.text, nl=False)
        return
    try:
        outputs.write_text(to, imported.text)
    except OSError as error:
        raise UsageError(f"--to {to}: cannot be written: {error.strerror}") from error
    terminal.say(f"written: {to}", err=True)


def _check_target(to: Path, *, force: bool) -> None:
    """Refuse a file that exists or cannot be written, before the conversion starts."""
    from mtrain.errors import UsageError

    try:
        exists, folder = to.exists(), to.parent.is_dir()
    except OSError as error:
        raise UsageError(f"--to {to}: {error.strerror}") from error
    if exists and not force:
        raise UsageError(f"--to {to}: exists; give --force to replace it")
    if not folder:
        raise UsageError(f"--to {to}: no folder {to.parent}; make it first")


@click.group(cls=CommandGroup)
def config() -> None:
    """List, show, explain, validate and import specs."""


config.add_command(import_)


@config.command("list", examples=(("mtrain config list", "the names that -c takes"),))
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


@config.command(
    cls=JobCommand,
    examples=(
        ("mtrain config show -c yolov5n_bccd --origins", "every value, and where it came from"),
        ("mtrain config show -c yolov5n_bccd --lr 0.005", "the spec with another learning rate"),
    ),
)
@quiet_job_options
@spec_argument
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


@config.command(
    cls=JobCommand, examples=(("mtrain config explain optimizer.learning_rate -c yolov5n_bccd", "one value of a spec"),)
)
@click.argument("path")
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


@config.command(examples=(("mtrain config schema > spec.schema.json", "for an editor"),))
@click.option("-c", "--config", metavar="SPEC", help="Only what this spec may hold, for its task.")
def schema(*, config: str | None) -> None:
    """Print a JSON schema of what a spec may hold: what all of them have, and what each installed task adds."""
    import json

    from mtrain.spec.building import Tasks

    if config is None:
        schemas = Tasks().schemas
    else:
        spec = load_job({"config": config}).spec
        schemas = {spec.task: type(spec)}
    terminal.say(json.dumps(_json_schema(schemas), indent=2))


def _json_schema(schemas: "Mapping[str, type[Spec]]") -> dict[str, Any]:
    """Return a JSON schema that accepts the specs of each task in ``schemas``."""
    definitions, kinds = {}, []
    for task, schema in schemas.items():
        described = schema.model_json_schema(ref_template=f"#/$defs/{task}/{{model}}")
        definitions[task] = described.pop("$defs")
        kinds.append({**described, "title": f"spec of a job of the task {task}"})
    return {"title": "spec of a job", "anyOf": kinds, "$defs": definitions}


@config.command(examples=(("mtrain config validate spec.yml", "every mistake, with its line"),))
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
