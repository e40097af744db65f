"""The command line: ``mtrain COMMAND ...``; without a command, ``train``.

Commands are imported when they run, so that ``--help`` costs nothing and no command pays for another's imports.
"""

import itertools
import logging
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from mtrain import __version__
from mtrain.commands import verbs
from mtrain.commands.helping import unknown_command
from mtrain.errors import MtrainError, SpecError, UsageError
from mtrain.spec import collector, terminal
from mtrain.spec.files import path_problem

__all__ = ["Front", "front", "main"]

DEFAULT = "train"
"""The command that runs where none is named."""
INTERRUPTED = 130


class Front(click.Group):
    """The verbs that are installed.

    A verb is imported when it is used; flags without a verb belong to ``train``.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs, in the order of the help."""
        return list(verbs.find_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None where there is none of this name."""
        verb = verbs.find_verbs().get(cmd_name)
        return None if verb is None else verbs.load(verb)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``train`` before arguments that name no command."""
        first = args[0] if args else ""
        own = {"--help", "-h", "--version"}
        if not args or (first.startswith("-") and first not in own):
            args = [DEFAULT, *args]
        elif first and not first.startswith("-") and first not in verbs.find_verbs():
            ctx.fail(_unknown_command_message(first))
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by heading; none is imported for it."""
        found = verbs.find_verbs().values()
        width = max((len(verb.name) for verb in found), default=0)
        for heading, section in itertools.groupby(found, key=lambda verb: verb.heading):
            with formatter.section(terminal.printable(heading)):
                # One width for all sections, so that the lines of the help begin below each other.
                formatter.write_dl([(f"{verb.name:{width}}", terminal.printable(verb.line)) for verb in section])


def _unknown_command_message(word: str) -> str:
    if word.endswith((".yml", ".yaml")):
        return f"no command {word!r}; a spec is given with -c: mtrain -c {shlex.quote(word)}"
    if verbs.is_shipped(word):
        from mtrain.spec import remedies

        return f"{word!r} is a command of mtrain, whose installation is older than its sources; install again with: {remedies.install('')}"
    return unknown_command(word, list(verbs.find_verbs()))


def _missing_package(error: Exception) -> str:
    """Return the words for a package of mtrain's clone that is not installed; empty for any other error.

    Where a clone is newer than the installation from it, a package may have moved to a folder that Python does not search.
    """
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] != "mtrain_trace":
        return ""
    from mtrain.spec import remedies

    return f"mtrain needs mtrain-trace, which is not installed; install both with: {remedies.install('')}"


@click.group(
    cls=Front,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="`mtrain -c SPEC` is `mtrain train -c SPEC`; `mtrain` alone trains ./mtrain.yml, else the embedded demo. "
    "Flags of a command: `mtrain COMMAND --help`.",
)
@click.version_option(__version__, prog_name="mtrain")
def front() -> None:
    """One YAML spec, any training backend."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 wrong use or spec, 130 interrupted."""
    if argv is None:
        terminal.open_closed_streams()
        collector.run_seldom()
        # A scheduler's SIGUSR1 asks a job to save; until there is one, it must not end this process.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if logging.lastResort is not None:  # It prints warnings, which may name files of others.
        logging.lastResort.setFormatter(terminal.PrintableFormatter())
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = front.main(arguments, prog_name="mtrain", standalone_mode=False)
    except MtrainError as error:
        return _report(error)
    except click.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.ClickException as error:
        return _report_usage(error)
    except MemoryError:
        terminal.say(f"error: mtrain {' '.join(arguments[:1])}: out of memory in this process", err=True)
        return 1
    except Exception as error:
        words = path_problem(error) or _missing_package(error)
        if words:
            terminal.say(f"error: {words}", err=True)
            return UsageError.exit_code
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0


def _report_usage(error: click.ClickException) -> int:
    """Print what is wrong with the command line as an ``error:`` line; return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # A group alone: click 8.2 and later raise its help.
        error.show()
        return error.exit_code
    from mtrain.commands.mistakes import words_of

    terminal.say(f"error: {words_of(error)}", err=True)
    return error.exit_code


def _report(error: MtrainError) -> int:
    """Print one ``error:`` line per mistake, and the traceback where ``MTRAIN_DEBUG`` is set; return the exit code."""
    from mtrain.spec import config

    if config.debug():
        traceback.print_exception(error)
    problems = error.problems if isinstance(error, SpecError) else (str(error).replace("\n", "\n  "),)
    for problem in problems:
        terminal.say(f"error: {problem}", err=True)
    return error.exit_code
