"""Findings of checks: a value, and its forms as a line, as JSON and as a row of a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from mtrain.spec import terminal

State = Literal["ok", "absent", "warning", "bad"]
"""Result of a check. "absent": something that the job does not need is not installed."""
COLOURS: dict[State, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "bad": "red"}
"""The colour of each state, from the best state to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, on one host or on all."""

    check: str
    """Name of the check, the same in every version, so that programs can rely on it."""
    state: State
    text: str
    """What the check found, and what it expected where that differs."""
    hosts: tuple[str, ...] = ()
    """The hosts that it concerns; empty: all hosts, or this one where there is only one."""
    remedy: str = ""
    """What the user can do."""

    def line(self) -> str:
        """Return the whole finding as one line of text."""
        where = f" {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.check}{where}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain values, for programs."""
        return {**asdict(self), "hosts": list(self.hosts)}


def worst(findings: Sequence[Finding]) -> State:
    """Return the worst state among the findings; "ok" where there are none."""
    return max((finding.state for finding in findings), key=list(COLOURS).index, default="ok")


def bad(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that keep a job from starting."""
    return [finding for finding in findings if finding.state == "bad"]


def table(findings: Sequence[Finding], *, every: str = "all") -> str:
    """Return the findings as lines of plain text: check, state, hosts, text and remedy.

    ``every`` stands for the hosts where a finding names none.
    """
    rows = [
        (finding.check, finding.state, ", ".join(finding.hosts) or every, _text_and_remedy(finding))
        for finding in findings
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def show(findings: Sequence[Finding], *, every: str, stream: IO[str]) -> None:
    """Print the findings as a table: in colour on a terminal, as plain lines elsewhere. ``every``: see ``table``."""
    if not stream.isatty():
        terminal.say(table(findings, every=every), stream=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table("check", "", "hosts", "found", box=None, pad_edge=False)
    for finding in findings:
        state = Text(finding.state, style=COLOURS[finding.state])
        hosts, text = ", ".join(finding.hosts) or every, _text_and_remedy(finding)
        drawn.add_row(finding.check, state, Text(terminal.printable(hosts)), Text(terminal.printable(text)))
    Console(file=stream).print(drawn)


def _text_and_remedy(finding: Finding) -> str:
    return finding.text + (f"; {finding.remedy}" if finding.remedy else "")
