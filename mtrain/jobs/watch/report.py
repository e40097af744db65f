"""What is said of a hang: which ranks do not come, where the others wait for them, and what helps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.jobs.watch.looks import STARTER, RankLook
from mtrain.jobs.watch.places import Place
from mtrain.jobs.watch.rules import Finding

MOST_LINES = 8
"""Most groups of ranks that are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """All that is known of a rank."""

    look: RankLook
    host: str = ""
    """Label of its host; empty: the job has only one."""
    stopped_at: str = ""
    """Since when it was seen to be stopped, as a time of day."""
    place: Place | None = None
    """Where it is; None: nobody has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A hang in words."""

    kind: str
    text: str = ""
    """All in one line; empty: it is told by its cause alone."""
    suspects: tuple[int, ...] = ()
    """The ranks that do not come; empty: this cannot be told."""
    cause: str = ""
    """What they do instead, for a verdict; empty where there are none."""
    may_end: bool = False
    """Whether a job that stays like this is ended after a time."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"hang": self.kind, "text": self.text, "ranks": list(self.suspects)}


def describe(finding: Finding, ranks: Mapping[int, Seen], *, at: Callable[[float], str], now: float) -> Report:
    """Return what is said of a finding.

    Args:
        finding: what was found.
        ranks: what is known of each rank, and of ``STARTER`` where it is stopped.
        at: returns the time of day for a time of the finding.
        now: the time now.
    """
    if finding.kind == "lock":
        text = (
            f"all ranks wait for the lock {finding.where} of a build, which nobody makes: if no other job compiles there, "
            "delete it"
        )
        return Report(kind="lock", text=text)
    suspects = find_suspects(ranks)
    waiting = {rank: seen for rank, seen in ranks.items() if rank not in suspects and rank != STARTER}
    cause = _join({rank: ranks[rank] for rank in suspects})
    if finding.kind == "slow":
        usual = f", and {finding.usual_s:.0f} s at most before" if finding.usual_s >= 0.5 else ""
        head = f"no progress for {now - finding.since:.0f} s{usual}: "
    else:
        head = "" if finding.kind == "stopped" else f"nothing moves since {at(finding.since)}: "
    if suspects:
        text = cause + (f"; {_join(waiting, them=len(suspects))}" if waiting else "")
    else:
        text = _join(waiting) + _no_suspect(waiting)
    if finding.kind == "stopped":
        text += _remedy([ranks[rank] for rank in finding.ranks if rank in ranks])
    persons = any(seen.place is not None and seen.place.kind == "person" for seen in ranks.values())
    others = any(seen.look.state == "D" or seen.look.traced for seen in ranks.values())
    ends = finding.kind == "stopped" or (finding.kind == "still" and not persons and not others)
    return Report(kind=finding.kind, text=head + text, suspects=tuple(suspects), cause=cause, may_end=ends)


def find_suspects(ranks: Mapping[int, Seen]) -> list[int]:
    """Return the ranks for which the others wait, as far as that can be told."""
    tests: Sequence[Callable[[Seen], bool]] = (
        lambda seen: seen.look.stopped > 0,
        lambda seen: seen.look.rank != STARTER and (seen.look.state in ("", "D") or seen.look.traced),
        lambda seen: _kind(seen) in ("runs", "person", "children"),
    )
    for is_suspect in tests:
        found = [rank for rank, seen in sorted(ranks.items()) if is_suspect(seen)]
        if found:
            return found
    return []


def _no_suspect(waiting: Mapping[int, Seen]) -> str:
    places = {(seen.place.what, seen.place.where) for seen in waiting.values() if seen.place and _kind(seen) == "waits"}
    if len(places) > 1:
        return ": they wait in different calls, or lines, for each other"
    return "; which of them is the cause cannot be seen from outside" if len(waiting) > 1 else ""


def _remedy(seen: Sequence[Seen]) -> str:
    pids = [each.look.stopped for each in seen if each.look.stopped]
    return f"; let go on what is stopped with: kill -CONT {' '.join(map(str, pids))}" if pids else ""


def _join(ranks: Mapping[int, Seen], *, them: int = 0) -> str:
    """Return the ranks in words, those of the same words together. ``them``: for how many others they wait; 0: nobody is known."""
    groups: dict[str, list[int]] = {}
    for rank, seen in sorted(ranks.items()):
        groups.setdefault(_do(seen, them=them), []).append(rank)
    clauses = [
        f"{_names(numbers, ranks)} {_plural(words) if len(numbers) > 1 else words}" for words, numbers in groups.items()
    ]
    left = len(clauses) - MOST_LINES
    return "; ".join(clauses[:MOST_LINES]) + (f"; {left} more groups of ranks are elsewhere" if left > 0 else "")


def _do(seen: Seen, *, them: int) -> str:
    """Return what a rank does, as the predicate of one rank; ``them``: for how many others it waits."""
    look, place = seen.look, seen.place or Place(kind="unknown", why="its host has not answered")
    at = f" at {place.where}" if place.where else ""
    since = f" since {seen.stopped_at}" if seen.stopped_at else ""
    if look.stopped:
        if look.rank == STARTER or look.stopped == look.pid:
            return f"has been stopped by a signal{since}{at}"
        return f"has a child, process {look.stopped} ({look.name}), that has been stopped by a signal{since}"
    if look.state == "":
        return "has ended"
    if look.pid == 0 and look.idle:
        return "has not begun"
    if look.traced:
        return f"is held by a debugger{at}"
    if look.state == "D":
        return f"waits in the kernel for a disk or a device{at}"
    kind = _kind(seen) or place.kind
    if kind == "waits":
        return f"waits{['', ' for it', ' for them'][min(them, 2)]} in {place.what}{at}"
    return _do_at(look, place, kind, at)


def _kind(seen: Seen) -> str:
    """Return what a rank does; one that was asked in its backward pass before it was known to be idle waits there."""
    kind = "" if seen.place is None else seen.place.kind
    return ("waits" if seen.look.idle else "runs") if kind == "backward" else kind


def _do_at(look: RankLook, place: Place, kind: str, at: str) -> str:
    if kind == "lock":
        return f"waits in a lock of a build{at}"
    if kind == "person":
        return f"seems to be in {place.what}{at}, for which a person must answer"
    if kind == "children":
        below = ", ".join(f"process {pid} is at {where}" for pid, where in place.children) or "it has none"
        return f"waits in {place.what}{at} for its children ({below})"
    if kind == "runs":
        return f"{'does nothing' if look.idle else 'computes'}{at}"
    return f"cannot be asked where it is ({place.why})"


def _plural(words: str) -> str:
    first, _, rest = words.partition(" ")
    verb = {"has": "have", "is": "are", "does": "do"}.get(first, first.removesuffix("s"))
    return f"{verb} {rest}".replace("its children", "their children").replace("it is", "they are")


def _names(numbers: Sequence[int], ranks: Mapping[int, Seen]) -> str:
    """Return ranks in words: ``rank 1 (host b)``, ``the starter of the ranks``."""
    hosts = {ranks[number].host for number in numbers} - {""}
    host = f" (host {hosts.pop()})" if len(hosts) == 1 else ""
    if list(numbers) == [STARTER]:
        return f"the starter of the ranks{host}"
    return f"{name_ranks(numbers)}{host}"


def name_ranks(numbers: Sequence[int]) -> str:
    """Return ranks in words: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0 to 62``."""
    *parts, last = number_rows(numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(parts)}{' and ' if parts else ''}{last}"


def number_rows(numbers: Iterable[int]) -> list[str]:
    """Return numbers in words, three or more in a row as ``4 to 7``."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return [word for row in rows for word in ([f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row))]
