"""The list of runs: a few facts about each, from the beginning and the end of its records only."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.core.record_files import METRICS, SUMMARY
from mtrain.records.pages.content import moment
from mtrain.records.pages.folder import Absent, RunFiles, Runs
from mtrain.records.pages.following import WAIT_S
from mtrain.records.pages.state import RunState, state_of
from mtrain.records.pages.timeline import Timeline, headline_of, mapping_of, number_of
from mtrain.spec.files import open_file, parse_json

HEAD_BYTES = 64 << 10
TAIL_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the list."""

    name: str
    state: RunState
    model: str
    backend: str
    updates: str
    share: int
    """Per cent of the updates that were made."""
    metric: str
    """Name of the first headline metric."""
    value: str
    """Its best value, as far as the records that were read say."""
    started: str
    order: float
    """Seconds since 1970 at which it started, or last changed."""


class Unread(Exception):
    """The list is being read for the first time, by another thread."""


class Overview:
    """The list of runs. What was read of a file is kept until the file changes. Several threads may call."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._kept: dict[str, tuple[tuple[int, float], Timeline, Mapping[str, Any]]] = {}

        self._lock = threading.Lock()
        self._listed: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        """Return all runs, the newest first. While another thread reads them, return those that were read before.

        Raises:
            Unread: another thread reads, and nothing was read before.
        """
        if self._lock.acquire(timeout=WAIT_S):
            try:
                self._listed = self._read_all()
            finally:
                self._lock.release()
        if self._listed is None:
            raise Unread
        return self._listed

    def _read_all(self) -> list[Entry]:
        found, names = [], self._runs.names()
        self._kept = {name: kept for name, kept in self._kept.items() if name in set(names)}
        for name in names:
            try:
                found.append(self._entry(name, self._runs.run(name)))
            except (Absent, OSError):  # it has been removed meanwhile
                continue
        return sorted(found, key=lambda entry: entry.order, reverse=True)

    def _entry(self, name: str, run: RunFiles) -> Entry:
        timeline, summary = self._read(name, run)
        start, last, best = timeline.start, timeline.last_update, _best(timeline, summary)
        total, made = number_of(start.get("total_updates")), _made(timeline)
        metric, value = next(iter(headline_of(best).items()), ("", None))
        began = number_of(start.get("time"))
        changed = max(run.size_and_time(file)[1] for file in (METRICS, "spec.json"))
        return Entry(
            name=name,
            state=state_of(run, timeline.end),
            model=str(start.get("model") or "")[:60],
            backend=_backend(start, timeline.end or {}),
            updates="" if made is None else f"{made:.0f} of {total:.0f}" if total else f"{made:.0f}",
            share=0 if made is None or not total else max(0, min(100, round(100 * made / total))),
            metric=metric[:60],
            value="" if value is None else f"{value:.4f}",
            started=moment(began if began is not None else changed or None) or "",
            order=began if began is not None else number_of(last.get("time")) or changed,
        )

    def _read(self, name: str, run: RunFiles) -> tuple[Timeline, Mapping[str, Any]]:
        stamp = run.size_and_time(METRICS)
        kept = self._kept.get(name)
        if kept is None or kept[0] != stamp:
            kept = (stamp, _ends(run), run.json(SUMMARY))
            self._kept[name] = kept
        return kept[1], kept[2]


def _ends(run: RunFiles) -> Timeline:
    """Return the records at the beginning and at the end of the file."""
    timeline = Timeline()
    try:
        with open_file(run.file(METRICS)) as file:
            head = file.read(HEAD_BYTES)
            size = file.seek(0, 2)
            file.seek(max(len(head), size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except (Absent, OSError):
        return timeline
    cut = size > HEAD_BYTES + TAIL_BYTES
    lines = head.splitlines() + tail.splitlines()[1:] if cut else (head + tail).splitlines()
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            timeline.add(record)
    return timeline


def _best(timeline: Timeline, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    best = {name: value for name, value in mapping_of(summary.get("best")).items() if name not in ("update", "epoch")}
    if timeline.end is not None and best:
        return {"metrics": best, "headline": summary.get("headline")}
    return timeline.best() or (timeline.evaluations[-1] if timeline.evaluations else {})


def _made(timeline: Timeline) -> float | None:
    ended = number_of((timeline.end or {}).get("updates"))
    last = number_of(timeline.last_update.get("update"))
    return ended if ended is not None else None if last is None else last + 1


def _backend(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    name, ranks = start.get("backend") or end.get("backend") or "", number_of(start.get("ranks") or end.get("ranks"))
    return f"{str(name)[:40]} x {ranks:.0f}" if name and ranks and ranks > 1 else str(name)[:40]
