"""Files that a finished job keeps for its pages beside its records: images, and details of the last evaluation."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Evaluator, TaskData
from mtrain.core.record_files import DETAILS, IMAGES, INPUTS, write_json
from mtrain.records.reporter import Report

log = logging.getLogger(__name__)
INPUT_VIEW = "augmented"
"""Name of the view of ``TaskData.views`` that shows training samples as the network receives them."""
INPUT_SAMPLES = 8


def draw(data: TaskData, evaluator: Evaluator, folder: Path, report: Report) -> list[str]:
    """Draw predictions of the last evaluation beside the truth; return the names of the files. Only rank 0 calls."""
    return _try({IMAGES: lambda: data.draw(evaluator.partial(), folder / IMAGES)}, folder, report)


def keep(data: TaskData, evaluator: Evaluator, folder: Path, *, last: Mapping[str, Any], report: Report) -> list[str]:
    """Write details of the last evaluation, and draw some inputs; return the names of the files. Only rank 0 calls.

    Args:
        data: The data of the job.
        evaluator: The evaluator of the last evaluation.
        folder: The run folder.
        last: The metrics of that evaluation, with ``update`` and ``epoch``.
        report: Receives a warning for each file that could not be made.
    """
    steps: dict[str, Callable[[], object]] = {
        DETAILS: lambda: _write_details(data, evaluator, last, folder / DETAILS),
        INPUTS: lambda: _draw_inputs(data, folder / INPUTS),
    }
    return _try(steps, folder, report)


def _try(steps: Mapping[str, Callable[[], object]], folder: Path, report: Report) -> list[str]:
    """Write files that a job can do without: an error becomes a warning. Return the names of those that are there."""
    written = []
    for name, write in steps.items():
        try:
            write()
        except Exception as error:  # a finished job must not fail because of an image
            log.exception("%s could not be drawn", name)
            report.event("warning", message=f"{name} could not be drawn: {error}")
        else:
            written += [name] if (folder / name).is_file() else []
    return written


def _write_details(data: TaskData, evaluator: Evaluator, last: Mapping[str, Any], path: Path) -> None:
    details = [detail.model_dump(mode="json") for detail in data.details(evaluator)]
    content: dict[str, Any] = {"update": last.get("update"), "epoch": last.get("epoch"), "details": details}
    write_json(path, content)


def _draw_inputs(data: TaskData, path: Path) -> None:
    from mtrain.data.images.drawing import save_image

    for name, _, image in data.views(limit=INPUT_SAMPLES):
        if name == INPUT_VIEW:
            save_image(image, path)
