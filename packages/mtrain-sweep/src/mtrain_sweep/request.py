"""The request for a sweep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_sweep.definition import Pruner, Sampler

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A request for a sweep, in the user's words; None: not said."""

    load: Callable[[], "Loaded"]
    """Reads the spec; called only if a new sweep begins, or the spec was named."""
    named: bool = False
    """The user has named a spec or values of it."""
    space: str | Path | Mapping[str, Any] | None = None
    over: Sequence[str] = ()
    trials: int | None = None
    jobs: int = 1
    """Number of trials at the same time."""
    sampler: Sampler | None = None
    pruner: Pruner | None = None
    metric: str | None = None
    out: Path | None = None
    resume: bool = False
    max_failures: int = 3
    """So many failed trials in a row end the sweep."""
    shares: bool = True
    """Trials may be copies of one process that has imported what they need; see ``sharing``."""
    tell: Callable[[str], None] = print
    """Receives one line at a time about the progress."""

    @property
    def space_is_named(self) -> bool:
        """Return whether the user has said what is searched."""
        return self.space is not None or bool(self.over)
