"""The lines that are printed at the end of a job: its result, and the paths of its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def metric_lines(summary: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """Return lines with the metrics of each class and the remarks of the evaluation."""
    from mtrain.records.wording import class_lines

    return [*class_lines(metrics), *summary.get("remarks", ())]


def closing_lines(summary: Mapping[str, Any], *, run_dir: Path | None) -> list[str]:
    """Return lines with the result of a finished run and the paths of its files.

    ``run_dir`` is the run folder; None if another host has it, whose files are not listed.
    """
    from mtrain.system.runfolder import RunFolder

    lines = [*result_lines(summary), *copy_lines(summary.get("copies") or {})]
    if run_dir is None:
        return lines
    run = RunFolder(run_dir)
    places = {
        "curves": run.results,
        "images": run.path / "val_batch.jpg",
        "summary": run.summary,
        "checkpoints": run.checkpoints,
        "profiles": run.profiles,
        "logs": run.logs,
    }
    return lines + [f"{name + ':':<13}{path}" for name, path in places.items() if _is_filled(path)]


def _is_filled(path: Path) -> bool:
    """Return whether a path is that of a file, or of a folder that is not empty."""
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def copy_lines(copies: Mapping[str, Any]) -> list[str]:
    """Return a line on where the copies of a run are, with the last failure; none if nothing was to be copied."""
    if not copies:
        return []
    newest = f"newest {copies['newest']}" if copies["newest"] else "none was made"
    failed = f"; the last one failed: {copies['error']}" if copies["error"] else ""
    return [f"copies:      {copies['to']} ({newest}{failed})"]


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with the result of a finished run, from its ``summary``; none if that is empty."""
    from mtrain.records.wording import duration, headline_metrics, stopped_early

    if not summary:
        return []
    best = summary.get("best") or summary.get("last") or {}
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in headline_metrics({**summary, "metrics": best}).items())
    at = f" (update {best['update']})" if "update" in best else ""
    ranks = summary.get("ranks", 1)
    where = f" on {ranks} rank{'s' if ranks > 1 else ''}, {summary['device']}" if "device" in summary else ""
    updates, early = summary.get("updates", "?"), stopped_early(summary)
    took = f"updates in {duration(summary.get('seconds'))}{where}"
    lines = [f"done: {updates} {took}"]
    if early:
        lines = [
            f"done, {early}; {updates} of {summary.get('total_updates', '?')} {took}",
            "--resume would end at once; to go on, give it with -o train.patience=NUMBER (a larger one), or null",
        ]
    return lines + ([f"best evaluation: {metrics}{at}", *metric_lines(summary, best)] if metrics else [])
