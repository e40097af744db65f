"""What is wrong with a command line, told as every other error: what was given, what is expected, what to do.

click's own words name its types and print the usage of the command above them.
"""

import re
import shlex
from collections.abc import Sequence

import click

from mtrain.commands.helping import usage
from mtrain.spec.suggest import closest

# click has one class for all wrong values, so what was given is read from its message.
_QUOTED = re.compile(
    r"^'(?P<value>.*?)' is not (?:a valid|one of|in the range)|^(?P<bare>\S+) is not in the range", re.DOTALL
)
"""click's messages about a value begin with it."""
_EXTRA = re.compile(r"^Got unexpected extra arguments? \((?P<words>.*)\)$", re.DOTALL)


def words_of(error: click.ClickException) -> str:
    """Return the text of an error that click or a command has raised, without ``error:``."""
    ctx = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption):
        return _unknown_flag(error, ctx)
    if isinstance(error, click.MissingParameter):
        return _missing(error, ctx)
    if isinstance(error, click.BadParameter):
        return _bad_value(error)
    if isinstance(error, click.BadOptionUsage):
        return _bad_use(error, ctx)
    if (extra := _EXTRA.match(error.message)) and ctx is not None:
        return _extra_words(extra["words"], ctx)
    return error.format_message()


def _unknown_flag(error: click.NoSuchOption, ctx: click.Context | None) -> str:
    if ctx is None:
        return f"{error.option_name}: no such flag"
    known = [
        name
        for parameter in ctx.command.get_params(ctx)
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    ]
    best = closest(error.option_name, known)
    meant = f"did you mean {best}?" if best else f"`{ctx.command_path} --help` lists the flags"
    return f"{error.option_name}: `{ctx.command_path}` has no such flag; {meant}"


def _missing(error: click.MissingParameter, ctx: click.Context | None) -> str:
    parameter = error.param
    if ctx is None or parameter is None:
        return error.format_message()
    what = parameter.make_metavar(ctx) if isinstance(parameter, click.Argument) else parameter.opts[-1]
    examples = getattr(ctx.command, "examples", ())
    example = f", for example: {examples[0][0]}" if examples else ""
    choices = ""
    if isinstance(parameter, click.Option):
        choices = f"; expected {expect(parameter)}"
    elif isinstance(parameter.type, click.Choice):
        what, choices = str(parameter.name).upper(), f"; expected {expect(parameter)}"
    return f"{what} is missing{choices}; the command is: {usage(ctx)}{example}"


def _bad_value(error: click.BadParameter) -> str:
    parameter = error.param
    if parameter is None:
        return error.format_message()
    name = error.param_hint if isinstance(error.param_hint, str) else None
    name = name or (parameter.opts[-1] if isinstance(parameter, click.Argument) else _longest(parameter.opts))
    if isinstance(parameter, click.Argument):
        name = str(parameter.name).upper()
    found = _QUOTED.match(error.message)
    if found is None:
        return f"{name}: {error.message[:1].lower()}{error.message[1:].rstrip('.')}"
    value = found["value"] if found["value"] is not None else found["bare"]
    text = f"{name} {shlex.quote(value)}: expected {expect(parameter)}"
    if isinstance(parameter.type, click.Choice):
        best = closest(value, [str(choice) for choice in parameter.type.choices])
        text += f"; did you mean {best!r}?" if best else ""
    return text


def _bad_use(error: click.BadOptionUsage, ctx: click.Context | None) -> str:
    """Tell a flag without its value, or a switch with one."""
    parameters = ctx.command.get_params(ctx) if ctx is not None else []
    parameter = next((each for each in parameters if error.option_name in (*each.opts, *each.secondary_opts)), None)
    if not isinstance(parameter, click.Option):
        return error.format_message()
    if parameter.is_flag:
        return f"{error.option_name}: expected no value; the flag stands alone"
    count = f" {parameter.nargs} values," if parameter.nargs > 1 else ""
    return f"{error.option_name}: no value is given; expected{count} {expect(parameter)}"


def _extra_words(words: str, ctx: click.Context) -> str:
    first = words.split()[0]
    flags = {name for parameter in ctx.command.get_params(ctx) for name in parameter.opts}
    if first.endswith((".yml", ".yaml")) and "-c" in flags:
        hint = f"a spec is given with -c: {ctx.command_path} -c {shlex.quote(first)}"
    elif "=" in first and "-o" in flags:
        hint = f"values of the spec are given with -o: {ctx.command_path} -o {shlex.quote(first)}"
    else:
        hint = f"the command is: {usage(ctx)}"
    return f"{words}: not expected here; {hint}"


def expect(parameter: click.Parameter) -> str:
    """Return what a value of a parameter may be."""
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return _one_of([str(choice) for choice in kind.choices])
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = "a whole number" if isinstance(kind, click.IntRange) else "a number"
        low = "" if kind.min is None else f" {'>' if kind.min_open else '>='} {kind.min}"
        high = "" if kind.max is None else f" {'<' if kind.max_open else '<='} {kind.max}"
        return number + low + (" and" if low and high else "") + high
    if kind is click.INT:
        return "a whole number"
    if kind is click.FLOAT:
        return "a number"
    if kind is click.BOOL:
        return "true or false"
    return f"{parameter.metavar}" if parameter.metavar else "a text"


def _one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _longest(names: Sequence[str]) -> str:
    return next((name for name in names if name.startswith("--")), names[0])
