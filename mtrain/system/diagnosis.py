"""Why a job ended: which rank failed first, and what to tell."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.errors import Interrupted
from mtrain.report.history import Record
from mtrain.system import disk
from mtrain.system.runfolder import RunFolder, read_failures

CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)
"""A rank may die of these because another one failed before: the starter ends it, or a collective's watchdog does."""
TAIL_LINES = 20
LOG_CHARACTERS = 64 * 1024
"""Of a log: only its end is read."""
TRACEBACK = "Traceback (most recent call last):"
HINTS = {
    signal.SIGKILL: "something outside killed it; often the kernel, for lack of memory (see `dmesg`): "
    "use a smaller batch, fewer loader workers",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often a full /dev/shm: use fewer loader workers",
    signal.SIGILL: "a native library was built for another processor",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a failed job is explained."""

    code: int
    """Exit code: 1, or 2 where a rank refused the spec or the data."""
    text: str
    """To be printed last; ends with the error itself."""
    headline: str
    """One line."""


def status_of_shell(code: int) -> int:
    """A status as a shell tells it (of a process that a signal ended: 128 and the signal's number) as that of the process."""
    return 128 - code if code - 128 in set(signal.Signals) else code


def real(failures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of ranks that ended because they were asked to."""
    return [failure for failure in failures if failure.get("exit_code") != Interrupted.exit_code]


def real_failures(run: RunFolder) -> list[dict[str, Any]]:
    """What failed ranks left, without those that ended because they were asked to."""
    return real(read_failures(run))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one attempt ended on one host."""

    status: int
    """Exit status of the command; negative: signal."""
    last: Record | None = None
    """The "end" record, if rank 0 wrote one."""
    log: str = ""
    """What the command itself has printed in this attempt."""
    rank_logs: Mapping[int, str] = field(default_factory=dict)
    """By rank: the last lines that it wrote in this attempt, indented; empty: it wrote nothing."""
    ended_here: bool = False
    """Whether this process had killed the command, so that its exit status says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The end of a log, and where it lies."""

    place: str
    text: str
    """Last lines, indented; empty: nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an attempt left, on one host or on many."""

    failures: Sequence[Mapping[str, Any]]
    """Of ranks that were not asked to end, the cause first."""
    deaths: Sequence[tuple[int, int]]
    """(rank, exit status; negative: signal) as starters saw them."""
    status: int
    """Exit status of the command, on several hosts of the first that failed; negative: signal."""
    log: Callable[[int], Log]
    """Of a rank."""
    starter: Log
    """Of that command."""
    host: Callable[[int], str] = lambda rank: ""
    """Of a rank, for people; empty on the only one."""
    full: str = ""
    """The folder of the run, where its disk is full: a rank can then leave no reason."""


def judge(run: RunFolder, deaths: Sequence[tuple[int, int]], ending: Ending) -> Verdict:
    """The first cause of a failure on the only host of a job, from what ranks left in its folder and how the attempt ended.

    ``deaths``: (rank, exit status) as the starter of the ranks saw them.
    """
    return conclude(
        Evidence(
            failures=real_failures(run),
            deaths=deaths,
            status=ending.status,
            log=lambda rank: Log(place=str(run.rank_log(rank)), text=ending.rank_logs.get(rank, "")),
            starter=starter_log(run, ending),
            full=str(run.path) if disk.is_full(run.path) else "",
        )
    )


def starter_log(run: RunFolder, ending: Ending) -> Log:
    """What the starter of the ranks printed in one attempt."""
    return Log(place=str(run.starter_log), text=starter_excerpt(ending.log[-LOG_CHARACTERS:]))


def was_killed(status: int, *, ended_here: bool) -> bool:
    """Whether something outside the job killed a starter of ranks, by a signal that is no request to end."""
    return not ended_here and status < 0 and -status not in (signal.SIGTERM, signal.SIGINT)


def of_killed_starter(status: int, log: Log, *, host: str = "") -> Verdict:
    """The verdict where something outside killed the starter of the ranks; whatever the ranks did then follows from it."""
    number = signal.Signals(-status)
    head = f"the starter of the ranks{f' on {host}' if host else ''} was ended by signal {int(number)} ({number.name})"
    hint = HINTS.get(number)
    said = f"last lines of {log.place}:\n{log.text}\n" if log.text else f"nothing was written to {log.place}\n"
    return Verdict(code=1, headline=head, text=f"{said}error: {head}{f': {hint}' if hint else ''}")


def conclude(evidence: Evidence) -> Verdict:
    """The first cause."""
    failures = evidence.failures
    killed = [
        (rank, signal.Signals(-code)) for rank, code in evidence.deaths if code < 0 and not _wrote(failures, rank)
    ]
    for rank, number in killed:
        if number not in CONSEQUENCES:
            return _of_signal(evidence, rank, number)
    if failures:
        return _of_failure(evidence, failures[0])
    for rank, code in evidence.deaths:
        if code >= 0:
            return _of_log(evidence, rank, f"rank {rank}{_on(evidence, rank)} ended with exit code {code}")
    for rank, number in killed:
        return _of_signal(evidence, rank, number)
    status = evidence.status
    how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit code {status}"
    return _of_log(evidence, None, f"the starter of the ranks ended with {how}")


def _wrote(failures: Sequence[Mapping[str, Any]], rank: int) -> bool:
    return any(failure.get("rank") == rank for failure in failures)


def _on(evidence: Evidence, rank: int) -> str:
    host = evidence.host(rank)
    return f" on {host}" if host else ""


def _of_failure(evidence: Evidence, failure: Mapping[str, Any]) -> Verdict:
    rank = int(failure.get("rank", 0))
    log = f"log: {evidence.log(rank).place}"
    code = int(failure.get("exit_code") or 1)
    if failure.get("expected"):
        return Verdict(code=code, headline=str(failure.get("error")), text=f"{log}\nerror: {failure.get('message')}")
    head = f"rank {rank} on {evidence.host(rank) or failure.get('host', '?')} failed first: {failure.get('error')}"
    return Verdict(code=1, headline=head, text=f"{head}\n{log}\n{str(failure.get('traceback', '')).rstrip()}")


def _of_signal(evidence: Evidence, rank: int, number: signal.Signals) -> Verdict:
    hint = HINTS.get(number)
    head = f"rank {rank}{_on(evidence, rank)} was ended by signal {int(number)} ({number.name})"
    return _of_log(evidence, rank, head + (f": {hint}" if hint else ""))


def _of_log(evidence: Evidence, rank: int | None, head: str) -> Verdict:
    """``rank``: whose log tells more; None: nobody's, the starter's does."""
    log = evidence.starter if rank is None else evidence.log(rank)
    shown = log if log.text else evidence.starter
    said = f"nothing was written to {log.place}\n"
    if evidence.full:
        head += f"; the disk of {evidence.full} is full: make room, then go on with --resume"
    if shown.text:
        said = f"{'from' if TRACEBACK in shown.text else 'last lines of'} {shown.place}:\n{shown.text}\n"
    return Verdict(code=1, headline=head, text=f"{said}error: {head}")


def tail(log: Path, *, lines: int = TAIL_LINES, start: int = 0) -> str:
    """The last lines of a log that stand behind its byte ``start``, indented; empty when there are none."""
    return _indented(_end_of(log, start).rstrip().splitlines()[-lines:])


def starter_excerpt(text: str, *, lines: int = TAIL_LINES) -> str:
    """The first traceback in the output of a starter, else its last lines, indented: it says much after a rank has failed.

    A rank that fails before it has a log of its own, because something cannot be imported, leaves its traceback there.
    """
    said = text.rstrip().splitlines()
    first = next((i for i, line in enumerate(said) if TRACEBACK in line), None)
    if first is None:
        return _indented(said[-lines:])
    margin = said[first].index(TRACEBACK)  # starters put the rank's name in front
    ends = (i for i in range(first + 1, len(said)) if said[i][margin : margin + 1].strip())
    return _indented(line[margin:] for line in said[first : next(ends, len(said) - 1) + 1])


def _end_of(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - LOG_CHARACTERS))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
