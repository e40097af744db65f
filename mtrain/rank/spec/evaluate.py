"""Evaluation on one rank, of weights that were trained before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.interfaces import Progress
from mtrain.rank import process
from mtrain.rank.records import report_weights, reporter, text_of
from mtrain.rank.spec.assembly import assemble, open_task
from mtrain.spec.resolved import Resolved
from mtrain.system.devices import device_words
from mtrain.system.runfolder import RunFolder


def evaluate_only(
    resolved: Resolved, run_folder: RunFolder, weights: Path | None, *, stop: Callable[[], bool], leave: process.Leaving
) -> None:
    """Score the averaged weights of a checkpoint, or those that ``model.weights`` names."""
    saved = None if weights is None else checkpoint.load(weights)
    # What the model computed from its training data: that of other data would change its predictions.
    details = None if saved is None else saved.meta["extra"].get("details")
    task, restored = open_task(resolved, training=False), saved is not None
    with assemble(resolved, task, leave=leave, details=details, restored=restored) as job:
        progress = Progress()
        if saved is not None:
            progress = saved.progress
            job.session.restore(job.model, job.optimizer, saved.state)
        report = reporter(job, run_folder, progress)
        report_weights(report, job)
        evaluator, loader = job.data.evaluator(), job.evaluation_loader()
        metrics = job.evaluate(loader, evaluator, stop=stop)
        loader.close()
        headline = list(evaluator.headline)
        report.evaluation(metrics, update=progress.update, epoch=progress.epoch, headline=headline, best=False)
        device = device_words(job.session.collective.all_gather(job.session.device))
        summary: dict[str, Any] = {"reason": "done", "device": device, "metrics": metrics, "weights": text_of(weights)}
        summary |= {"headline": headline, "remarks": evaluator.remarks()}
        report.event("end", **summary)
        report.close(summary)
