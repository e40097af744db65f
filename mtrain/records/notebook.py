"""The display in a notebook: one output below the cell, which is redrawn in place."""

import time
import uuid
from collections.abc import Callable, Mapping
from html import escape

from IPython.display import display, update_display

from mtrain.core.interfaces.reporter import Record
from mtrain.records.display import Display
from mtrain.records.html import table
from mtrain.records.wording import duration, event_line, headline_metrics, left_s, losses, number, place, word_speed

MAX_ROWS = 8
"""Evaluations that are shown, the newest ones and the best."""
MAX_MESSAGES = 6
"""Newest notes and warnings that are shown."""
STYLE = "font-family: sans-serif; font-size: 90%; max-width: 50em"


class Notebook(Display):
    """One output with a progress bar, losses, speed, the newest evaluations and messages.

    ``tick`` redraws it at most every ``every_s`` seconds, and only after something new.
    """

    def __init__(self, *, title: str, every_s: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._title = title
        self._every_s = every_s
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._update: Record = {}
        self._evaluations: list[Record] = []
        self._messages: list[str] = []
        self._status = "starting the ranks"
        self._is_changed, self._is_closed = False, False
        self._drawn_at = clock()
        # HTML with a text of the same content, and no widgets: every front end of Jupyter can replace an output that has an identity.
        display(self._content(), raw=True, display_id=self._id)

    def start(self, record: Record) -> None:
        """Say that the first update is awaited; like all that follows, ``tick`` shows it."""
        self._status, self._is_changed = "first update", True

    def update(self, record: Record) -> None:
        """Take the newest update."""
        self._update, self._status, self._is_changed = record, "", True

    def evaluation(self, record: Record) -> None:
        """Add a row."""
        self._evaluations.append(record)
        self._is_changed = True

    def message(self, record: Record) -> None:
        """Add a message."""
        self._messages.append(event_line(record))
        self._is_changed = True

    def note(self, text: str) -> None:
        """Show the sentence at once: the next one may not come before the cell has ended."""
        self._messages.append(text)
        self._draw()

    def tick(self) -> None:
        """Redraw, if there is something new and the last time is long enough ago."""
        if self._is_changed and self._clock() - self._drawn_at >= self._every_s:
            self._draw()

    def close(self) -> None:
        """Draw the last state, which stays in the notebook."""
        if not self._is_closed:
            self._is_closed, self._status = True, ""
            self._draw()

    def _draw(self) -> None:
        self._is_changed, self._drawn_at = False, self._clock()
        update_display(self._content(), raw=True, display_id=self._id)

    def _content(self) -> Mapping[str, str]:
        """Return the output in the forms among which a front end chooses."""
        return {"text/html": self._html(), "text/plain": "\n".join(self._lines())}

    def _lines(self) -> list[str]:
        evaluations = [f"  {name} {text}" for row in self._rows()[-1:] for name, text in row.items() if text]
        state = [self._numbers(), self._status, "".join(evaluations).strip()]
        return [self._title, *(line for line in state if line), *self._messages[-MAX_MESSAGES:]]

    def _html(self) -> str:
        update, total = self._update, self._update.get("total_updates")
        bar = ""
        if total:
            left = "" if self._is_closed else f" {duration(left_s(update))} left"
            value = int(update["update"]) + 1
            bar = (
                f'<div><progress value="{value}" max="{int(total)}" style="width: 60%"></progress>{escape(left)}</div>'
            )
        lines = [f"<div>{escape(text)}</div>" for text in (self._numbers(), self._status) if text]
        messages = self._messages[-MAX_MESSAGES:]
        hidden = len(self._messages) - len(messages)
        more = [f"... {hidden} earlier message{'s' if hidden > 1 else ''}, all in metrics.jsonl"] if hidden else []
        notes = "".join(f'<div style="opacity: 0.7">{escape(text)}</div>' for text in [*more, *messages])
        return f'<div style="{STYLE}"><b>{escape(self._title)}</b>{bar}{"".join(lines)}{self._table()}{notes}</div>'

    def _numbers(self) -> str:
        """Word the newest update in one line."""
        if not self._update:
            return ""
        parts = (place(self._update), losses(self._update), word_speed(self._update))
        return "   ".join(part for part in parts if part)

    def _rows(self) -> list[dict[str, str]]:
        """Return the cells of the evaluations that are shown, by heading."""
        best = next((record for record in reversed(self._evaluations) if record.get("best")), None)
        shown = self._evaluations[-MAX_ROWS:]
        if best is not None and not any(record is best for record in shown):
            shown = [best, *shown[1:]]
        return [
            {
                "epoch": str(record.get("epoch", "")),
                "update": str(record.get("update", "")),
                **{name: number(value) for name, value in headline_metrics(record).items()},
                "": "best so far" if record is best else "",
            }
            for record in shown
        ]

    def _table(self) -> str:
        rows = self._rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        return table(names, [[row.get(name, "") for name in names] for row in rows]) if rows else ""
