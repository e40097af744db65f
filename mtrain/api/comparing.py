"""Comparisons of backends: one spec or script on several of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.compare import jobs, over_ranks, recorded, recorded_page
from mtrain.compare.over_ranks import RanksRequest, RanksResult
from mtrain.compare.recorded import RecordedRequest, RecordedResult
from mtrain.compare.request import CompareRequest
from mtrain.compare.results import Comparison
from mtrain.compare.tables import Table, agreement, speeds
from mtrain.compare.wording import Sentence, headline, summary
from mtrain.spec import outputs

__all__ = [
    "CompareRequest", "Compared", "RanksRequest", "RanksResult", "RecordedRequest", "RecordedResult", "compare", "compare_ranks",
    "compare_recorded",
]  # fmt: skip


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


def compare(request: CompareRequest) -> Compared:
    """Run the jobs of a comparison, compare them and write the result.

    Raises:
        UsageError: the spec, a backend or an option is wrong; nothing was started.
    """
    comparison = jobs.compare(request)
    numbers, page = jobs.write(comparison, request.folder)
    return Compared(comparison=comparison, numbers=numbers, page=page)


def compare_ranks(request: RanksRequest) -> Sequence[RanksResult]:
    """Run a script on several numbers of ranks, and compare each with the first one.

    Raises:
        UsageError: a job has failed, or left no trace.
    """
    return over_ranks.compare(request)


def compare_recorded(request: RecordedRequest, *, page: Path | None = None) -> Sequence[RecordedResult]:
    """Compare trainings that have ended, each with the first one: traces, run folders, and mixtures of both.

    ``page``: file for the page that shows the comparisons; None: none is written.

    Raises:
        UsageError: a folder holds neither a trace nor a run.
    """
    results = recorded.compare(request)
    if page is not None:
        outputs.make_folder(page.parent)
        outputs.write_text(page, recorded_page.page(results))
    return results
