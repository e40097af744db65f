"""Why a job ended: which rank failed first, and what to tell."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.errors import Interrupted
from mtrain.core.runfolder import RunFolder, read_failures

CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)
"""A rank may die of these because another one failed before: the starter ends it, or a collective's watchdog does."""
TAIL_LINES = 20
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


def real_failures(run: RunFolder) -> list[dict[str, Any]]:
    """What failed ranks left, without those that ended because they were asked to."""
    return [failure for failure in read_failures(run) if failure.get("exit_code") != Interrupted.exit_code]


def asked_to_end(run: RunFolder) -> bool:
    """Whether ranks of this host ended because the job was asked to, and none failed: only rank 0's host has records."""
    return bool(read_failures(run)) and not real_failures(run)


def judge(run: RunFolder, deaths: Sequence[tuple[int, int]], *, status: int) -> Verdict:
    """The first cause, from what ranks left behind, the deaths their starter saw, and its own exit status."""
    failures = real_failures(run)
    killed = [(rank, signal.Signals(-code)) for rank, code in deaths if code < 0 and not _wrote(failures, rank)]
    for rank, number in killed:
        if number not in CONSEQUENCES:
            return _of_signal(run, rank, number)
    if failures:
        return _of_failure(run, failures[0])
    for rank, number in killed:
        return _of_signal(run, rank, number)
    for rank, code in deaths:
        return _of_log(run.rank_log(rank), run, f"rank {rank} ended with exit code {code}")
    how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit code {status}"
    return _of_log(run.starter_log, run, f"the starter of the ranks ended with {how}")


def _wrote(failures: Sequence[Mapping[str, Any]], rank: int) -> bool:
    return any(failure.get("rank") == rank for failure in failures)


def _of_failure(run: RunFolder, failure: Mapping[str, Any]) -> Verdict:
    rank, host = failure.get("rank", 0), failure.get("host", "?")
    log = f"log: {run.rank_log(rank)}"
    code = int(failure.get("exit_code") or 1)
    if failure.get("expected"):
        return Verdict(code=code, headline=str(failure.get("error")), text=f"{log}\nerror: {failure.get('message')}")
    head = f"rank {rank} on {host} failed first: {failure.get('error')}"
    return Verdict(code=1, headline=head, text=f"{head}\n{log}\n{str(failure.get('traceback', '')).rstrip()}")


def _of_signal(run: RunFolder, rank: int, number: signal.Signals) -> Verdict:
    hint = HINTS.get(number)
    head = f"rank {rank} was ended by signal {int(number)} ({number.name})" + (f": {hint}" if hint else "")
    return _of_log(run.rank_log(rank), run, head)


def _of_log(log: Path, run: RunFolder, head: str) -> Verdict:
    last = tail(log) or tail(run.starter_log)
    said = (
        f"last lines of {log if tail(log) else run.starter_log}:\n{last}\n"
        if last
        else f"nothing was written to {log}\n"
    )
    return Verdict(code=1, headline=head, text=f"{said}error: {head}")


def tail(log: Path, *, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; empty when there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-lines:])
