"""Describe what ``mtrain compare`` changes about the training of a user's script."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The changes to a script's training that make its jobs comparable."""

    updates: int
    """Largest number of updates; the schedule spans the shortened job."""
    exact: bool = False
    """Compute in float64."""
    nudged: bool = False
    """Start with every trained weight one unit in the last place higher or lower."""

    def text(self) -> str:
        """Return the trial as one word of a command line."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> "Trial":
        """Return the trial that ``text`` wrote."""
        return cls(**json.loads(text))
