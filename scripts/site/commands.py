"""The page of the commands, with the flags that the program itself knows."""

import itertools
from collections.abc import Iterator

import click

INTRODUCTION = """# Commands

`mtrain -c SPEC` is `mtrain train -c SPEC`, and `mtrain` alone trains `./mtrain.yml`, else the embedded demo. Every command has
`--help`; where it has many flags, `--help-all` shows the rest. Any value of a spec is set by `-o PATH=VALUE` ([keys](spec.md)).
[Errors](errors.md) has the exit codes.
"""


def page() -> str:
    """Return the page, with the sections of ``mtrain --help``."""
    from mtrain.commands import front, verbs
    from mtrain.spec import packages

    parts = [INTRODUCTION]
    shown: set[tuple[str, str]] = set()
    context = click.Context(front, info_name="mtrain")
    own = (verb for verb in verbs.find_verbs().values() if packages.is_own(verb.target))
    for heading, section in itertools.groupby(own, key=lambda verb: verb.heading):
        parts.append(f"## {heading}\n")
        for verb in section:
            command = front.get_command(context, verb.name)
            if command is not None:
                parts.extend(_parts(command, f"mtrain {verb.name}", level=3, shown=shown))
    return "\n".join(parts)


def _parts(command: click.Command, path: str, *, level: int, shown: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the parts of the page about a command and those below it; flags of jobs that are in ``shown`` by their names alone."""
    from mtrain.commands.helping import GROUPS

    yield f"{'#' * level} {path}\n"
    yield " ".join((command.help or "").split("\f")[0].split()).strip() + "\n"
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) and not inner.hidden:
                yield from _parts(inner, f"{path} {name}", level=level + 1, shown=shown)
        return
    context = click.Context(command, info_name=path)
    usage = " ".join((path, *command.collect_usage_pieces(context)))
    examples = getattr(command, "examples", ())
    lines = [f"$ {usage}", *(f"# {meaning}\n$ {line}" if meaning else f"$ {line}" for line, meaning in examples)]
    yield "```console\n" + "\n".join(lines) + "\n```\n"
    known: list[str] = []
    for title, rows in tables(command, context).items():
        new = [row for row in rows if title not in GROUPS or row not in shown]
        known += [flag.split(",")[0].split()[0] for flag, meaning in rows if (flag, meaning) not in new]
        if new:
            yield f"| {title} | |\n|---|---|"
            yield "\n".join(f"| {_cell(flag)} | {_text(meaning)} |" for flag, meaning in new) + "\n"
        shown.update(new if title in GROUPS else ())
    if known:
        yield f"Flags that are described above: {', '.join(f'`{flag}`' for flag in known)}.\n"


def tables(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the flags of a command by heading, each with its meaning."""
    from mtrain.commands.helping import sections

    options = [
        each
        for each in command.get_params(context)
        if isinstance(each, click.Option) and not {"--help", "--help-all"} & {*each.opts}
    ]
    return sections([(each, row) for each in options if (row := each.get_help_record(context)) is not None])


def _cell(flag: str) -> str:
    # Not between back-quotes, where a table would show the backslash before a bar.
    return f"<code>{_text(flag)}</code>"


def _text(meaning: str) -> str:
    return " ".join(meaning.split()).replace("|", "&#124;").replace("<", "&lt;")
