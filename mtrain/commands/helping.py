"""The help of commands: their flags in groups, and examples at the end."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import click

from mtrain.spec import terminal
from mtrain.spec.suggest import closest

GROUPS: Mapping[str, Sequence[str]] = {
    "Spec": ("config", "overrides"),
    "Training": (
        *("epochs", "batch_size", "learning_rate", "amp", "no_amp", "sync_bn", "seed", "name"),
        *("resume", "eval_too", "dry_run", "quiet", "verbose"),
    ),
    "Backend and devices": (
        "backend",
        "devices",
        "nproc_per_node",
        "launcher",
        "log_dir",
        "max_restarts",
        "hang_timeout",
    ),
    "Several hosts": (
        *("ips", "hostfile", "nnodes", "cluster", "node_rank", "master_addr", "master_port", "start_port"),
        *("control_port", "ssh_port", "ssh_identity_file", "failure_timeout_s"),
    ),
    "Flags that YOLOv5 and PaddleDetection have too": (
        *("data", "cfg", "weights", "image_size", "workers", "cache", "noval", "patience", "freeze", "save_period"),
        *("label_smoothing", "cos_lr", "optimizer", "project", "noplots", "multi_scale", "image_weights", "single_cls"),
        *("fleet", "use_vdl"),
    ),
}
"""Heading in the help of a job -> the parameters below it. A parameter that is not listed is the command's own."""
RARE = {
    *(
        "no_amp",
        "sync_bn",
        "eval_too",
        "quiet",
        "verbose",
        "launcher",
        "log_dir",
        "hang_timeout",
        "hostfile",
        "node_rank",
    ),
    *("master_addr", "master_port", "start_port", "control_port", "ssh_port", "ssh_identity_file", "failure_timeout_s"),
    *GROUPS["Flags that YOLOv5 and PaddleDetection have too"],
}
"""Parameters that the help of a command with many flags leaves out; ``--help-all`` shows them."""
_ALL = "mtrain.help_all"
"""Key of a context's ``meta``: whether the help shows all flags."""

Examples = Sequence[tuple[str, str]]
"""Lines of the shell, and what each one does."""


class Command(click.Command):
    """A command whose help shows its flags in groups, and examples at the end."""

    def __init__(self, name: str | None, *, examples: Examples = (), **settings: Any) -> None:
        super().__init__(name, **settings)
        self.examples = examples
        if _has_many_flags(each.name for each in self.params):
            settings = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
            self.params.append(click.Option(["--help-all"], help="Show all flags and exit.", **settings))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; an error of the parser knows the command, which click leaves out in some."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, in groups where there are many, and then the examples."""
        # Arguments are in the usage line and in the text above; click 8.3 and later list their bare names once more.
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        rows = [(each, row) for each in options if (row := each.get_help_record(ctx)) is not None]
        left_out = RARE if _has_many_flags(each.name for each, _ in rows) and not ctx.meta.get(_ALL) else ()
        for heading, entries in sections(rows, left_out).items():
            with formatter.section(heading):
                formatter.write_dl(entries)
        if self.examples:
            self._format_examples(formatter)

    def _format_examples(self, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            width = max(len(line) for line, _ in self.examples)
            indent = " " * formatter.current_indent
            fits = all(width + len(f"{indent}  # {meaning}") <= formatter.width for _, meaning in self.examples)
            for line, meaning in self.examples:
                if fits:
                    formatter.write(f"{indent}{line:{width}}  # {meaning}".rstrip(" #") + "\n")
                else:
                    formatter.write((f"{indent}# {meaning}\n" if meaning else "") + f"{indent}{line}\n")


def _has_many_flags(names: Iterable[str | None]) -> bool:
    """Return whether a command takes the flags of a job."""
    return len({*names} & {*GROUPS["Several hosts"]}) >= 4


def _show_all(ctx: click.Context, _parameter: click.Parameter, given: object) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        terminal.say(ctx.get_help())
        ctx.exit()


def sections(
    rows: Sequence[tuple[click.Option, tuple[str, str]]], left_out: Container[str | None] = ()
) -> dict[str, list[tuple[str, str]]]:
    """Divide the flags of a command by ``GROUPS``, with their rows of the help; one section where it has few flags of jobs."""
    names = {option.name for option, _ in rows}
    if not _has_many_flags(names):
        return {"Options": [row for _, row in rows]}
    # `--weights` of a command that has `--checkpoint` too is its own, and no flag of YOLOv5's training.
    own = {"weights"} if "checkpoint" in names else set()
    heading_of = {name: heading for heading, names in GROUPS.items() for name in names if name not in own}
    sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{heading: [] for heading in GROUPS}}
    for option, row in rows:
        heading = heading_of.get(option.name or "", "Options")
        if heading == "Options" or option.name not in left_out:
            sections[heading].append(row)
    if all(
        "--help" in row[0] for row in sections["Options"]
    ):  # The command has no flag of its own: the spec comes first.
        sections["Other"] = sections.pop("Options")
    return {heading: entries for heading, entries in sections.items() if entries}


class CommandGroup(click.Group):
    """A group of commands whose help has examples; an unknown word gets a suggestion."""

    command_class = Command
    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help, which click would cut off."""
        with formatter.section("Commands"):
            formatter.write_dl(self.lines())

    def lines(self) -> list[tuple[str, str]]:
        """Return name and line of each command, for the help."""
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        return [(name, command.get_short_help_str(limit=200)) for name, command in shown.items()]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        Raises:
            click.UsageError: there is none; the message names the most similar one, or all.
        """
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            ctx.fail(unknown_command(args[0], self.list_commands(ctx), path_of(ctx)))
        return super().resolve_command(ctx, args)


def path_of(ctx: click.Context) -> str:
    """Return the command of a context without the program's name, such as ``config show``."""
    return " ".join(ctx.command_path.split()[1:])


def unknown_command(word: str, known: Sequence[str], group: str = "") -> str:
    """Return the message about a word that names no command."""
    best = closest(word, known)
    where = f"{group} has no command {word!r}" if group else f"no command {word!r}"
    return where + (f"; did you mean {best!r}?" if best else f"; commands: {', '.join(known)}")


def usage(ctx: click.Context) -> str:
    """Return the usage line of a command, such as ``mtrain predict [OPTIONS] IMAGE|FOLDER ...``."""
    pieces: list[Any] = ctx.command.collect_usage_pieces(ctx)
    return " ".join((ctx.command_path, *pieces))
