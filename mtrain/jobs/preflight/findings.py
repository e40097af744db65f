"""Findings of checks: a value, and its forms as a line, as JSON and as a row of a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal

from mtrain.spec import terminal
from mtrain.spec.hostnames import few

State = Literal["ok", "absent", "warning", "bad"]
"""Result of a check. "absent": something that the job does not need is not installed."""
COLOURS: dict[State, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "bad": "red"}
"""The colour of each state, from the best state to the worst."""
MOST_ALIKE = 3
"""Most findings with the same text that stay apart; more become one that names all their hosts."""
WIDEST = 60
"""Characters of a cell from which on it pushes its own row aside, and not all others."""
MOST_SHOWN = 20
"""Most findings of one check in one state that are shown to people."""


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
        where = f" {few(self.hosts)}" if self.hosts else ""
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


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with those that many hosts share as one that names them all; the order is that of the first."""
    alike: dict[tuple[str, State, str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.check, finding.state, finding.text, finding.remedy), []).append(finding)
    result: list[Finding] = []
    for group in alike.values():
        if len(group) > MOST_ALIKE and all(finding.hosts for finding in group):
            hosts = dict.fromkeys(host for finding in group for host in finding.hosts)
            group = [replace(group[0], hosts=tuple(hosts))]
        result += group
    return result


def in_short(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings for people: of many about one check in one state the first ones, and a row with their number."""
    total = Counter((finding.check, finding.state) for finding in findings)
    shown: Counter[tuple[str, State]] = Counter()
    result = []
    for finding in findings:
        key = finding.check, finding.state
        shown[key] += 1
        if shown[key] <= MOST_SHOWN:
            result.append(finding)
        elif shown[key] == total[key]:
            text = f"{total[key] - MOST_SHOWN:,} more findings of this kind, {finding.line()!r} among them"
            result.append(Finding(check=finding.check, state=finding.state, text=text, hosts=("...",)))
    return result


def table(findings: Sequence[Finding], *, every: str = "all") -> str:
    """Return the findings as lines of plain text: check, state, hosts, text and remedy.

    ``every`` stands for the hosts where a finding names none.
    """
    rows = [
        (finding.check, finding.state, few(finding.hosts) or every, _text_and_remedy(finding))
        for finding in in_short(findings)
    ]
    widths = [max((len(row[column]) for row in rows if len(row[column]) <= WIDEST), default=0) for column in range(3)]
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
    for finding in in_short(findings):
        state = Text(finding.state, style=COLOURS[finding.state])
        hosts, text = few(finding.hosts) or every, _text_and_remedy(finding)
        drawn.add_row(finding.check, state, Text(terminal.printable(hosts)), Text(terminal.printable(text)))
    Console(file=stream).print(drawn)


def _text_and_remedy(finding: Finding) -> str:
    return finding.text + (f"; {finding.remedy}" if finding.remedy else "")
