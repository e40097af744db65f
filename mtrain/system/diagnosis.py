"""Find out why a job failed: which rank failed first, and the message for the user."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.errors import Interrupted
from mtrain.system.log_limit import end_of

CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)
"""Signals that may end a rank because another rank failed first.

The starter of the ranks sends SIGTERM; the watchdog of a collective aborts the rank."""
TAIL_LINES = 20
LOG_BYTES = 64 * 1024
"""Bytes of a log that are read, counted from its end."""
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
    """The explanation of a failed job."""

    code: int
    """Exit code of mtrain: 1, or 2 if a rank refused the spec or the data."""
    text: str
    """The explanation, printed at the very end. Its last line is the error itself."""
    headline: str
    """The explanation in one line."""
    error: str = ""
    """The error itself in one line, where it says more than the headline: an error's message, or a hint."""
    from_outside: bool = False
    """Whether something outside the job was the cause, so that another start may succeed."""

    @property
    def reason(self) -> str:
        """Return the error itself in one line, for those who do not show ``text``."""
        return self.error or self.headline


def status_of_shell(code: int) -> int:
    """Return the exit status of a process (negative: signal) from the status that a shell reports for it.

    For a process that was ended by a signal, a shell reports 128 plus the signal's number.
    """
    return 128 - code if code - 128 in set(signal.Signals) else code


def real(failures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the failures without those of ranks that ended because they were asked to."""
    return [failure for failure in failures if failure.get("exit_code") != Interrupted.exit_code]


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """The end of a log file."""

    place: str
    """Path of the file, for display."""
    text: str
    """Its last lines, indented; empty: nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that is known about a failed attempt on one or several hosts."""

    failures: Sequence[Mapping[str, Any]]
    """Failures of ranks that were not asked to end, the cause first."""
    deaths: Sequence[tuple[int, int]]
    """(rank, exit status; negative: signal) of each failed rank, as the starters of the ranks report them."""
    status: int
    """Exit status of the launcher's command, on several hosts that of the first that failed; negative: signal."""
    log: Callable[[int], Log]
    """Returns the log of a rank."""
    starter: Log
    """Log of the launcher's command to which ``status`` belongs."""
    host: Callable[[int], str] = lambda rank: ""
    """Returns the name of a rank's host for messages; empty if the job has only one host."""
    full: str = ""
    """The run folder, if its disk is full, in which case a rank cannot write why it failed; empty otherwise."""


def was_killed(status: int, *, ended_here: bool) -> bool:
    """Return whether something outside the job killed the starter of the ranks.

    SIGTERM and SIGINT do not count: they are requests to end.
    """
    return not ended_here and status < 0 and -status not in (signal.SIGTERM, signal.SIGINT)


def of_killed_starter(status: int, log: Log, *, host: str = "") -> Verdict:
    """Explain a failure whose cause is that something outside the job killed the starter of the ranks.

    What the ranks did afterwards is a consequence and is not reported.
    """
    number = signal.Signals(-status)
    head = f"the starter of the ranks{f' on {host}' if host else ''} was ended by signal {int(number)} ({number.name})"
    hint = HINTS.get(number)
    excerpt = f"last lines of {log.place}:\n{log.text}\n" if log.text else f"nothing was written to {log.place}\n"
    error = f"{head}{f': {hint}' if hint else ''}"
    return Verdict(code=1, headline=head, text=f"{excerpt}error: {error}", error=error, from_outside=True)


def conclude(evidence: Evidence) -> Verdict:
    """Explain a failure by its first cause.

    The first of these that applies: a rank killed by a signal that is no consequence of another failure, the exit code of a
    rank that wrote down no error, an error that a rank wrote down, a rank's signal, the exit status of the starter.
    """
    failures = evidence.failures
    wrote = {failure.get("rank") for failure in failures}
    killed = [(rank, signal.Signals(-code)) for rank, code in evidence.deaths if code < 0 and rank not in wrote]
    for rank, number in killed:
        if number not in CONSEQUENCES:
            return _of_signal(evidence, rank, number)
    for rank, code in evidence.deaths:
        # A rank that ends without a word, as by os._exit, tears the connections of the others, whose errors are later.
        if code >= 0 and rank not in wrote and (not failures or code != Interrupted.exit_code):
            return _of_log(evidence, rank, f"rank {rank}{_on(evidence, rank)} ended with exit code {code}")
    if failures:
        return _of_failure(evidence, failures[0])
    # A starter ends the other ranks by SIGTERM, so another signal says more.
    for rank, number in sorted(killed, key=lambda death: death[1] == signal.SIGTERM):
        return _of_signal(evidence, rank, number)
    status = evidence.status
    how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit code {status}"
    return _of_log(evidence, None, f"the starter of the ranks ended with {how}")


def _on(evidence: Evidence, rank: int) -> str:
    host = evidence.host(rank)
    return f" on {host}" if host else ""


def _of_failure(evidence: Evidence, failure: Mapping[str, Any]) -> Verdict:
    rank = int(failure.get("rank", 0))
    log = f"log: {evidence.log(rank).place}"
    code = int(failure.get("exit_code") or 1)
    if failure.get("expected"):
        message = str(failure.get("message"))
        error = next(iter(message.splitlines()), "")
        return Verdict(code=code, headline=str(failure.get("error")), text=f"{log}\nerror: {message}", error=error)
    head = f"rank {rank} on {evidence.host(rank) or failure.get('host', '?')} failed first: {failure.get('error')}"
    if evidence.full:  # The rank whose disk it is could not write down its failure, and the others followed.
        head = f"the disk of {evidence.full} is full: make room, then go on with --resume; {head}"
    return Verdict(code=1, headline=head, text=f"{head}\n{log}\n{str(failure.get('traceback', '')).rstrip()}")


def _of_signal(evidence: Evidence, rank: int, number: signal.Signals) -> Verdict:
    hint = HINTS.get(number)
    head = f"rank {rank}{_on(evidence, rank)} was ended by signal {int(number)} ({number.name})"
    return replace(_of_log(evidence, rank, head + (f": {hint}" if hint else "")), from_outside=True)


def _of_log(evidence: Evidence, rank: int | None, head: str) -> Verdict:
    """Explain a failure by the headline ``head`` and the end of the log of ``rank``; None: of the starter's log.

    The starter's log also replaces that of a rank that wrote nothing.
    """
    log = evidence.starter if rank is None else evidence.log(rank)
    shown = log if log.text else evidence.starter
    excerpt = f"nothing was written to {log.place}\n"
    if evidence.full:
        head += f"; the disk of {evidence.full} is full: make room, then go on with --resume"
    if shown.text:
        excerpt = f"{'from' if TRACEBACK in shown.text else 'last lines of'} {shown.place}:\n{shown.text}\n"
    return Verdict(code=1, headline=head, text=f"{excerpt}error: {head}")


def tail(log: Path, *, lines: int = TAIL_LINES, start: int = 0) -> str:
    """Return the last lines of a log file after its byte ``start``, indented; empty if there are none."""
    return _indent(end_of(log, start=start, limit_bytes=LOG_BYTES).rstrip().splitlines()[-lines:])


def starter_excerpt(text: str, *, lines: int = TAIL_LINES) -> str:
    """Return the first traceback in the output of a starter, or else its last ``lines`` lines, indented."""
    # A rank that fails before it has its own log, for example on an import, leaves its traceback in that output. The end of
    # the output is of less use, because a starter prints much after a rank has failed.
    output = text.rstrip().splitlines()
    first = next((i for i, line in enumerate(output) if TRACEBACK in line), None)
    if first is None:
        return _indent(output[-lines:])
    margin = output[first].index(TRACEBACK)  # Some starters prefix each line with the name of the rank.
    ends = (i for i in range(first + 1, len(output)) if output[i][margin : margin + 1].strip())
    return _indent(line[margin:] for line in output[first : next(ends, len(output) - 1) + 1])


def _indent(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
