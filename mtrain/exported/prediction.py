"""Predict on pictures with an exported model, in this process."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.exported.data import picture_data, pooled_batches, threads_of
from mtrain.exported.metadata import Metadata
from mtrain.exported.model import ExportedModel, check_predicts
from mtrain.rank.assembly import made_pool, task_kind
from mtrain.rank.predict import readable

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

BATCH = 1
"""Pictures computed at once."""


def predict(  # noqa: PLR0913 - what a request for predictions has
    spec: "Spec",
    path: Path,
    metadata: Metadata,
    *,
    names: Mapping[Path, str],
    out: Path,
    confidence: float,
    draw: bool,
    strict: bool,
) -> None:
    """Predict on pictures, and write the files that ``PictureData.write`` describes, and ``skipped.json``.

    Args:
        spec: How pictures are prepared.
        path: The ONNX file.
        metadata: What it says about itself.
        names: Each picture file, with its name in the results.
        out: Folder of the results, which exists.
        confidence: Lowest score that is kept.
        draw: Whether pictures are written with their predictions.
        strict: Whether a picture that cannot be read is an error; otherwise it is skipped.

    Raises:
        DataError: No picture can be read, or with ``strict`` at least one cannot.
        UsageError: The spec does not fit the model.
    """
    check_predicts(metadata, name=str(path))
    if not strict:
        names = readable(names, task_kind(spec, metadata.kind).unreadable(spec, list(names)), out)
    pictures = picture_data(spec, metadata, list(names))
    pool = made_pool(dict(pictures.sources()), spec)
    with closing(pool):  # The workers were forked before ONNX Runtime has threads.
        model = ExportedModel.open(path, threads=threads_of(spec)).with_options(
            {**metadata.options, "confidence": confidence}
        )
        evaluator = pictures.evaluator()
        for batch in pooled_batches(pool, count=pictures.length("val"), size=BATCH, prefetch=spec.data.prefetch):
            evaluator.add(batch, model.predictions(batch))
    pictures.write(evaluator.partial(), out, confidence=confidence, draw=draw, names=names)
