"""``mtrain config import``: convert the config of another project to a spec."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.completing import complete_plugin
from mtrain.commands.options import JobCommand
from mtrain.spec import outputs, terminal
from mtrain.spec.terminal import one_line

if TYPE_CHECKING:
    from mtrain.spec.importers.conversion import Imported


@click.command("import", cls=JobCommand)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--to", metavar="OUT.yml", type=click.Path(path_type=Path), help="Write the spec here instead of printing it."
)
@click.option("--force", is_flag=True, help="Replace the file of --to.")
@click.option(
    "--from", "importer", metavar="IMPORTER", shell_complete=complete_plugin("importers"),
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

    if to is not None:
        _check_target(to, force=force)
    imported = convert(files, **params)
    for line in report(imported):
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


def report(imported: "Imported") -> list[str]:
    """Return lines that report what became of every key of the imported files."""
    from mtrain.spec.importers.key_report import show_value

    assumed = [f"{path}: {show_value(value.value)} - {value.source}" for path, value in imported.assumed.items()]
    parts = (
        ("carried over", [f"{entry} -> {entry.remark}" for entry in imported.carried]),
        ("assumed, as no file states it", assumed),
        ("not carried over", [f"{entry} - {entry.remark}" for entry in imported.dropped]),
        ("notes", imported.notes),
    )
    lines = [f"read: {', '.join(imported.files)}"]
    for title, entries in parts:
        lines += ["", f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries)]
    return [one_line(line) for line in lines]
