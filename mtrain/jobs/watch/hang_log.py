"""The hangs of a run: a file of the run folder, which ``mtrain status`` and ``mtrain ui`` show.

Each line of ``hangs.jsonl`` is a JSON object: what was said of a hang (``time``, ``hang``: its kind, ``text``, ``ranks``: those that
did not come), or that the ranks went on (``time``, ``over``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.records.wording import local_time
from mtrain.spec import outputs
from mtrain.spec.files import open_file, parse_json_lines

FILE = "hangs.jsonl"
TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class HangLog:
    """The file in one run folder. A file that cannot be written ends no job."""

    run_dir: Path

    def add(self, report: Mapping[str, Any]) -> None:
        """Add what was said of a hang."""
        outputs.add_json_line(self.run_dir / FILE, report)

    def read(self, *, most: int = 3) -> list[dict[str, Any]]:
        """Return the last hangs, each with ``over`` (when the ranks went on) where they did; lines of others are left out."""
        try:
            with open_file(self.run_dir / FILE) as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                content = file.read()
        except OSError:
            return []
        hangs: list[dict[str, Any]] = []
        for line in parse_json_lines(content):
            if isinstance(line.get("text"), str):
                hangs.append(line)
            elif "over" in line and hangs:
                hangs[-1]["over"] = line["time"]
        return hangs[-most:]


def words(hangs: list[dict[str, Any]]) -> list[str]:
    """Return hangs as lines for people."""
    return [
        f"hang {local_time(hang['time'])}: {hang['text']}"
        + (f" (went on {local_time(hang['over'])})" if "over" in hang else "")
        for hang in hangs
    ]
