"""Comparisons of backends: one spec or script on several of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.studies.compare import jobs
from mtrain.studies.compare.order import Order, parse_variants
from mtrain.studies.compare.profiles import PROFILES
from mtrain.studies.compare.results import Comparison
from mtrain.studies.compare.tables import Table, agreement, speeds
from mtrain.studies.compare.wording import Sentence, headline, summary
from mtrain.system import runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """A request to train one spec, or to run one script, on several backends."""

    backends: str
    """The backends with their options, the reference first: ``ddp,deepspeed:stage=3``."""
    config: "Source" = None
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec."""
    updates: int = 50
    ranks: int = 2
    """Ranks of the backends that can have several."""
    profile: str = "float32"
    """Name of the bounds within which backends agree."""
    rounds: int = 1
    """Number of timed trainings of each backend; 0: the compared jobs are timed."""
    apart: bool = False
    """Start a job of its own for each timed training."""
    out: Path | None = None
    """Folder of the jobs and the report; None: the next free ``runs/compare``."""
    script: Path | None = None
    """The user's script to run; None: the spec is trained."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A comparison and the files that hold it."""

    comparison: Comparison
    numbers: Path
    page: Path

    def tables(self) -> Mapping[str, Table]:
        """Return tables for people by their titles."""
        return {"agreement": agreement(self.comparison), "speed": speeds(self.comparison)}

    def headline(self) -> str:
        """Return the result in one sentence."""
        return headline(self.comparison)

    def sentences(self) -> Sequence[Sentence]:
        """Return what the comparison shows, in sentences."""
        return summary(self.comparison)


def compare(request: CompareRequest, *, tell: Callable[[str], None]) -> Compared:
    """Run the jobs of a comparison, compare them and write the result; ``tell`` receives lines about the progress.

    Raises:
        UsageError: the spec, a backend or an option is wrong; nothing was started.
    """
    order = Order(
        config=request.config,
        overrides=request.overrides,
        variants=parse_variants(request.backends),
        updates=request.updates,
        ranks=request.ranks,
        profile=PROFILES[request.profile],
        rounds=request.rounds,
        apart=request.apart,
        out=request.out or runfolder.next_name(Path("runs"), "compare"),
        tell=tell,
        script=request.script,
        arguments=request.arguments,
    )
    comparison = jobs.compare(order)
    numbers, page = jobs.write(comparison, order.out)
    return Compared(comparison=comparison, numbers=numbers, page=page)
