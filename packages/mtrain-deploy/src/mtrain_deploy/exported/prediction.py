"""Predict on images with an exported model, in this process."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.rank.spec.assembly import made_pool
from mtrain.rank.spec.predict import readable
from mtrain_deploy.exported.data import image_data, pooled_batches, threads_of
from mtrain_deploy.exported.metadata import Metadata
from mtrain_deploy.exported.model import ExportedModel, check_predicts

if TYPE_CHECKING:
    from mtrain.spec.resolved import Resolved

BATCH = 1
"""Images computed at once."""


def predict(
    job: "Resolved", path: Path, metadata: Metadata, *, names: Mapping[Path, str], out: Path, request: Any
) -> None:
    """Predict on images, and write the files that ``ImageData.write`` describes, and ``skipped.json``.

    Args:
        job: How images are prepared.
        path: The ONNX file.
        metadata: What it says about itself.
        names: Each image file, with its name in the results.
        out: Folder of the results, which exists.
        request: See ``ExportedFiles.predict``.

    Raises:
        DataError: No image can be read, or with ``request.strict`` at least one cannot.
        UsageError: The spec does not fit the model.
    """
    check_predicts(metadata, name=str(path))
    spec = job.spec
    if not request.strict:
        names = readable(names, job.task_named(metadata.kind).unreadable(spec, list(names)), out)
    images = image_data(job, metadata, list(names))
    pool = made_pool(dict(images.sources()), spec)
    with closing(pool):  # The workers were forked before ONNX Runtime has threads.
        model = ExportedModel.open(path, threads=threads_of(spec)).with_options(
            {**metadata.options, "confidence": request.confidence}
        )
        evaluator = images.evaluator()
        for batch in pooled_batches(pool, count=images.length("val"), size=BATCH, prefetch=spec.data.prefetch):
            evaluator.add(batch, model.predictions(batch))
    images.write(evaluator.partial(), out, confidence=request.confidence, draw=request.draw, names=names)
