"""ONNX Runtime in a process of its own: a graph of a stranger may end the process that computes it, as a division by zero does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.spec.bounded_process import BoundedProcess
from mtrain.spec.bounds import memory_limit


class Session:
    """A file in ONNX Runtime; has the part of ``onnxruntime.InferenceSession`` that mtrain needs.

    Every method raises ``bounded_process.Failed`` where the file cannot be computed.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        """Load a file; ``threads``: those that compute one call."""
        worker = f"{_Graph.__module__}:{_Graph.__name__}"
        self._process = BoundedProcess(worker, str(path), threads, limit_bytes=memory_limit())
        self._facts = self._process.call("facts")[0]

    def get_modelmeta(self) -> Any:
        """Return an object with ``custom_metadata_map``."""
        return SimpleNamespace(custom_metadata_map=self._facts["metadata"])

    def get_inputs(self) -> list[Any]:
        """Return the inputs, each with ``name``, ``type`` and ``shape``."""
        return [SimpleNamespace(**each) for each in self._facts["inputs"]]

    def get_outputs(self) -> list[Any]:
        """Return the outputs, each with ``name``, ``type`` and ``shape``."""
        return [SimpleNamespace(**each) for each in self._facts["outputs"]]

    def run(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array | None]:
        """Compute outputs; None for one that is no array of numbers."""
        arrays = {name: np.ascontiguousarray(array) for name, array in feed.items()}
        described = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        payloads = [array.tobytes() for array in arrays.values()]
        found, contents = self._process.call("run", names, described, payloads=payloads, limit_bytes=memory_limit())
        return [
            None if kind is None else np.frombuffer(bytearray(content), kind).reshape(shape)
            for (kind, shape), content in zip(found, contents, strict=True)
        ]


class _Graph:
    """What the process holds."""

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # errors are raised, and worded by the other process
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def facts(self, _: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        def describe(found: Sequence[Any]) -> list[dict[str, Any]]:
            return [{"name": each.name, "type": each.type, "shape": each.shape} for each in found]

        session = self._session
        metadata = dict(session.get_modelmeta().custom_metadata_map)
        return {
            "metadata": metadata,
            "inputs": describe(session.get_inputs()),
            "outputs": describe(session.get_outputs()),
        }, []

    def run(
        self, names: Sequence[str], described: Sequence[Any], payloads: Sequence[bytes]
    ) -> tuple[list[Any], list[bytes]]:
        feed = {
            name: np.frombuffer(content, kind).reshape(shape)
            for (name, kind, shape), content in zip(described, payloads, strict=True)
        }
        values = self._session.run(names, feed)
        arrays = [value if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else None for value in values]
        return (
            [(None, None) if array is None else (array.dtype.str, array.shape) for array in arrays],
            [b"" if array is None else array.tobytes() for array in arrays],
        )
