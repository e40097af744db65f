"""Evaluation and prediction with an exported model: from a loaded spec to a result, in this process and without ranks."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs import start
from mtrain.records.console import make_display
from mtrain.spec.references import is_reference
from mtrain.system import plugin_packages, runfolder
from mtrain_deploy.exported.model import is_exported, read_metadata, spec_values, spec_with

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source
    from mtrain_deploy.exported.metadata import Metadata

__all__ = ["config_of", "evaluate", "is_exported", "predict"]


def config_of(config: "Source", weights: str | None) -> "Source":
    """Return the spec to read: ``config``; without one, that in the file ``weights``: an exported model, or safetensors.

    Raises:
        CheckpointError: The file cannot be used.
    """
    if config is not None:
        return config
    if not is_exported(weights):
        return spec_with(weights)
    return spec_values(read_metadata(str(weights)), name=str(weights))


def evaluate(loaded: "Loaded", *, quiet: bool) -> tuple[Path, Mapping[str, Any]]:
    """Score the exported model that ``model.weights`` names, in a run folder of its own.

    Returns:
        The run folder, and the content of its ``summary.json``.

    Raises:
        UsageError: The data do not fit the model, or a file cannot be used.
    """
    from mtrain_deploy.exported import evaluation

    spec, path = loaded.spec, Path(str(loaded.spec.model.weights))
    metadata = _with_model_of(loaded, path)
    data = evaluation.opened(loaded.job, path, metadata)
    name = start.evaluation_name(loaded, spec.report.name or path.stem)
    folder = runfolder.create(Path(spec.report.dir), name, latest=False)
    display = make_display(
        "quiet" if quiet else spec.report.display, title=f"{folder.name}: {metadata.model} in ONNX Runtime"
    )
    try:
        for note in (*loaded.notes, f"evaluates {path}", f"run folder: {folder}"):
            display.note(note)
        start.write_spec(loaded, folder)
        summary = evaluation.evaluate(
            loaded.job, path, data, options=metadata.options, folder=folder, more=[("display", display)]
        )
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)  # nothing was evaluated
        raise
    finally:
        display.close()
    return folder, summary


def predict(loaded: "Loaded", path: Path, *, files: Mapping[Path, str], out: Path, request: Any) -> None:
    """Predict on ``files`` (with their names in the results) into ``out``; ``request``: see ``api.prediction.PredictRequest``.

    Raises:
        UsageError: The spec does not fit the model, or no image can be read.
    """
    from mtrain_deploy.exported import prediction

    if request.device == "cuda":
        raise UsageError(f"--device cuda: {path} runs on the CPU; leave the flag out")
    prediction.predict(
        loaded.job,
        path,
        _with_model_of(loaded, path),
        names=files,
        out=out,
        confidence=request.confidence,
        draw=request.draw,
        strict=request.strict,
    )


def _with_model_of(loaded: "Loaded", path: Path) -> "Metadata":
    """Return the metadata of a file, with the options of its model that were typed.

    Raises:
        CheckpointError: The file cannot be used, or is of another model than the spec.
    """
    plugin_packages.check(loaded.job)
    metadata = read_metadata(path)
    name = loaded.spec.model.name
    if is_reference(metadata.model) or is_reference(name):
        raise CheckpointError(
            f"{path}: is of {metadata.model}, a model of a user's own, of which mtrain computes the outputs alone "
            "(mtrain_deploy.exported.ExportedModel); score its run with `mtrain evaluate -c SPEC --run RUN`"
        )
    if name != metadata.model:
        raise CheckpointError(
            f"{path}: is of {metadata.model}, but the spec has model.name: {name}; change one of them"
        )
    typed = {
        key: value
        for key, value in loaded.spec.model.options.items()
        if loaded.origin(f"model.options.{key}").kind in ("flag", "override") and key in metadata.options
    }
    return metadata.model_copy(update={"options": {**metadata.options, **typed}})
