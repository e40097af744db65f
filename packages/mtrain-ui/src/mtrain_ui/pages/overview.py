"""The list of runs: a few facts about each, from the beginning and the end of its records only."""

import heapq
import os
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from mtrain.core.record_files import METRICS, SUMMARY
from mtrain.records import svg
from mtrain.records.wording import duration
from mtrain.spec.files import open_file, parse_json
from mtrain_ui.pages.content import age, moment
from mtrain_ui.pages.folder import Absent, RunFiles, Runs
from mtrain_ui.pages.following import WAIT_S
from mtrain_ui.pages.state import RunState, state_of
from mtrain_ui.pages.timeline import Timeline, headline_of, mapping_of, number_of

HEAD_BYTES = 64 << 10
TAIL_BYTES = 256 << 10
MIDDLE_BYTES = 8 << 20
"""Bytes after the beginning that are searched for evaluations."""
MAX_POINTS = 48
"""Points of a small curve."""
NEWEST = 20
"""Updates whose median time tells how long a run still takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEntry:
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
    curve: Markup
    """The metric over the evaluations, or the loss over the updates, as a small drawing; empty if there are less than two."""
    left: str
    """Time to the end of a run that goes on; empty if it is not known."""
    started: str
    age: str
    """How long ago that was."""
    order: float
    """Seconds since 1970 at which it started, or last changed."""


class Unread(Exception):
    """The list is being read for the first time, by another thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _CachedRun:
    """What is kept of a run until its records change: the line of the list, and no record but those that its state needs."""

    stamp: tuple[int, float]
    """Size in bytes and time of the last change of its records."""
    entry: RunEntry
    since: float
    """Seconds since 1970 from which its age counts; 0: not known."""
    end: Mapping[str, Any] | None
    """How it ended; None: it has not."""
    left: str
    """Time to its end, as long as it goes on."""


class Overview:
    """The list of runs. What was read of a file is kept until the file changes. Several threads may call."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._kept: dict[str, _CachedRun] = {}
        self._lock = threading.Lock()
        self._listed: list[RunEntry] | None = None
        self.total = 0
        """Runs that there were when they were last listed."""

    def entries(self, *, most: int | None = None) -> list[RunEntry]:
        """Return runs, the newest first. While another thread reads them, return those that were read before.

        ``most``: how many at most, those whose records have changed last; the others are not read. None: all.

        Raises:
            Unread: another thread reads, and nothing was read before.
        """
        if self._lock.acquire(timeout=WAIT_S):
            try:
                self._listed = self._read(most)
            finally:
                self._lock.release()
        if self._listed is None:
            raise Unread
        return self._listed[:most]  # what was read before may be all

    def _read(self, most: int | None) -> list[RunEntry]:
        found, now = [], time.time()
        stamps = {name: _stamp(self._runs.root / name / METRICS) for name in self._runs.names()}
        self.total = len(stamps)
        self._kept = {name: kept for name, kept in self._kept.items() if name in stamps}
        for name in self._newest(stamps, most):
            try:
                found.append(self._entry(name, stamps[name], now))
            except (Absent, OSError):  # it has been removed meanwhile
                continue
        return sorted(found, key=lambda entry: entry.order, reverse=True)

    def _newest(self, stamps: Mapping[str, tuple[int, float]], most: int | None) -> list[str]:
        """Return the names of the ``most`` runs whose records have changed last, or that were made since."""
        if most is None or len(stamps) <= most:
            return list(stamps)
        return heapq.nlargest(most, stamps, key=lambda name: max(stamps[name][1], _stamp(self._runs.root / name)[1]))

    def _entry(self, name: str, stamp: tuple[int, float], now: float) -> RunEntry:
        # A list of thousands of runs is asked for every few seconds; most of them have not changed.
        kept = self._kept.get(name)
        if kept is None or kept.stamp != stamp:
            kept = self._kept[name] = _read(name, self._runs.run(name), stamp, now)
        # A run that has recorded its end keeps its state; of thousands, nearly all are such.
        state = kept.entry.state if _is_over(kept.end) else state_of(self._runs.run(name), kept.end, now=now)
        left = kept.left if state == "running" else ""
        return replace(kept.entry, state=state, left=left, age=age(kept.since or None, now=now) or "")


def _is_over(end: Mapping[str, Any] | None) -> bool:
    return end is not None and end.get("reason") in ("done", "interrupted", "failed")


def _stamp(path: Path) -> tuple[int, float]:
    """Return size in bytes and time of the last change; zeros where the file is missing. Nothing of it is shown."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0, 0.0
    return status.st_size, status.st_mtime


def _read(name: str, run: RunFiles, stamp: tuple[int, float], now: float) -> _CachedRun:
    """Read a run."""
    timeline, summary = _ends(run), run.json(SUMMARY)
    start, last, best = timeline.start, timeline.last_update, _best(timeline, summary)
    total, made = number_of(start.get("total_updates")), _time_of(timeline)
    metric, value = next(iter(headline_of(best).items()), ("", None))
    began = number_of(start.get("time"))
    changed = max(run.size_and_time(file)[1] for file in (METRICS, "spec.json"))
    since = began if began is not None else changed
    entry = RunEntry(
        name=name,
        state=state_of(run, timeline.end, now=now),
        model=str(start.get("model") or "")[:60],
        backend=_backend(start, timeline.end or {}),
        updates="" if made is None else f"{made:.0f} of {total:.0f}" if total else f"{made:.0f}",
        share=0 if made is None or not total else max(0, min(100, round(100 * made / total))),
        metric=metric[:60],
        value="" if value is None else f"{value:.4f}",
        curve=_draw_course(timeline, metric),
        left="",
        started=moment(since or None) or "",
        age="",
        order=began if began is not None else number_of(last.get("time")) or changed,
    )
    end = None if timeline.end is None else {"reason": timeline.end.get("reason")}
    return _CachedRun(stamp=stamp, entry=entry, since=since, end=end, left=_word_time_left(timeline, made, total))


def _ends(run: RunFiles) -> Timeline:
    """Return the records at the beginning and at the end of the file, and the evaluations between them.

    Updates are most of a file, and the list needs the newest ones alone.
    """
    timeline = Timeline()
    try:
        with open_file(run.file(METRICS)) as file:
            head = file.read(HEAD_BYTES)
            tail_start = max(len(head), file.seek(0, 2) - TAIL_BYTES)
            file.seek(len(head))
            middle = file.read(min(tail_start - len(head), MIDDLE_BYTES))
            file.seek(tail_start)
            tail = file.read(TAIL_BYTES)
    except (Absent, OSError):
        return timeline
    if len(head) + len(middle) < tail_start:  # The tail may begin within a line.
        lines = [*(head + middle).splitlines(), *tail.splitlines()[1:]]
    else:
        lines = (head + middle + tail).splitlines()
    # Of the middle only evaluations are parsed: updates are most of a file, and the newest ones are in its tail.
    between = range(head.count(b"\n") + 1, len(lines) - tail.count(b"\n"))
    for place, line in enumerate(lines):
        if place in between and b'"evaluation"' not in line:
            continue
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


def _time_of(timeline: Timeline) -> float | None:
    ended = number_of((timeline.end or {}).get("updates"))
    last = number_of(timeline.last_update.get("update"))
    return ended if ended is not None else None if last is None else last + 1


def _draw_course(timeline: Timeline, metric: str) -> Markup:
    """Draw how a run went, as far as its records were read."""
    name, (x, y) = metric, timeline.metrics().get(metric, (np.zeros(0), np.zeros(0)))
    if len(y) < 2:
        name, (x, y) = "total loss", timeline.losses().get("total", (np.zeros(0), np.zeros(0)))
    if len(y) < 2:
        return Markup()
    chosen = np.unique(np.linspace(0, len(y) - 1, min(len(y), MAX_POINTS)).astype(int))
    label = f"{name[:60]}: {y[0]:.4g} after update {x[0]:.0f}, {y[-1]:.4g} after update {x[-1]:.0f}"
    # `svg.sparkline` escapes the label.
    return Markup(svg.sparkline(label, x[chosen], y[chosen]))  # noqa: S704


def _word_time_left(timeline: Timeline, made: float | None, total: float | None) -> str:
    """Word the time to the last update, at the speed of the newest ones."""
    newest = (number_of(record.get("update_seconds")) for record in timeline.updates[-NEWEST:])
    seconds = [value for value in newest if value is not None and 0 <= value < 1e6]
    if not seconds or made is None or total is None or not 0 <= total - made < 1e12:
        return ""
    return f"{duration((total - made) * statistics.median(seconds))} left"


def _backend(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    name, ranks = start.get("backend") or end.get("backend") or "", number_of(start.get("ranks") or end.get("ranks"))
    return f"{str(name)[:40]} x {ranks:.0f}" if name and ranks and ranks > 1 else str(name)[:40]
