"""Predict on images: the job that ``mtrain predict`` gives to one rank."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.evaluate import narrowing, outputs
from mtrain.core.interfaces import State
from mtrain.core.record_files import write_json
from mtrain.errors import CheckpointError, DataError
from mtrain.rank.spec.assembly import Assembly, assemble, given_weights, make_augmented
from mtrain.spec.resolved import Resolved

REQUEST = "predict.json"
SKIPPED = "skipped.json"
"""File in the folder of results that lists skipped images: ``file_name`` and ``reason`` of each."""


def predict(resolved: Resolved, folder: Path, weights: Path | None, *, leave: Callable[[BaseException], None]) -> None:
    """Predict on the images that ``predict.json`` in ``folder`` lists, and write the predictions.

    The request has the keys ``images`` (maps a path to its name in the list of predictions), ``out``, ``confidence``,
    ``draw``, ``class_names`` and ``strict`` (an image that cannot be read is an error instead of being skipped). The
    files in ``out`` are those of the task's ``ImageData.write``, and ``skipped.json``.

    Args:
        resolved: The spec and its plugins.
        folder: Folder with the request.
        weights: A checkpoint, whose averaged weights are used, or a file of weights.
        leave: Records an error, see ``process.Leaving``.

    Raises:
        CheckpointError: No weights were given, or they do not fit.
        DataError: No image can be read, or with ``strict`` at least one cannot.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    if weights is None:
        raise CheckpointError("predict: no checkpoint and no weights given; expected --run, --checkpoint or --weights")
    saved = store.load(weights) if weights.is_dir() else None
    extra: Mapping[str, Any] = {} if saved is None else saved.meta["extra"]
    spec, task = resolved.spec, resolved.task_named(resolved.model_class.kind)
    names = {Path(file): str(name) for file, name in request["images"].items()}
    if not request["strict"]:
        names = readable(names, task.unreadable(spec, list(names)), Path(request["out"]))
    labels = extra if extra.get("class_names") else {"class_names": request["class_names"]}
    images = task.images(spec, list(names), labels)
    with assemble(resolved, images, leave=leave, details=extra.get("details") or {}) as job:
        job.session.restore(job.model, job.optimizer, _whole(weights, job) if saved is None else saved.state)
        evaluator, loader = images.evaluator(), job.evaluation_loader()
        # Not through `Assembly.evaluate`: there is no truth to score against, and one rank has all images.
        with job.optimizer.averaged():
            job.model.eval()
            for output, host in outputs(
                job.session,
                job.model,
                loader.micro_batches(0),
                augmented=make_augmented(job.resolved),
                narrow=narrowing(job.session, job.plugin.narrowed),
            ):
                evaluator.add(host, job.plugin.predictions(output, host))
        loader.close()
        images.write(
            evaluator.partial(),
            Path(request["out"]),
            confidence=request["confidence"],
            draw=request["draw"],
            names=names,
        )


def readable(names: Mapping[Path, str], reasons: Mapping[Path, str], out: Path) -> dict[Path, str]:
    """Return ``names`` without the files that have a reason why they cannot be read; ``skipped.json`` lists those.

    Raises:
        DataError: No file can be read.
    """
    from mtrain.data.reading import listed

    if len(reasons) == len(names):
        problems = listed([f"{names[file]}: {reason}" for file, reason in reasons.items()])
        raise DataError(f"predict: none of {len(names)} images can be read:\n{problems}")
    if reasons:
        write_json(out / SKIPPED, [{"file_name": names[file], "reason": reason} for file, reason in reasons.items()])
    return {file: name for file, name in names.items() if file not in reasons}


def _whole(path: Path, job: Assembly) -> State:
    """Read a plain file of weights. Only counters may be missing, because inference ignores them.

    Raises:
        CheckpointError: Another entry is missing or has another shape.
    """
    state = job.session.state(job.model, job.optimizer).weights
    result = given_weights(path, state, job.plugin)
    if result.left_over:
        raise CheckpointError(
            f"--weights {result.summary()}: {'; '.join(result.warnings())}; give weights of this model and these classes"
        )
    return State(weights={**state, **result.matched})
