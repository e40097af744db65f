"""The hangs of a run: a file of the run folder, which ``mtrain status`` and ``mtrain ui`` show.

Each line of ``hangs.jsonl`` is a JSON object: what was said of a hang (``time``, ``hang``: its kind, ``text``, ``ranks``: those that
did not come), or that the ranks went on (``time``, ``over``).
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.spec import outputs
from mtrain.spec.files import open_file, parse_json

FILE = "hangs.jsonl"
TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class HangLog:
    """The file in one run folder. A file that cannot be written ends no job."""

    run_dir: Path

    def add(self, report: Mapping[str, Any]) -> None:
        """Add what was said of a hang."""
        line = json.dumps({"time": round(time.time(), 3), **report}, ensure_ascii=False) + "\n"
        with (
            contextlib.suppress(OSError),
            outputs.open_to_write(self.run_dir / FILE, "a", encoding="utf-8", errors=outputs.LONE) as file,
        ):
            file.write(line)

    def read(self, *, most: int = 3) -> list[dict[str, Any]]:
        """Return the last hangs, each with ``over`` (when the ranks went on) where they did; lines of others are left out."""
        try:
            with open_file(self.run_dir / FILE) as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                content = file.read()
        except OSError:
            return []
        hangs: list[dict[str, Any]] = []
        for text in content.splitlines():
            line = _parse(text)
            if isinstance(line.get("text"), str):
                hangs.append(line)
            elif "over" in line and hangs:
                hangs[-1]["over"] = line["time"]
        return hangs[-most:]


def _parse(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        line = parse_json(text)
        if isinstance(line, dict) and isinstance(line.get("time"), int | float) and not isinstance(line["time"], bool):
            return line
    return {}


def words(hangs: list[dict[str, Any]]) -> list[str]:
    """Return hangs as lines for people."""
    return [
        f"hang {_clock(hang['time'])}: {hang['text']}"
        + (f" (went on {_clock(hang['over'])})" if "over" in hang else "")
        for hang in hangs
    ]


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
