"""The base of displays: reporters in the process that started the job."""

import contextlib

from mtrain.core.interfaces.reporter import Record, Reporter, tell
from mtrain.records.reporter import worded
from mtrain.spec import terminal


class Display(Reporter):
    """A reporter that shows the progress of a job to a person.

    It is in the process that started the job, and is fed with the lines of ``metrics.jsonl``: ranks write to their logs,
    may be on other hosts, and are several attempts where a job is started again.
    """

    shares_records = True

    def __init__(self) -> None:
        self._is_off = False

    def record(self, record: Record) -> None:
        """Pass a record to the method for its kind. A display that raises an exception is switched off with one line."""
        if self._is_off:
            return
        try:
            tell(self, record)
        except Exception as error:  # Its terminal may be gone; the job goes on.
            self._is_off = True
            with contextlib.suppress(OSError):
                terminal.say(f"the progress display has failed: {worded(error)}; the job goes on", err=True)

    def note(self, text: str) -> None:
        """Show a sentence from the process that started the job."""

    def tick(self) -> None:
        """Redraw, if the display changes with time. It is called several times a second."""

    def close(self) -> None:
        """Restore the terminal. It may be called twice."""
