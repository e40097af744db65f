"""Pictures in, boxes out: what ``mtrain predict`` asks one rank to do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain.assembly import Assembly, assembled, given_weights
from mtrain.core import checkpoint
from mtrain.core.errors import CheckpointError
from mtrain.core.evaluate import outputs
from mtrain.core.interfaces import State
from mtrain.core.report import write_json
from mtrain.core.spec import Spec
from mtrain.data.detection import PictureTask, unannotated
from mtrain.data.evaluation import results_json
from mtrain.data.sample import Annotations

REQUEST = "predict.json"


def predict(spec: Spec, folder: Path, weights: Path | None, *, leave: Callable[[BaseException], None]) -> None:
    """Do what ``predict.json`` of ``folder`` says: ``pictures``, ``out``, ``confidence``, ``draw``, ``class_names``, ``category_ids``.

    Writes ``predictions.json`` (COCO results; each row also has ``file_name``) and, unless ``draw`` is false, each picture with its
    boxes to ``out``. The averaged weights of the checkpoint ``weights`` are used, or the arrays of a file of weights.
    """
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    if weights is None:
        raise CheckpointError("predict: no checkpoint and no weights given; expected --run, --checkpoint or --weights")
    saved = checkpoint.load(weights) if weights.is_dir() else None
    extra: Mapping[str, Any] = {} if saved is None else saved.meta["extra"]
    pictures = unannotated(
        [Path(file) for file in request["pictures"]],
        class_names=extra.get("class_names") or request["class_names"],
        category_ids=extra.get("category_ids") or request["category_ids"],
    )
    task = PictureTask(spec, pictures)
    with assembled(spec, task, leave=leave, details=extra.get("details") or {}) as job:
        job.backend.restore(job.model, job.optimizer, _whole(weights, job) if saved is None else saved.state)
        evaluator, loader = task.evaluator(), job.evaluation_loader()
        with job.optimizer.averaged():
            job.model.eval()
            for output, host in outputs(job.backend, job.model, loader.micro_batches(0)):
                evaluator.add(host, job.plugin.predictions(output, host))
        loader.close()
        found = {
            index: rows[rows[:, 4] >= request["confidence"]] for index, rows in sorted(evaluator.partial().items())
        }
        _write(pictures, found, Path(request["out"]), draw=request["draw"])


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


def _write(pictures: Annotations, found: dict[int, Any], out: Path, *, draw: bool) -> None:
    from mtrain.data.decode import decode
    from mtrain.data.draw import draw_boxes, save_picture

    out.mkdir(parents=True, exist_ok=True)
    names = {sample.image_id: str(sample.path) for sample in pictures.samples}
    rows = [{**row, "file_name": names[row["image_id"]]} for row in results_json(pictures, found)]
    write_json(out / "predictions.json", rows)
    if not draw:
        return
    taken: set[str] = set()
    for index, boxes in found.items():
        sample = pictures.samples[index]
        name = sample.path.stem if sample.path.stem not in taken else f"{sample.path.stem}-{index}"
        taken.add(name)
        drawn = draw_boxes(
            decode(sample.path), boxes[:, :4], boxes[:, 5].astype(int), pictures.class_names, scores=boxes[:, 4]
        )
        save_picture(drawn, out / f"{name}.jpg")
