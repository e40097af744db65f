"""The content of the pages of a run, collected from its folder. A file that is missing or damaged leaves its part out."""

import base64
import io
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mtrain.core.interfaces.details import Detail, Matrix
from mtrain.core.record_files import DETAILS, IMAGES, INPUTS, SUMMARY
from mtrain.jobs.watch import hang_log
from mtrain.records.history import Record, pace_of
from mtrain.records.wording import copy_words, duration, number
from mtrain.spec.files import read_bytes
from mtrain_ui.pages.folder import Absent, RunFiles
from mtrain_ui.pages.state import MEANING, Failure, RunState, failure_of, state_of
from mtrain_ui.pages.timeline import Timeline, headline_of, mapping_of, number_of

MAX_SPEC_BYTES = 256 << 10
MAX_IMAGE_BYTES = 64 << 20
MAX_PIXELS = 100_000_000
IMAGE_PX = 1400
"""Width of an image in a page."""
MAX_CLASSES = 400
DAYS_AGO = 30
"""Times that are longer ago are shown as dates."""
Row = tuple[str, str]
_DETAILS: TypeAdapter[list[Detail]] = TypeAdapter(list[Annotated[Detail, Field(discriminator="kind")]])


@dataclass(frozen=True, kw_only=True)
class ClassTable:
    """The metrics of single classes."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]
    """Name of the class, and for each column the metric in words and in per cent, for its bar."""
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """An image that the run kept, as a data URL."""

    title: str
    source: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything about a run that is not a curve."""

    state: RunState
    meaning: str
    facts: Sequence[Row]
    """The run in a few lines."""
    best: Record
    """Metrics of the best evaluation by name; empty without one."""
    headline: Sequence[Row]
    classes: ClassTable | None
    remarks: Sequence[str]
    attempts: Sequence[Sequence[str]]
    events: Sequence[tuple[str, str]]
    """Kind and text of notes, warnings and hangs."""
    failure: Failure | None
    timing: Sequence[Row]
    environment: Sequence[Row]
    versions: Sequence[Row]
    command: str
    spec: str
    details: Sequence[Detail] = field(default_factory=tuple)
    details_of: str = ""
    """Of which evaluation the details are."""


def collect(run: RunFiles, timeline: Timeline) -> Content:
    """Read a run folder."""
    summary = run.json(SUMMARY)
    state = state_of(run, timeline.end)
    best = _best(timeline, summary)
    details, details_of = _details(run)
    return Content(
        state=state,
        meaning=MEANING[state],
        facts=_facts(timeline, summary),
        best=best,
        headline=[(name, f"{value:.4f}") for name, value in headline_of(best).items()],
        classes=_classes(mapping_of(best.get("metrics"))),
        remarks=[str(text)[:500] for text in _list(summary.get("remarks"))[:20]],
        attempts=_attempts(timeline),
        events=[(str(e["kind"]), str(e.get("message", ""))[:1000]) for e in timeline.events] + _hangs(run),
        failure=failure_of(run) if state in ("failed", "unfinished") else None,
        timing=_timing(timeline, summary),
        environment=_environment(run, timeline),
        versions=[(str(n), str(v)[:60]) for n, v in mapping_of(run.json("environment.json").get("versions")).items()][
            :200
        ],
        command=" ".join(str(word) for word in _list(run.json("environment.json").get("argv")))[:4000],
        spec=run.text("spec.yml", limit=MAX_SPEC_BYTES),
        details=details,
        details_of=details_of,
    )


def _hangs(run: RunFiles) -> list[tuple[str, str]]:
    """Return what was said of ranks that hung."""
    try:
        run.file(hang_log.FILE)
    except Absent:
        return []
    return [("hang", text[:1000]) for text in hang_log.words(hang_log.HangLog(run.path).read())]


def _best(timeline: Timeline, summary: Mapping[str, Any]) -> Record:
    """Return the best evaluation as a record; from the summary where the evaluation belongs to an earlier folder."""
    found = timeline.best()
    if found is not None:
        return found
    best = mapping_of(summary.get("best") or summary.get("last"))
    metrics = {name: value for name, value in best.items() if name not in ("update", "epoch")}
    if not metrics:
        return timeline.evaluations[-1] if timeline.evaluations else {}
    return {"update": best.get("update"), "metrics": metrics, "headline": summary.get("headline")}


def _facts(timeline: Timeline, summary: Mapping[str, Any]) -> list[Row]:
    start, last = timeline.start, timeline.last_update
    made, total = summary.get("updates", 1 + (number_of(last.get("update")) or -1)), start.get("total_updates")
    rows = {
        "model": start.get("model"),
        "backend": start.get("backend") or summary.get("backend"),
        "ranks": start.get("ranks") or summary.get("ranks"),
        "device": start.get("device") or summary.get("device"),
        "updates": f"{_whole(made)} of {_whole(total)}" if number_of(total) is not None else None,
        "training samples": start.get("train_samples"),
        "evaluation samples": start.get("val_samples"),
        "classes": len(_list(start.get("classes"))) or None,
        "started": moment(timeline.starts[0].get("time")) if timeline.starts else None,
        "duration": _duration(timeline, summary),
        "attempts": len(timeline.starts) or None,
        "skipped updates": summary.get("skipped_updates") or None,
        "newest copy": f"{copy_words(timeline.copied)}, {moment(timeline.copied.get('time'))}"
        if timeline.copied
        else None,
    }
    return [(name, str(value)[:300]) for name, value in rows.items() if value is not None]


def _duration(timeline: Timeline, summary: Mapping[str, Any]) -> str | None:
    """Return the time that all attempts took; what lies between them does not count."""
    begins = [number_of(record.get("time")) for record in timeline.starts]
    newest = timeline.end or timeline.last_update or (timeline.starts[-1] if timeline.starts else {})
    seconds = [number_of(record.get("seconds")) for record in timeline.ends]
    if begins and len(seconds) == len(begins) and None not in seconds:
        return duration(sum(value for value in seconds if value is not None))
    last = number_of(newest.get("time"))
    if not begins or begins[-1] is None or last is None or not 0 <= last - begins[-1] < 1e9:
        return None
    return duration(last - begins[-1]) + (" in the last attempt" if len(begins) > 1 else "")


def _classes(metrics: Mapping[str, Any]) -> ClassTable | None:
    """Return the metrics ``<metric>/<class>`` as a table of classes."""
    values: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        metric, slash, name = str(key).partition("/")
        if slash and number_of(value) is not None:
            values.setdefault(name, {})[metric] = value
    if not values:
        return None
    columns = list(dict.fromkeys(metric for row in values.values() for metric in row))[:8]
    rows = [
        (name[:200], [(number(row.get(column)), _percent(row.get(column))) for column in columns])
        for name, row in values.items()
    ]
    return ClassTable(columns=columns, rows=rows[:MAX_CLASSES], left_out=max(0, len(rows) - MAX_CLASSES))


def _percent(value: float | None) -> int:
    """Return a share as the length of a bar; metrics that are no share have none."""
    return round(100 * value) if value is not None and 0 <= value <= 1 else 0


def _attempts(timeline: Timeline) -> list[list[str]]:
    ends = list(timeline.ends)
    rows = []
    for count, start in enumerate(timeline.starts, 1):
        following = timeline.starts[count] if count < len(timeline.starts) else None
        # The end that was recorded between this start and the next one.
        own = [e for e in ends if _after(e, start) and (following is None or not _after(e, following))]
        reason = str(own[-1].get("reason", "?"))[:60] if own else ("no end recorded" if following else "")
        source = start.get("resumed_from")
        rows.append(
            [
                str(count),
                moment(start.get("time")) or "",
                _whole(start.get("update", 0)),
                str(source).rsplit("/", 1)[-1][:100] if source else "",
                reason,
            ]
        )
    return rows


def _after(record: Record, other: Record) -> bool:
    one, two = number_of(record.get("time")), number_of(other.get("time"))
    return one is not None and two is not None and one >= two


def _median(found: Sequence[Any]) -> float | None:
    """Return the median of what is a number; None: nothing is."""
    values = [value for each in found if (value := number_of(each)) is not None]
    return statistics.median(values) if values else None


def _timing(timeline: Timeline, summary: Mapping[str, Any]) -> list[Row]:
    def middle(name: str) -> float | None:
        return _median([record.get(name) for record in timeline.updates])

    seconds, wait = middle("update_seconds"), middle("data_wait_share")
    speed, (_, unit) = _median([pace_of(record)[0] for record in timeline.updates]), pace_of(timeline.last_update)
    unit = "samples" if unit == "images" else unit
    evaluations = [v for record in timeline.evaluations if (v := number_of(record.get("seconds"))) is not None]
    memory = [v for record in timeline.updates if (v := number_of(record.get("memory_bytes"))) is not None]
    saving = number_of(summary.get("save_wait_seconds"))
    rows = {
        "time of an update (median)": None if seconds is None else f"{1000 * seconds:.4g} ms",
        "updates per second": None if not seconds else f"{1 / seconds:.3g}",
        f"{unit} per second (median)": None if speed is None else f"{speed:.4g}",
        "waiting for data (median)": None if wait is None else f"{100 * wait:.1f} % of the time",
        "evaluations": f"{len(evaluations)}, {duration(sum(evaluations))} together" if evaluations else None,
        "waiting for checkpoints": None if saving is None else f"{saving:.3g} s",
        "peak memory of rank 0": f"{max(memory) / 2**30:.2f} GiB" if memory else None,
    }
    return [(name, text) for name, text in rows.items() if text is not None]


def _environment(run: RunFiles, timeline: Timeline) -> list[Row]:
    facts = run.json("environment.json")
    plan = run.json("plan.json")
    commands = [mapping_of(command).get("host") for command in _list(plan.get("commands"))]
    hosts = list(dict.fromkeys(str(host) for host in commands if host))
    rows = {
        "host": facts.get("host"),
        "hosts of the ranks": ", ".join(hosts[:64]) or None,
        "devices": timeline.start.get("device"),
        "platform": facts.get("platform"),
        "processor cores": facts.get("cores"),
        "Python": str(facts.get("python", "")).split("\n")[0] or None,
        "started": facts.get("time"),
    }
    return [(name, str(value)[:400]) for name, value in rows.items() if value is not None]


def _details(run: RunFiles) -> tuple[list[Detail], str]:
    content = run.json(DETAILS)
    try:
        details = read_details(content.get("details", []))
    except ValueError:
        return [], ""
    update = number_of(content.get("update"))
    return details, "" if update is None or not details else f"the last evaluation, after {update:.0f} updates"


def read_details(values: Any) -> list[Detail]:
    """Return details from the values of a JSON file, which anybody may have changed since a job wrote them.

    Raises:
        ValueError: they are something else, or do not fit together.
    """
    details = _DETAILS.validate_python(values)
    for detail in details:
        if isinstance(detail, Matrix):
            whole = len(detail.counts) == len(detail.rows) and {len(r) for r in detail.counts} <= {len(detail.columns)}
        else:
            whole = all(len(series.x) == len(series.y) for series in detail.series)
        if not whole:
            raise ValueError(f"{detail.title}: the lengths of its lists do not fit together")
    return details


def photographs(run: RunFiles) -> list[Photograph]:
    """Return the images that the run kept, made smaller."""
    kept = {
        IMAGES: ("Predictions", "some images of the evaluation split, with the truth, after the last evaluation"),
        INPUTS: ("Inputs", "some training samples as the network receives them"),
    }
    found = [(title, note, _as_url(run, name)) for name, (title, note) in kept.items()]
    return [Photograph(title=title, source=source, note=note) for title, note, source in found if source]


def _as_url(run: RunFiles, name: str) -> str | None:
    """Return an image as a data URL; None where it is missing, or is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(read_bytes(run.file(name), limit=MAX_IMAGE_BYTES))) as image:
            # The header says the size; decoding comes later, so that a small file cannot fill the memory.
            if image.width * image.height > MAX_PIXELS:
                return None
            # JPEG decodes to an eighth of its size at a fraction of the time.
            image.draft("RGB", (IMAGE_PX, IMAGE_PX))
            small = image.convert("RGB")
            small.thumbnail((IMAGE_PX, 4 * IMAGE_PX))
            content = io.BytesIO()
            small.save(content, format="JPEG", quality=80)
    except (Absent, OSError, ValueError, SyntaxError, zlib.error, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")


def moment(value: Any) -> str | None:
    """Return a time in seconds since 1970 as local date and time."""
    seconds = number_of(value)
    if seconds is None or not 0 <= seconds < 1e11:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def age(value: Any, *, now: float) -> str | None:
    """Return how long ago a time in seconds since 1970 was, as in ``5 min ago``; the date if it is long ago."""
    seconds = number_of(value)
    if seconds is None or not 0 <= seconds < 1e11:
        return None
    passed = now - seconds
    if not 0 <= passed < DAYS_AGO * 86400:
        return (moment(seconds) or "")[:10]
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed // length:.0f} {unit} ago"
    return "just now"


def _whole(value: Any) -> str:
    found = number_of(value)
    return "?" if found is None or abs(found) > 1e15 else f"{found:.0f}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
