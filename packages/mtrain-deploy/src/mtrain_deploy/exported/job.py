"""Evaluation and prediction with an exported model: from a loaded spec to a result, in this process and without ranks."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces.exported import ExportedFiles
from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs.exported import carried_spec
from mtrain.jobs.place import evaluation_name
from mtrain.jobs.run.request_files import write_spec
from mtrain.records.console import make_display
from mtrain.spec.references import is_reference
from mtrain.system import plugin_packages, runfolder
from mtrain_deploy.exported.model import read_metadata

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded
    from mtrain_deploy.exported.metadata import Metadata


class OnnxFiles(ExportedFiles):
    """ONNX files that ``mtrain export`` has written, computed by ONNX Runtime on the CPU."""

    def spec_values(self, path: Path) -> dict[str, Any]:
        """Return the spec in the metadata of a file."""
        return carried_spec(read_metadata(path).spec, name=str(path))

    def evaluate(self, loaded: "Loaded", path: Path, *, quiet: bool) -> tuple[Path, Mapping[str, Any]]:
        """Score a file on the evaluation split, in a run folder of its own."""
        from mtrain_deploy.exported import evaluation

        spec = loaded.spec
        metadata = _with_model_of(loaded, path)
        data = evaluation.open_data(loaded.job, path, metadata)
        name = evaluation_name(loaded, spec.report.name or path.stem)
        folder = runfolder.create(Path(spec.report.dir), name, latest=False)
        display = make_display(
            "quiet" if quiet else spec.report.display, title=f"{folder.name}: {metadata.model} in ONNX Runtime"
        )
        try:
            for note in (*loaded.notes, f"evaluates {path}", f"run folder: {folder}"):
                display.note(note)
            write_spec(loaded, folder)
            summary = evaluation.evaluate(
                loaded.job, path, data, options=metadata.options, folder=folder, more=[("display", display)]
            )
        except UsageError:
            shutil.rmtree(folder, ignore_errors=True)  # nothing was evaluated
            raise
        finally:
            display.close()
        return folder, summary

    def predict(self, loaded: "Loaded", path: Path, *, files: Mapping[Path, str], out: Path, request: Any) -> None:
        """Predict on images into ``out``, with a file that has the model of the spec."""
        from mtrain_deploy.exported import prediction

        if request.device == "cuda":
            raise UsageError(f"--device cuda: {path} runs on the CPU; leave the flag out")
        metadata = _with_model_of(loaded, path)
        prediction.predict(loaded.job, path, metadata, names=files, out=out, request=request)


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
