"""What a check has found: a value, one line, a row of a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

State = Literal["ok", "absent", "warning", "bad"]
"""absent: something that nobody asked for is not installed."""
COLOURS: dict[State, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "bad": "red"}
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check on one host, or on all."""

    check: str
    """Which; the same word in every version, for programs."""
    state: State
    text: str
    """What was found, and what was expected where that is something else."""
    hosts: tuple[str, ...] = ()
    """Those that it concerns; none: all, or this one."""
    remedy: str = ""
    """What to do."""

    def line(self) -> str:
        """All in one line."""
        where = f" {', '.join(self.hosts)}" if self.hosts else ""
        return f"{self.check}{where}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "hosts": list(self.hosts)}


def worst(findings: Sequence[Finding]) -> State:
    """The worst state; "ok" where nothing was found."""
    return max((finding.state for finding in findings), key=list(COLOURS).index, default="ok")


def bad(findings: Sequence[Finding]) -> list[Finding]:
    """Those that keep a job from starting."""
    return [finding for finding in findings if finding.state == "bad"]


def table(findings: Sequence[Finding], *, every: str = "all") -> str:
    """All findings as lines of plain text: check, state, hosts (``every``: where a finding names none), what was found."""
    rows = [(finding.check, finding.state, ", ".join(finding.hosts) or every, _said(finding)) for finding in findings]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def show(findings: Sequence[Finding], *, every: str, stream: IO[str]) -> None:
    """Print the table: in colour on a terminal, as plain lines elsewhere."""
    if not stream.isatty():
        print(table(findings, every=every), file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table("check", "", "hosts", "found", box=None, pad_edge=False)
    for finding in findings:
        state = Text(finding.state, style=COLOURS[finding.state])
        drawn.add_row(finding.check, state, Text(", ".join(finding.hosts) or every), Text(_said(finding)))
    Console(file=stream).print(drawn)


def _said(finding: Finding) -> str:
    return finding.text + (f"; {finding.remedy}" if finding.remedy else "")
