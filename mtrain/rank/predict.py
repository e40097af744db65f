"""Pictures in, predictions out: what ``mtrain predict`` asks one rank to do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.evaluate import outputs
from mtrain.core.interfaces import State
from mtrain.errors import CheckpointError, DataError
from mtrain.rank.assembly import Assembly, assembled, given_weights, model_plugin, task_kind
from mtrain.report.reporter import write_json
from mtrain.spec.model import Spec

REQUEST = "predict.json"
SKIPPED = "skipped.json"
"""In the folder of results, where pictures were skipped: ``file_name`` and ``reason`` of each."""


def predict(spec: Spec, folder: Path, weights: Path | None, *, leave: Callable[[BaseException], None]) -> None:
    """Do what ``predict.json`` of ``folder`` says: ``pictures`` (path -> its name in the list of predictions), ``out``,
    ``confidence``, ``draw``, ``class_names``, ``strict`` (a picture that cannot be read is an error and is not skipped).

    Writes to ``out`` what ``PictureData.write`` of the model's kind of task says, and
    ``skipped.json``. The averaged weights of the checkpoint ``weights`` are used, or the arrays of a file of weights.

    Raises:
        DataError: no picture can be read, or with ``strict`` one cannot.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    if weights is None:
        raise CheckpointError("predict: no checkpoint and no weights given; expected --run, --checkpoint or --weights")
    saved = store.load(weights) if weights.is_dir() else None
    extra: Mapping[str, Any] = {} if saved is None else saved.meta["extra"]
    names = {Path(file): str(name) for file, name in request["pictures"].items()}
    if not request["strict"]:
        names = _readable(names, Path(request["out"]), max_pixels=spec.data.max_pixels)
    labels = extra if extra.get("class_names") else {"class_names": request["class_names"]}
    pictures = task_kind(model_plugin(spec).kind).pictures(spec, list(names), labels)
    with assembled(spec, pictures, leave=leave, details=extra.get("details") or {}) as job:
        job.backend.restore(job.model, job.optimizer, _whole(weights, job) if saved is None else saved.state)
        evaluator, loader = pictures.evaluator(), job.evaluation_loader()
        with job.optimizer.averaged():
            job.model.eval()
            for output, host in outputs(job.backend, job.model, loader.micro_batches(0)):
                evaluator.add(host, job.plugin.predictions(output, host))
        loader.close()
        pictures.write(
            evaluator.partial(),
            Path(request["out"]),
            confidence=request["confidence"],
            draw=request["draw"],
            names=names,
        )


def _readable(names: Mapping[Path, str], out: Path, *, max_pixels: int) -> dict[Path, str]:
    """``names`` without the pictures that cannot be decoded; those are listed in ``skipped.json``.

    Raises:
        DataError: none can.
    """
    from mtrain.data.images.readable import unreadable
    from mtrain.data.reading import listed

    reasons = unreadable(list(names), max_pixels=max_pixels)
    if len(reasons) == len(names):
        problems = listed([f"{names[file]}: {reason}" for file, reason in reasons.items()])
        raise DataError(f"predict: none of {len(names)} pictures can be read:\n{problems}")
    if reasons:
        write_json(out / SKIPPED, [{"file_name": names[file], "reason": reason} for file, reason in reasons.items()])
    return {file: name for file, name in names.items() if file not in reasons}


def _whole(path: Path, job: Assembly) -> State:
    """A plain file of weights for every entry of the model; it may lack counters, which inference does not read.

    Raises:
        CheckpointError: it lacks more, or has another shape of it.
    """
    held = job.backend.state(job.model, job.optimizer).weights
    found = given_weights(path, held, job.plugin)
    if found.left:
        raise CheckpointError(
            f"--weights {found.summary()}: {'; '.join(found.warnings())}; give weights of this model and these classes"
        )
    return State(weights={**held, **found.taken})
