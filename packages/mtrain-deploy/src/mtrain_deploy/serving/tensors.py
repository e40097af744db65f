"""Requests and answers of the open inference protocol, version 2: tensors as JSON, or as bytes that follow the JSON.

The protocol is that of KServe and of Triton: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol,
with Triton's extension for binary tensors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.spec.files import parse_json
from mtrain_deploy.serving.refusal import Refusal

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON text, where bytes of tensors follow it."""
VERSION = "1"
"""Version of the one model."""
_TYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_MOST_AXES = 8
_MOST_TEXT = 100


@dataclass(frozen=True, slots=True)
class TensorType:
    """An input or an output of a model."""

    name: str
    dtype: str
    """Name of numpy."""
    shape: tuple[int, ...]
    """-1: any size."""
    sides: tuple[int, ...] = ()
    """Numbers of the axes of height and width of images."""
    step: int = 1
    """Both sides are multiples of this."""

    def as_json(self) -> dict[str, Any]:
        """Return the description of the protocol."""
        return {"name": self.name, "datatype": _TYPES[self.dtype], "shape": list(self.shape)}

    def as_triton(self) -> dict[str, Any]:
        """Return the description of Triton's configuration of a model."""
        return {"name": self.name, "data_type": f"TYPE_{_TYPES[self.dtype]}", "dims": list(self.shape)}


@dataclass(frozen=True, slots=True, eq=False)
class Inference:
    """What a request asks for."""

    arrays: Mapping[str, Array]
    outputs: Mapping[str, bool]
    """Names of the outputs that are returned; whether as bytes."""
    id: str = ""


@dataclass(slots=True)
class _Bytes:
    """The bytes behind the JSON text, given out in order."""

    content: bytes
    position: int = field(default=0)

    def take(self, size: int, name: str) -> bytes:
        end = self.position + size
        if size < 0 or end > len(self.content):
            raise Refusal(400, f"{name}: announces {size} bytes, more than the request holds; send them all")
        piece = self.content[self.position : end]
        self.position = end
        return piece


def inference(
    content: bytes, header_length: str | None, *, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> Inference:
    """Read a request.

    Args:
        content: The body.
        header_length: Value of ``HEADER_LENGTH``; None: the body is JSON alone.
        inputs: The inputs of the model, all of which are needed.
        outputs: Its outputs.

    Raises:
        Refusal: The request is malformed, or its tensors are not those of the model.
    """
    length = len(content)
    if header_length is not None:
        # Python converts numbers of thousands of digits slowly, so long ones are refused unread.
        length = int(header_length) if header_length.isdecimal() and len(header_length) < 20 else -1
        if not 0 <= length <= len(content):
            raise Refusal(
                400, f"{HEADER_LENGTH}: given {header_length[:20]!r}; expected the length of the JSON text in bytes"
            )
    try:
        request = parse_json(content[:length])
    except ValueError as error:
        raise Refusal(
            400, f"the request is no JSON ({str(error)[:_MOST_TEXT]}); send the open inference protocol, version 2"
        ) from None
    given = _rows(request, "inputs")
    rest = _Bytes(content[length:])
    arrays: dict[str, Array] = {}
    expected = {each.name: each for each in inputs}
    for row in given:
        name = str(row.get("name"))[:_MOST_TEXT]
        if name not in expected or name in arrays:
            raise Refusal(400, f"inputs: {name!r} is unknown or given twice; expected {', '.join(expected)}")
        arrays[name] = _array(row, expected[name], rest)
    if missing := [name for name in expected if name not in arrays]:
        raise Refusal(400, f"inputs: {missing[0]} is missing; expected {', '.join(expected)}")
    if rest.position != len(rest.content):
        raise Refusal(
            400, f"{len(rest.content) - rest.position} bytes belong to no input; send only what binary_data_size says"
        )
    return Inference(arrays, _read_wanted(request, outputs), str(request.get("id") or "")[:_MOST_TEXT])


def size_of(asked: Inference, inputs: Sequence[TensorType]) -> tuple[int, int]:
    """Return the number of samples, and the pixels of each; 0 pixels where the inputs are no images.

    Raises:
        Refusal: The inputs have different numbers of samples.
    """
    counts = {given.name: len(asked.arrays[given.name]) for given in inputs}
    if len(set(counts.values())) > 1:
        raise Refusal(400, f"inputs: have different numbers of samples: {counts}; expected one number")
    pixels = [
        math.prod(asked.arrays[given.name].shape[axis] for axis in given.sides) for given in inputs if given.sides
    ]
    return next(iter(counts.values())), max(pixels, default=0)


def answer(inferred: Mapping[str, Array], asked: Inference, *, name: str, version: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer.

    Raises:
        Refusal: A value is not finite, which JSON cannot say.
    """
    rows: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    for output, binary in asked.outputs.items():
        array = np.ascontiguousarray(inferred[output])
        row: dict[str, Any] = {"name": output, "datatype": _TYPES[array.dtype.name], "shape": list(array.shape)}
        if binary:
            pieces.append(array.tobytes())
            row["parameters"] = {"binary_data_size": len(pieces[-1])}
        elif not np.isfinite(array).all():
            raise Refusal(422, f"{output}: has values that are not finite, which JSON cannot say; ask for binary data")
        else:
            row["data"] = array.ravel().tolist()
        rows.append(row)
    # Clients match answers by an id, if they sent one.
    known = {"id": asked.id} if asked.id else {}
    text = json.dumps({"model_name": name, "model_version": version, **known, "outputs": rows}).encode()
    if not pieces:
        return text, {"Content-Type": "application/json"}
    return b"".join([text, *pieces]), {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}


def _rows(request: Any, key: str) -> list[dict[str, Any]]:
    rows = request.get(key) if isinstance(request, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Refusal(400, f"{key}: expected a list of objects, each with name, shape, datatype and data")
    return rows


def _parameters(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("parameters")
    return found if isinstance(found, dict) else {}


def _array(row: Mapping[str, Any], expected: TensorType, rest: _Bytes) -> Array:
    shape = row.get("shape")
    if (
        not isinstance(shape, list)
        or not all(type(size) is int and size >= 0 for size in shape)
        or len(shape) > _MOST_AXES
    ):
        raise Refusal(400, f"{expected.name}: shape: expected a list of sizes")
    fits = len(shape) == len(expected.shape) and all(
        wanted in (-1, size) for size, wanted in zip(shape, expected.shape, strict=True)
    )
    kind = _TYPES[expected.dtype]
    if not fits or row.get("datatype") != kind:
        raise Refusal(
            400,
            f"{expected.name}: given {str(row.get('datatype'))[:20]} {shape}; expected {kind} {list(expected.shape)}, where -1 is any size",
        )
    if any(shape[axis] % expected.step or not shape[axis] for axis in expected.sides):
        raise Refusal(400, f"{expected.name}: given {shape}; expected sides that are multiples of {expected.step}")
    dtype, size = np.dtype(expected.dtype), _parameters(row).get("binary_data_size")
    if size is None:
        return _from_json(row.get("data"), shape, expected)
    if type(size) is not int or size != math.prod(shape) * dtype.itemsize:
        raise Refusal(
            400,
            f"{expected.name}: binary_data_size: given {str(size)[:20]}; {kind} {shape} has {math.prod(shape) * dtype.itemsize}",
        )
    # The protocol says little endian, whatever the machine has.
    return np.frombuffer(rest.take(size, expected.name), dtype.newbyteorder("<")).reshape(shape)


def _from_json(data: Any, shape: list[int], expected: TensorType) -> Array:
    """Return an array whose values are a list, nested or not."""
    problem = f"{expected.name}: data: expected {math.prod(shape)} numbers of {_TYPES[expected.dtype]}, flat or nested"
    try:
        array = np.asarray(data)
        if array.size != math.prod(shape) or array.dtype.kind not in ("biuf" if array.size else "biufO"):
            raise Refusal(400, problem)
        dtype = np.dtype(expected.dtype)
        # numpy would wrap a number that is too large, and cut the digits of 1.5.
        if dtype.kind in "iu" and array.size:
            limits = np.iinfo(dtype)
            if array.dtype.kind == "f" or array.min() < limits.min or array.max() > limits.max:
                raise Refusal(400, problem)
        if dtype.kind == "b" and not np.isin(array, (0, 1)).all():
            raise Refusal(400, problem)
        with np.errstate(over="ignore"):
            found = array.reshape(shape).astype(dtype)
        if not np.isfinite(found).all():  # 1e400, which JSON can say and no type holds, or 1e300 of float32
            raise Refusal(400, problem)
        return found
    except (ValueError, TypeError, OverflowError):
        raise Refusal(400, problem) from None


def _read_wanted(request: Mapping[str, Any], outputs: Sequence[TensorType]) -> dict[str, bool]:
    known = [each.name for each in outputs]
    as_bytes = _parameters(request).get("binary_data_output") is True
    if not request.get("outputs"):
        return dict.fromkeys(known, as_bytes)
    wanted = {}
    for row in _rows(request, "outputs"):
        name = str(row.get("name"))[:_MOST_TEXT]
        if name not in known:
            raise Refusal(400, f"outputs: {name!r} is unknown; expected {', '.join(known)}")
        wanted[name] = _parameters(row).get("binary_data", as_bytes) is True
    return wanted
