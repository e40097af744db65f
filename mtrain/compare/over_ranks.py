"""Run one script on several numbers of ranks, recorded by ``mtrain-trace``, and say whether they train alike."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mtrain_trace.command
import mtrain_trace.rank_checks
import mtrain_trace.reading
import mtrain_trace.running
from mtrain.compare.recorded import RecordedResult, error_of
from mtrain.errors import CannotTell, UsageError
from mtrain.spec import outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksRequest:
    """A request to run a script on several numbers of ranks."""

    script: Path
    ranks: Sequence[int]
    """The first one counts as right."""
    words: Sequence[str] = ()
    """Flags of ``mtrain run``, such as those of the backend."""
    arguments: Sequence[str] = ()
    updates: int | None = None
    """Updates after which each job is ended; None: it ends by itself."""
    folder: Path
    tell: Callable[[str], None] = field(default=lambda text: None)


def compare(request: RanksRequest) -> dict[int, RecordedResult]:
    """Run the jobs, one after the other, and compare each with the first; return the results by number of ranks.

    Raises:
        UsageError: the folder is in use.
        CannotTell: a job has failed, or left no trace.
    """
    if len(set(request.ranks)) < max(2, len(request.ranks)):
        raise UsageError(f"--ranks {','.join(map(str, request.ranks))}: expected different numbers, such as 1,2,3")
    traces = {number: request.folder / f"ranks-{number}" for number in request.ranks}
    for number, trace in traces.items():
        request.tell(f"{request.script.name} on {number} rank{'s' if number > 1 else ''}")
        _run(request, number, trace)
    first, *others = request.ranks
    results = {}
    try:
        for number in others:
            found = mtrain_trace.command.compare_folders(traces[first], traces[number])
            code = mtrain_trace.command.verdict_code(found)
            results[number] = RecordedResult(folder=traces[number], comparisons=found, code=code)
    except mtrain_trace.reading.TraceError as error:
        raise error_of(error) from error
    return results


def _run(request: RanksRequest, number: int, trace: Path) -> None:
    """Run the script on a number of ranks, with the recorder in its processes."""
    # By the command and not in this process: each rank is recorded from its first import on, as `mtrain-trace run` does it.
    command = [
        *(sys.executable, "-m", "mtrain", "run", *request.words, "-o", f"report.dir={request.folder / 'runs'}"),
        *("--name", f"ranks-{number}", "--nproc-per-node", str(number), str(request.script), *request.arguments),
    ]
    # What the ranks print goes to a file, so that the verdict is all that the terminal shows.
    log = request.folder / f"ranks-{number}.log"
    outputs.make_folder(request.folder)
    try:
        with outputs.open_to_write(log, "w", encoding="utf-8") as file:
            settings = mtrain_trace.running.RecordingSettings(updates=request.updates)
            status = mtrain_trace.running.run(command, trace, settings, log=file)
    except mtrain_trace.reading.TraceError as error:
        raise UsageError(str(error)) from error
    if status:
        told = "".join(f"; {words}" for words in _findings(trace))
        raise CannotTell(
            f"{request.script}: the job of {number} ranks has ended with exit code {status}; see {log}{told}"
        )


def _findings(trace: Path) -> list[str]:
    """Return what is wrong among the ranks of a job that has failed, as far as its trace goes."""
    try:
        return mtrain_trace.rank_checks.findings(mtrain_trace.reading.read(trace))
    except mtrain_trace.reading.TraceError:
        return []
