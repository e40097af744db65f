"""The display on a terminal: a table with one row per evaluation, above a panel that shows the current state."""

import time
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mtrain.core.interfaces.reporter import Record
from mtrain.records.display import Display
from mtrain.records.history import learning_rate_of
from mtrain.records.wording import (
    duration,
    epoch_count,
    event_line,
    headline_metrics,
    left_s,
    memory,
    number,
    word_speed,
)
from mtrain.spec.terminal import one_line, printable

SMOOTHING = 0.9
"""Weight of the previous value in the smoothed seconds per update, from which the remaining time is computed."""

REDRAWN_EVERY_S = 0.25
"""Least time between two drawings of the panel: more often shows nobody more, and costs a slow connection its lines."""


class Rich(Display):
    """A panel with progress, losses, speed and remaining time, below the evaluations that were printed before."""

    def __init__(
        self, stream: IO[str], *, title: str, force: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._clock = clock
        self._drawn = -float("inf")
        self._console = Console(file=stream, force_terminal=True if force else None, highlight=False)
        self._title = escape(one_line(title))
        self._update: dict[str, Any] = {}
        self._seconds: float | None = None
        self._status = "starting the ranks"
        self._is_starting = True
        """Whether the status is about the start, and ends with the first update."""
        self._columns: list[str] = []
        self._spinner = Spinner("dots", text=Text(printable(self._status), style="dim"))
        self._live: Live | None = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True, auto_refresh=False
        )
        self._live.start()

    def start(self, record: Record) -> None:
        """Print the facts about the job above the panel."""
        self._print(event_line(record), style="dim")
        self._status, self._is_starting = "first update", True

    def checkpoint(self, record: Record) -> None:
        """Show it in the panel, and print a requested one above."""
        self._status, self._is_starting = f"saved at update {record.get('update')}", False
        if line := event_line(record):
            self._print(line, style="dim")

    def message(self, record: Record) -> None:
        """Print it above the panel."""
        self._print(event_line(record), style="yellow" if record.get("kind") == "warning" else "dim")

    def note(self, text: str) -> None:
        """Print a sentence above the panel, and show it in the panel until the status changes."""
        self._print(text, style="bold")
        self._status, self._is_starting = text, False

    def show_line(self, line: str) -> None:
        """Print it above the panel."""
        self._print(line)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(printable(text), style=style))

    def tick(self) -> None:
        """Redraw the panel, if the last time was long enough ago."""
        if self._live is not None and self._clock() - self._drawn >= REDRAWN_EVERY_S:
            self._drawn = self._clock()
            self._live.refresh()

    def close(self) -> None:
        """Remove the panel, and print its last numbers in its place."""
        if self._live is None:
            return
        # The panel would stay half drawn, and the cursor hidden, if the process ended without this.
        self._live.stop()
        self._live = None
        if self._update:
            self._console.print(self._numbers())

    def update(self, record: Record) -> None:
        """Show it in the panel."""
        seconds = record.get("update_seconds")
        if isinstance(seconds, int | float):
            former = self._seconds
            self._seconds = seconds if former is None else SMOOTHING * former + (1 - SMOOTHING) * seconds
        self._update = dict(record) | {"update_seconds": self._seconds}
        if self._is_starting:
            self._status, self._is_starting = "", False

    def evaluation(self, record: Record) -> None:
        """Print one row of the table, with a heading above it if it is the first row or the columns have changed."""
        metrics = headline_metrics(record)
        total = (self._update.get("losses") or {}).get("total")
        cells = {"epoch": str(record.get("epoch", "")), "update": str(record.get("update", ""))}
        cells |= {"loss": number(total)} if total is not None else {}
        cells |= {name: f"{value:.4f}" for name, value in metrics.items()}
        if list(cells) != self._columns:
            self._columns = list(cells)
            self._console.print(Text("".join(f"{one_line(name):>10}" for name in cells), style="bold cyan"))
        # Printed above the panel for good: the terminal's history then is the table of the job.
        best = bool(record.get("best"))
        line = Text("".join(f"{value:>10}" for value in cells.values()), style="bold green" if best else "")
        self._console.print(line.append("  best so far" if best else ""))

    def _render(self) -> RenderableType:
        if not self._update:
            self._spinner.update(text=Text(printable(self._status), style="dim"))
            return Panel(self._spinner, title=self._title, title_align="left", border_style="cyan", padding=(0, 1))
        body: list[RenderableType] = [self._bars(), self._numbers()]
        if self._status:
            body.append(Text(printable(self._status), style="dim"))
        return Panel(Group(*body), title=self._title, title_align="left", border_style="cyan", padding=(0, 1))

    def _bars(self) -> Table:
        """Return a progress bar for the epoch and one for the job."""
        record = self._update
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        epochs, per_epoch = epoch_count(record), record.get("updates_per_epoch")
        if per_epoch:
            name = f"epoch {int(record.get('epoch', 0)) + 1}" + (f"/{epochs}" if epochs else "")
            position = int(record.get("position", 0)) + 1
            grid.add_row(name, ProgressBar(total=per_epoch, completed=position), f"{position}/{per_epoch}")
        total = record.get("total_updates")
        if total:
            update = int(record["update"]) + 1
            grid.add_row("job", ProgressBar(total=total, completed=update), f"{duration(left_s(record))} left")
        return grid

    def _numbers(self) -> RenderableType:
        """Return two lines: losses and learning rate, then speed and memory."""
        record = self._update
        losses = record.get("losses") or {}
        first = Text()
        for name in sorted(losses, key=lambda name: name != "total"):
            first.append(f"{one_line(name)} ", style="dim").append(
                f"{number(losses[name])}   ", style="bold" if name == "total" else ""
            )
        learning_rate = learning_rate_of(record)
        for name, value in (
            ("learning rate", learning_rate),
            ("momentum", record.get("momentum")),
            ("gradient norm", record.get("gradient_norm")),
        ):
            if value is not None:
                first.append(f"{name} ", style="dim").append(f"{value:.3g}   ")
        parts = [word_speed(record), memory(record)]
        if record.get("skipped_updates"):
            parts.append(f"{record['skipped_updates']} updates skipped (not finite)")
        return Group(first, Text(one_line("   ".join(part for part in parts if part)), style="dim"))
