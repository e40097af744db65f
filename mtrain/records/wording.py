"""Word the records of a run as text for people; every display uses these functions."""

import time
from collections.abc import Mapping
from typing import Any

from mtrain.records.history import Record, learning_rate_of, pace_of


def update_line(record: Record) -> str:
    """Word one update, e.g. ``epoch 3/60 update 121/2400 total 0.81 learning rate 9.1e-03 112 images/s ... 4 min left``."""
    parts = [place(record), losses(record)]
    learning_rate = learning_rate_of(record)
    parts += [f"learning rate {learning_rate:.2e}"] if learning_rate is not None else []
    parts += [
        word_speed(record),
        memory(record),
        f"{duration(left_s(record))} left" if left_s(record) is not None else "",
    ]
    return "  ".join(part for part in parts if part)


def place(record: Record) -> str:
    """Word the progress of a job: epoch and update, counted from 1."""
    update, total = int(record.get("update", 0)) + 1, record.get("total_updates")
    epochs = epoch_count(record)
    epoch = f"epoch {int(record.get('epoch', 0)) + 1}" + (f"/{epochs}" if epochs else "")
    return f"{epoch}  update {update}" + (f"/{total}" if total else "")


def epoch_count(record: Record) -> int | None:
    """Return the number of epochs of the job, of which the last may be incomplete; None if it is not known."""
    total, per_epoch = record.get("total_updates"), record.get("updates_per_epoch")
    return -(-total // per_epoch) if total and per_epoch else None


def losses(record: Record) -> str:
    """Word the losses, the total first."""
    values: Mapping[str, Any] = record.get("losses") or {}
    names = sorted(values, key=lambda name: name != "total")
    return "  ".join(f"{name} {number(values[name])}" for name in names)


def number(value: Any) -> str:
    """Write a number with four significant digits; ``-`` for a value that is not a number."""
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else "-"


def word_speed(record: Record) -> str:
    """Word the images (``unit`` of the record) per second and the share of time spent waiting for data."""
    share, (pace, unit) = record.get("data_wait_share"), pace_of(record)
    parts = [f"{pace:.0f} {unit}/s" if pace >= 10 else f"{pace:.1f} {unit}/s"] if isinstance(pace, int | float) else []
    mfu = record.get("mfu")
    parts += [f"{100 * mfu:.1f}% MFU"] if isinstance(mfu, int | float) else []
    parts += [f"waiting for data {100 * share:.0f}%"] if isinstance(share, int | float) else []
    return "  ".join(parts)


def memory(record: Record) -> str:
    """Word the peak memory of rank 0."""
    peak_bytes = record.get("memory_bytes")
    return f"{peak_bytes / 2**30:.2f} GiB" if isinstance(peak_bytes, int | float) and peak_bytes else ""


def left_s(record: Record) -> float | None:
    """Return the seconds to the end of the job at the speed of this update, without the time for evaluations."""
    total, seconds = record.get("total_updates"), record.get("update_seconds")
    if not total or not isinstance(seconds, int | float):
        return None
    return float(max(0, total - int(record.get("update", 0)) - 1) * seconds)


def duration(seconds: float | None) -> str:
    """Word a duration, as in ``42 s``, ``3 min 20 s`` or ``2 h 05 min``; ``-`` if it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    # No seconds from an hour on: an estimate is no better.
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def headline_metrics(record: Record) -> dict[str, float]:
    """Return the metrics that get a column or a curve.

    They are those that the record's ``headline`` names, or else the first five that do not belong to a single class.
    """
    metrics = {k: v for k, v in (record.get("metrics") or {}).items() if isinstance(v, int | float)}
    headline = [name for name in record.get("headline") or () if name in metrics]
    names = headline or [name for name in metrics if "/" not in name and name != "score"][:5]
    return {name: metrics[name] for name in names}


def evaluation_line(record: Record) -> str:
    """Word one evaluation. Its epoch is the number of complete epochs."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in headline_metrics(record).items())
    best = "  best so far" if record.get("best") else ""
    return (
        f"epoch {record.get('epoch')}  update {record.get('update')}  evaluation: {metrics or 'nothing to score'}{best}"
    )


def event_line(record: Record) -> str:
    """Word a start, a note, a warning, a requested checkpoint or an end; empty if there is nothing to report."""
    kind = record.get("kind")
    if kind == "warning":
        return f"warning: {record.get('message', '')}"
    if kind == "note":
        return str(record.get("message", ""))
    if kind == "checkpoint":
        requested = f"saved at update {record.get('update')}, as SIGUSR1 asked; training goes on"
        return requested if record.get("why") == "requested" else ""
    if kind == "end":
        reason = record.get("reason", "done")  # Where it is another one, the job itself may be started again.
        head = f"end: {reason}" if reason == "done" else f"the ranks have ended: {reason}"
        return head + (f", {stopped_early(record)}" if stopped_early(record) else "")
    return start_line(record)


def start_line(record: Record) -> str:
    """Word the start of a job for people, as in ``start: yolov5n on 400 images ...``; empty if nothing is known.

    It says what is trained on what, where, and how long it is. ``start_facts`` has the rest.
    """
    samples, others, classes = record.get("train_samples"), record.get("val_samples"), record.get("classes")
    data = [count_of(samples, "training sample")] if samples else []
    data += [f"{others} to evaluate on"] if others else []
    data += [count_of(len(classes), "class", "classes")] if isinstance(classes, list | tuple) and classes else []
    what = f"{record.get('model', '')}{' on ' if data and record.get('model') else ''}{', '.join(data)}"
    ranks = count_of(record["ranks"], "rank") if isinstance(record.get("ranks"), int) else ""
    where = ", ".join(
        str(part) for part in (record.get("backend"), ranks, record.get("device"), record.get("precision")) if part
    )
    amounts = ((epoch_count(record), "epoch"), (record.get("total_updates"), "update"))
    length = ", ".join(count_of(amount, noun) for amount, noun in amounts if amount)
    done = record.get("update")
    going_on = f"goes on after update {done}" if done else ""
    parts = [part for part in (what, where, length, going_on) if part]
    return f"start: {'; '.join(parts)}" if parts else ""


def start_facts(record: Record) -> str:
    """Return every short value of a start under its name, for who wants to know more than ``start_line`` says."""
    hidden = ("kind", "time")
    shown = "  ".join(f"{name} {value}" for name, value in record.items() if name not in hidden and _short(value))
    return f"facts: {shown}" if shown else ""


def count_of(count: int, noun: str, plural: str = "") -> str:
    """Word a number of things, as in ``1 rank`` or ``2 ranks``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def copy_words(record: Record) -> str:
    """Word the copy of a checkpoint: which one, and where it is."""
    return f"{record.get('name')} at {record.get('to')}"


def stopped_early(summary: Mapping[str, Any]) -> str:
    """Word the reason why a job ended before its last update; empty if it did not."""
    if summary.get("stopped_by") != "patience":
        return ""
    count = summary.get("patience")
    return f"stopped early by train.patience: no better score in {count} evaluation{'s' if count != 1 else ''}"


def _short(value: Any) -> bool:
    return isinstance(value, int | float | str) and len(str(value)) <= 60


def class_table(metrics: Mapping[str, Any]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the metrics of single classes as a table: the names of its columns, and the values of each class."""
    of_classes = {name: value for name, value in metrics.items() if "/" in name}
    columns = list(dict.fromkeys(name.partition("/")[0] for name in of_classes))
    classes = list(dict.fromkeys(name.partition("/")[2] for name in of_classes))
    return columns, {one: [of_classes.get(f"{column}/{one}") for column in columns] for one in classes}


def class_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Word the metrics of single classes (``<metric>/<class>``), one line for each metric."""
    lines = []
    for kind in dict.fromkeys(name.partition("/")[0] for name in metrics if "/" in name):
        parts = [
            f"{name.partition('/')[2]} {number(value)}"
            for name, value in metrics.items()
            if name.startswith(f"{kind}/")
        ]
        lines.append(f"{kind} by class: " + "  ".join(parts))
    return lines


def local_time(seconds: float) -> str:
    """Word a time in seconds since 1970 as local date and time; ``?``: the calendar has no such time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
