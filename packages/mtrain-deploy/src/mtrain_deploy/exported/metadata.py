"""The description of an exported model: JSON text under one name in the metadata of the ONNX file."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec.files import parse_json
from mtrain.spec.references import is_reference

KEY = "mtrain"
"""Name of the text among the ONNX file's ``metadata_props``."""
FORMAT = 1
"""Version of the text. A reader refuses a higher one."""
Form: TypeAlias = Literal["raw", "decoded", "nms", "nms-fixed"]
"""What the outputs are: the values of the network's last layers; what evaluation reads (boxes and scores,
probabilities); or the detections that are left after suppression of overlapping ones, as one list or as a list of fixed
length for each image."""
SUPPRESSED = ("nms", "nms-fixed")
"""Forms whose outputs are detections."""
DETECTIONS = "detections"
"""Output of form ``nms``: float32 (K, 7), rows ``[image in batch, x1, y1, x2, y2, score, class]``, best first. Output of form
``nms-fixed``: float32 (B, N, 6), rows ``[x1, y1, x2, y2, score, class]`` of each image, best first, then zeros."""
COUNTS = "counts"
"""Second output of form ``nms-fixed``: int64 (B,), the number of detections of each image."""

_YOLO_TASKS = {("detection", "nms-fixed"): "detect", ("classification", "decoded"): "classify"}
"""Task of ultralytics by kind and form, where it reads the outputs as they are."""
_NOT_FOR_YOLO = "outputs of mtrain that ultralytics would misread; export with --form {form}"

MAX_TEXT = 64 << 20
"""Longest metadata that are read, in characters."""
MAX_NAME = 1000
MAX_AXIS = 1 << 31
MAX_SIDE = 16_384
MAX_INPUT_BYTES = 4 << 30
"""Largest input of a fixed size, in bytes."""
Axis: TypeAlias = Annotated[int, Field(ge=0, le=MAX_AXIS)] | str
"""Size of an axis; a text names an axis of any size: ``batch``, ``height``, ``width``."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Input(_Part):
    """One input of the graph."""

    name: str
    key: str
    """Name of the array in a batch of mtrain's loaders that holds it. The array may have more channels, which are left
    out."""
    dtype: Literal["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool"]
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_AXIS)] | str, ...], Field(min_length=1)]
    """Size of each axis, that of the batch first."""
    layout: str
    """``NHWC``: image, row, column, channel; ``NCHW``: image, channel, row, column; empty: the array is no image. Pixels of
    float32 are those of uint8, divided by 255."""
    colours: str = "RGB"

    @property
    def sides(self) -> tuple[int, ...]:
        """Numbers of the axes of height and width; empty where the array is no image."""
        return {"NHWC": (1, 2), "NCHW": (2, 3)}.get(self.layout, ())

    def as_input(self, array: Array) -> Array:
        """Bring an array of a batch to the layout and type of this input; its sides are not looked at."""
        if self.sides:
            channels = self.shape[1 if self.layout == "NCHW" else -1]
            array = array[..., :channels] if isinstance(channels, int) else array
            array = np.moveaxis(array, -1, 1) if self.layout == "NCHW" else array
            if self.dtype == "float32" and array.dtype == np.uint8:
                array = array / np.float32(255)
        return np.ascontiguousarray(array, dtype=np.dtype(self.dtype))

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        nbytes = math.prod(size for size in self.shape if isinstance(size, int)) * np.dtype(self.dtype).itemsize
        if nbytes > MAX_INPUT_BYTES:
            raise ValueError(f"an input of {nbytes} bytes, more than {MAX_INPUT_BYTES}")
        return self


class Metadata(_Part):
    """Everything an exported model says about itself."""

    format: int = FORMAT
    mtrain: str
    """Version of mtrain that wrote the file."""
    kind: Annotated[str, Field(max_length=MAX_NAME)]
    """Name of the task plugin: ``detection``, ``classification``, ``segmentation``."""
    model: Annotated[str, Field(max_length=MAX_NAME)]
    """Name of the model plugin."""
    options: Mapping[str, Any]
    """All options of the model, defaults included."""
    class_names: tuple[str, ...]
    """In label order; empty: the model is a user's own, whose outputs nobody here can name."""
    category_ids: tuple[int, ...] = ()
    """Their ids in the annotation file; empty: 1, 2, ..."""
    image_size: Annotated[int, Field(ge=0, le=MAX_SIDE)]
    """Side of the square input in pixels; 0: the model has none."""
    details: Mapping[str, Any] = Field(default_factory=dict)
    """Metrics of the training data with which the network was built, such as anchors."""
    inputs: tuple[Input, ...]
    preprocessing: Mapping[str, Any] = Field(default_factory=dict)
    """How an image becomes an input. Scaling and normalisation of pixels are part of the graph."""
    outputs: Mapping[str, tuple[Axis, ...]]
    """Name and shape of each output, as in ``inputs``."""
    form: Form
    suppression: Mapping[str, Any] = Field(default_factory=dict)
    """Settings inside a graph with suppression: ``confidence``, ``iou_threshold``, ``max_detections``."""
    dynamic: tuple[str, ...] = ()
    """Axes of any size: ``batch``, ``size``."""
    size_step: Annotated[int, Field(ge=1, le=MAX_SIDE)] = 1
    """Of an input of any size, both sides are multiples of this."""
    precision: str
    """``fp32``, ``fp16`` or ``int8``."""
    ranges: Mapping[str, tuple[float, float]] = Field(default_factory=dict)
    """Smallest and largest input of each layer that learnt to round to 8 bits (``train.quantise``), by its name."""
    opset: int = 0
    weights: str = ""
    """Name of the checkpoint or file of weights that was exported, without its folder."""
    weights_sha256: str = ""
    """Digest of the exported weights."""
    spec: Mapping[str, Any]
    """The values of the job's spec with which samples are prepared and scored: sections ``model``, ``data`` and
    ``evaluate``, without paths and addresses; see ``mtrain.spec.disclosure``."""

    def yolo_entries(self, *, size_step: int) -> dict[str, str]:
        """Return the entries that programs for YOLO models look for: ``stride``, ``names`` and others, as Python literals.

        They are written for detectors and classifiers that take what such programs give: (B, 3, H, W) from 0 to 1. Where
        ultralytics would take the outputs for those of its own models, ``task`` and ``imgsz`` are a sentence: it ends with it.
        """
        images = self.inputs[0]
        forms = [form for kind, form in _YOLO_TASKS if kind == self.kind]
        if not forms or not self.class_names or (images.layout, images.dtype) != ("NCHW", "float32"):
            return {}
        entries = {"stride": str(size_step or 1), "names": str(dict(enumerate(self.class_names)))}
        task = _YOLO_TASKS.get((self.kind, self.form))
        if task is None:
            return {**entries, **dict.fromkeys(("task", "imgsz"), _NOT_FOR_YOLO.format(form=forms[0]))}
        batch, has_boxes = images.shape[0], self.form == "nms-fixed"
        return {
            **entries,
            "task": task,
            "imgsz": str([self.image_size] * 2),
            "batch": str(batch if isinstance(batch, int) else 1),
            "channels": str(images.shape[1]),
            "end2end": str(has_boxes),
            "args": str({"dynamic": "size" in self.dynamic, "nms": has_boxes}),
        }

    @model_validator(mode="after")
    def _classes_are_usable(self) -> Self:
        if not self.class_names and not is_reference(self.model):
            raise ValueError("class_names are empty")
        if any("\ud800" <= letter <= "\udfff" for name in self.class_names for letter in name):
            raise ValueError("class_names hold text that is not UTF-8")
        if self.category_ids and len(set(self.category_ids)) != len(self.class_names):
            raise ValueError(
                f"{len(set(self.category_ids))} different ids of categories for {len(self.class_names)} classes"
            )
        return self

    def text(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json()

    def labels(self) -> dict[str, Any]:
        """Return the facts about the classes that a task needs to predict; see ``TaskKind.images``."""
        ids = {"category_ids": list(self.category_ids)} if self.category_ids else {}
        return {"class_names": list(self.class_names), **ids}


def parse(texts: Mapping[str, str], *, name: str) -> Metadata:
    """Return the metadata of an exported model.

    Args:
        texts: All metadata of the ONNX file.
        name: Name of the file for messages.

    Raises:
        CheckpointError: mtrain did not write the file, or a newer version did, or the text is damaged.
    """
    if KEY not in texts:
        raise CheckpointError(
            f"{name}: an ONNX file without mtrain's metadata; expected one that `mtrain export --format onnx` wrote"
        )
    try:
        if len(texts[KEY]) > MAX_TEXT:
            raise ValueError(f"{len(texts[KEY])} characters, more than {MAX_TEXT}")
        values = parse_json(texts[KEY])
        version = values.get("format") if isinstance(values, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{name}: its metadata has version {version}, this mtrain reads up to {FORMAT}; use a newer mtrain"
            )
        return Metadata.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{name}: its metadata is damaged ({where}: {first['msg']}); export the model again"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{name}: its metadata is damaged ({error}); export the model again") from None
