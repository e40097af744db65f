"""Score an exported model on the evaluation split of a spec, in this process."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import TaskData
from mtrain.core.interfaces.reporter import Reporter
from mtrain.rank.records import describe_run, report_of
from mtrain.rank.spec.assembly import made_pool
from mtrain.system.runfolder import RunFolder
from mtrain_deploy.exported.data import evaluation_data, pooled_batches, threads_of
from mtrain_deploy.exported.metadata import Metadata
from mtrain_deploy.exported.model import ExportedModel, check_predicts

if TYPE_CHECKING:
    from mtrain.spec.resolved import Resolved

BATCH = 8
"""Samples computed at once, unless the spec sets ``evaluate.batch_size``; the metrics do not depend on it."""


def open_data(job: "Resolved", path: Path, metadata: Metadata) -> TaskData:
    """Open the evaluation split of a spec for an exported model.

    Raises:
        UsageError: The data do not fit the model, or no predictions can be read from its outputs.
    """
    check_predicts(metadata, name=str(path))
    return evaluation_data(job, metadata)


def evaluate(
    job: "Resolved",
    path: Path,
    data: TaskData,
    *,
    options: Mapping[str, Any],
    folder: Path,
    more: Sequence[tuple[str, Reporter]] = (),
) -> Mapping[str, Any]:
    """Score an exported model, and write the files of an evaluation into a run folder.

    Args:
        job: The spec whose evaluation split is used.
        path: The ONNX file.
        data: What ``open_data`` returned.
        options: Options of the model's plugin.
        folder: The run folder.
        more: Reporters besides those of the spec, such as a display, with their names.

    Returns:
        The content of ``summary.json``.

    Raises:
        UsageError: The data cannot be read.
    """
    spec = job.spec
    pool = made_pool(dict(data.sources()), spec)
    with closing(pool):  # The workers were forked before ONNX Runtime has threads.
        model = ExportedModel.open(path, threads=threads_of(spec)).with_options(options)
        run = describe_run(spec, RunFolder(folder), OneRank(), start_update=0)
        report = report_of(job, run, more)
        evaluator = data.evaluator()
        size = spec.evaluate.batch_size or BATCH
        for batch in pooled_batches(pool, count=data.length("val"), size=size, prefetch=spec.data.prefetch):
            evaluator.add(batch, model.predictions(batch))
    metrics = evaluator.result([evaluator.partial()])
    headline = list(evaluator.headline)
    report.evaluation(metrics, update=0, epoch=0, headline=headline, best=False)
    summary: dict[str, Any] = {"reason": "done", "device": "cpu", "metrics": metrics, "weights": str(path)}
    summary |= {"headline": headline, "remarks": evaluator.remarks()}
    report.event("end", **summary)
    report.close(summary)
    return summary
