"""An exported model that is open: ONNX Runtime computes its outputs, its model plugin reads predictions from them."""

import json
import os
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Array, HostBatch, Model
from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs.exported import carried_spec
from mtrain.spec import config, references, remedies
from mtrain.spec.bounded_process import Failed
from mtrain.spec.registry import Registry
from mtrain.system.placement import usable_cores
from mtrain_deploy.exported.graph_check import check_graph
from mtrain_deploy.exported.metadata import COUNTS, DETECTIONS, Input, Metadata, parse
from mtrain_deploy.exported.session import Session
from mtrain_deploy.exported.values import check_outputs, check_predictions

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

# One ONNX file holds at most 2 GiB.
MAX_BYTES = 4 << 30
"""Largest file that is opened."""


class ExportedModel:
    """An ONNX file that ``mtrain export`` wrote, ready to compute. No framework is imported."""

    def __init__(self, path: Path, session: Session, metadata: Metadata) -> None:
        self.path = path
        self.session = session
        self.metadata = metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, threads: int | None = None) -> "ExportedModel":
        """Open an exported model on the CPU.

        Args:
            path: The ONNX file.
            threads: Threads that compute one call; None: one for each usable core.

        Raises:
            CheckpointError: The file is missing, is no ONNX file, is damaged, or mtrain did not write it.
            UsageError: ONNX Runtime is not installed.
        """
        file = Path(path)
        session = _session(file, threads=usable_cores() if threads is None else threads)
        metadata = parse(session.get_modelmeta().custom_metadata_map, name=str(file))
        _check_inputs(file, session, metadata)
        return cls(file, session, metadata)

    @cached_property
    def plugin(self) -> Model:
        """The model plugin, which reads predictions from outputs, with the options of the file."""
        return plugin_of(self.metadata)

    def spec(self) -> "Spec":
        """Return the spec in the file: see ``carried_spec``.

        Raises:
            CheckpointError: see ``carried_spec``.
            SpecError: This mtrain cannot read it.
        """
        values = carried_spec(self.metadata.spec, name=str(self.path))
        return config.from_json(json.dumps(values), name=f"{self.path}: spec")

    def with_options(self, options: Mapping[str, Any]) -> "ExportedModel":
        """Return the model with other options of its plugin, of which those that the plugin lacks are left out."""
        known = {name: value for name, value in options.items() if name in self.metadata.options}
        metadata = self.metadata.model_copy(update={"options": {**self.metadata.options, **known}})
        return ExportedModel(self.path, self.session, metadata)

    def outputs(self, batch: HostBatch) -> dict[str, Array]:
        """Compute the outputs of one batch.

        Args:
            batch: Arrays by their names in mtrain's loaders (``metadata.inputs[i].key``); others are not read.

        Returns:
            The outputs by name. A batch of another size than a file with a fixed one is computed in parts.

        Raises:
            UsageError: An array is missing or has a shape that the file does not take.
        """
        return self.compute({given.name: _fitting(batch, given, self.metadata) for given in self.metadata.inputs})

    def compute(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the outputs for arrays as the graph takes them, by the names of its inputs; see ``outputs``."""
        fixed = self.metadata.inputs[0].shape[0]
        count = len(next(iter(feed.values())))
        # A text is the name of an axis of any size.
        if isinstance(fixed, str) or fixed == count:
            return self._run(feed)
        parts = [self._part(feed, start, fixed, count) for start in range(0, count, fixed)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def predictions(self, batch: HostBatch) -> list[Any]:
        """Return the prediction for each sample of a batch; its form is that of ``Model.predictions`` of the task.

        Raises:
            UsageError: As for ``outputs``; or the file has raw outputs.
        """
        check_predicts(self.metadata, name=str(self.path))
        return self.read(self.outputs(batch), batch)

    def read(self, output: Mapping[str, Array], batch: HostBatch, plugin: Model | None = None) -> list[Any]:
        """Read predictions from the outputs of a batch. ``plugin``: the model plugin with other options.

        Raises:
            CheckpointError: The outputs are not those of this model with these classes.
        """
        predictions: list[Any]
        if self.metadata.form == "nms":
            rows_K7 = output[DETECTIONS]
            count = len(batch[self.metadata.inputs[0].key])
            predictions = [rows_K7[rows_K7[:, 0] == number, 1:] for number in range(count)]
        elif self.metadata.form == "nms-fixed":
            predictions = [rows_N6[:count] for rows_N6, count in zip(output[DETECTIONS], output[COUNTS], strict=True)]
        else:
            try:
                predictions = (plugin or self.plugin).predictions(output, batch)
            except UsageError:
                raise
            except Exception as error:  # a plugin relies on the outputs of its own network
                raise CheckpointError(
                    f"{self.path}: its outputs are not those of {self.metadata.model} "
                    f"({type(error).__name__}: {_reason(error)}); export the model again"
                ) from error
        check_predictions(predictions, self.metadata, name=str(self.path))
        return predictions

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        names = [output.name for output in self.session.get_outputs()]
        try:
            values = self.session.run(names, feed)
        except Failed as error:
            raise CheckpointError(
                f"{self.path}: cannot be computed ({_reason(error)}); export the model again"
            ) from None
        outputs = dict(zip(names, values, strict=True))
        check_outputs(outputs, self.metadata, count=len(next(iter(feed.values()))), name=str(self.path))
        return outputs

    def _part(self, feed: Mapping[str, Array], start: int, size: int, count: int) -> dict[str, Array]:
        """Compute the samples from ``start`` in a batch of the file's fixed size; the last sample fills it up."""
        # The graph takes whole batches alone; what the repeated last sample gives is cut off.
        places = np.minimum(np.arange(start, start + size), count - 1)
        kept = min(size, count - start)
        output = self._run({name: array[places] for name, array in feed.items()})
        if self.metadata.form != "nms":
            return {name: array[:kept] for name, array in output.items()}
        rows_K7 = output[DETECTIONS][output[DETECTIONS][:, 0] < kept]
        rows_K7[:, 0] += start
        return {DETECTIONS: rows_K7}


def check_predicts(metadata: Metadata, *, name: str) -> None:
    """Check that predictions can be read from the outputs.

    Raises:
        UsageError: They are raw.
    """
    if metadata.form == "raw":
        raise UsageError(
            f"{name}: has raw outputs, from which no predictions can be read; export it with --form decoded"
        )


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Return what an exported model says about itself; no thread outlives the call.

    Raises:
        CheckpointError, UsageError: see ``ExportedModel.open``.
    """
    return ExportedModel.open(path, threads=1).metadata


def plugin_of(metadata: Metadata) -> Model:
    """Return the model plugin of an exported model, with the options of the file.

    Raises:
        UsageError: It is a user's own model, of which only the outputs can be computed.
        PluginError: There is no such plugin here.
        SpecError: It does not take these options.
    """
    name = metadata.model
    if references.is_reference(name):
        raise UsageError(
            f"model {name}: the file is of a model of a user's own, whose code is not run from a file; only its "
            "outputs can be computed"
        )
    plugin: Model = Registry.read().make("models", name, metadata.options, path="model.options")
    return plugin


def _session(path: Path, *, threads: int) -> Session:
    """Load a file into ONNX Runtime, in a process of its own.

    Raises:
        CheckpointError: It cannot be loaded.
        UsageError: ONNX Runtime is not installed.
    """
    _check_file(path)
    check_graph(path)
    remedies.require(["onnxruntime"], what=str(path), extra="mtrain-deploy")
    try:
        return Session(path, threads=threads)
    except Failed as error:
        if error.kind == "UnicodeDecodeError":
            raise CheckpointError(
                f"{path}: holds text that is not UTF-8; it is damaged, export the model again"
            ) from None
        raise CheckpointError(
            f"{path}: cannot be loaded as an ONNX file; it is damaged or of another kind ({_reason(error)})"
        ) from None


def _reason(error: Exception) -> str:
    """Return the words of an error on one line. Where memory lacks, the library only names its own functions."""
    words = " ".join(str(error).split())
    lacks_memory = any(name in words.lower() for name in ("bad_alloc", "arena", "allocate", "takes more than"))
    return "not enough memory" if lacks_memory else words[:200]


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: {reason}; give a file that `mtrain export --format onnx` wrote") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a file; give one that `mtrain export --format onnx` wrote")
    if status.st_size > MAX_BYTES:
        raise CheckpointError(f"{path}: {status.st_size} bytes; an ONNX file of mtrain has at most {MAX_BYTES}")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path}: cannot be read: permission denied")


def _check_inputs(path: Path, session: Session, metadata: Metadata) -> None:
    """Check that metadata and graph belong together.

    Raises:
        CheckpointError: They do not.
    """
    found = [given.name for given in session.get_inputs()]
    named = [given.name for given in metadata.inputs]
    if not named or found != named or {o.name for o in session.get_outputs()} != set(metadata.outputs):
        raise CheckpointError(
            f"{path}: its graph has the inputs {', '.join(found)}, its metadata names {', '.join(named) or 'none'}, or the "
            "outputs differ; export the model again"
        )


def _fitting(batch: HostBatch, given: Input, metadata: Metadata) -> Array:
    """Return the array of a batch that an input takes.

    Raises:
        UsageError: It is missing, or its shape does not fit.
    """
    if given.key not in batch:
        raise UsageError(f"the batch has no array {given.key!r}; the exported model needs it as {given.name}")
    array = np.asarray(batch[given.key])
    expected = ", ".join(map(str, given.shape))
    problem = f"{given.key}: an array of shape {array.shape}; the exported model takes ({expected})"
    if array.ndim != len(given.shape):
        raise UsageError(problem)
    array = given.as_input(array)
    for axis, size in enumerate(given.shape[1:], start=1):
        if isinstance(size, int) and array.shape[axis] != size:
            raise UsageError(problem)
        if isinstance(size, str) and axis in given.sides and array.shape[axis] % metadata.size_step:
            raise UsageError(f"{problem}, with sides that are multiples of {metadata.size_step}")
    return array
