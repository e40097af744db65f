"""The page of the commands, which is made from the program."""

import html
import re

import click

from mtrain.commands import front
from scripts.site.commands import page


def commands(group: click.Group, path: str) -> dict[str, click.Command]:
    """Return the commands below a group by path, hidden ones left out."""
    found = {}
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, f"{path} {name}")
        elif not command.hidden:
            found[f"{path} {name}"] = command
    return found


def test_every_command_has_its_flags_and_examples_on_the_page() -> None:
    text = html.unescape(page())
    headings = set(re.findall(r"^#+ (mtrain .*)$", text, re.MULTILINE))
    for path, command in commands(front, "mtrain").items():
        assert path in headings
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert max(option.opts, key=len) in text, f"{path} {option.opts}"


def test_a_bar_in_a_flag_does_not_end_its_cell() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| <code>")]
    assert len(rows) > 200
    assert {line.count("|") for line in rows} == {3}
