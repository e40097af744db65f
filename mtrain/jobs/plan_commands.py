"""The commands of a plan as text for a person, short for any number of hosts."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtrain.core.interfaces import Command

WRITTEN_OUT = 8
"""Largest number of hosts of which each command is written out; of more, alike commands are written once."""
LONGEST_WORD = 60
"""Characters that are shown of a word that differs from host to host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommand:
    """What is started for one host."""

    node: int
    command: Command
    brought: Sequence[str] = ()
    """The command that a cluster runs to bring ``command`` to the host; empty without a cluster."""
    starts: bool = False
    """Whether that command starts the other one by itself."""

    def lines(self) -> list[str]:
        """Return the commands as lines for a shell: variables first, quoted where needed. For printing only."""
        lines = [f"host {self.node}: {self.command.host}"]
        if self.brought:
            lines += ["  " + shlex.join(self.brought), "  which there starts" if self.starts else "  which starts"]
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.command.env.items())]
        return [*lines, "  " + " ".join(variables) + " \\", "  " + shlex.join(self.command.argv)]

    @property
    def words(self) -> tuple[str, ...]:
        """All words of the commands, variables included."""
        variables = (f"{name}={value}" for name, value in sorted(self.command.env.items()))
        return (*self.brought, *variables, *self.command.argv)

    def is_alike(self, other: "HostCommand") -> bool:
        """Return whether the commands of both hosts differ in the hosts' own numbers and addresses alone."""
        words, others = self.words, other.words
        return len(words) == len(others) and all(
            own == its or self._put(other, own) == its for own, its in zip(words, others, strict=True)
        )

    def _put(self, other: "HostCommand", word: str) -> str:
        """Return ``word`` with another host's number and address in place of this one's."""
        # An address that only begins like this host's, such as 10.0.0.12 for 10.0.0.1, is that of another host.
        address = rf"(?<![\w.-]){re.escape(self.command.host)}(?![\w-]|\.\w)"
        put = re.sub(address, other.command.host, word)
        return re.sub(rf"(^|[=-]){self.node}$", rf"\g<1>{other.node}", put)


def command_lines(commands: Sequence[HostCommand]) -> list[str]:
    """Return the lines of all hosts, an empty one before each host."""
    if len(commands) <= WRITTEN_OUT:
        return [line for one in commands for line in ("", *one.lines())]
    lines: list[str] = []
    for first, *rest in _alike(commands):
        lines += ["", *first.lines()]
        if len(rest) == 1:
            lines += ["", *rest[0].lines()]
        elif rest:
            second, last = rest[0], rest[-1]
            each = zip(("", *first.words), first.words, second.words, last.words, strict=False)
            changes = [
                f"{_flag(before)}{_short(begin)} ... {_short(end)}" for before, own, begin, end in each if own != begin
            ]
            lines += [
                "",
                f"hosts {second.node} to {last.node}: {second.command.host} ... {last.command.host}",
                f"  as host {first.node}, but for {', '.join(changes) or 'nothing'}; --json prints every command",
            ]
    return lines


def _alike(commands: Sequence[HostCommand]) -> Iterator[list[HostCommand]]:
    """Yield the hosts in groups, each of hosts in a row whose commands are alike."""
    group = [commands[0]]
    for one in commands[1:]:
        if group[0].is_alike(one):
            group.append(one)
        else:
            yield group
            group = [one]
    yield group


def _short(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else word[: LONGEST_WORD - 3] + "..."


def _flag(word: str) -> str:
    """Return a flag with a space, in front of its value; nothing for other words."""
    return f"{word} " if word.startswith("-") and "=" not in word and word != "--" else ""
