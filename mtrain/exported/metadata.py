"""The description of an exported model: JSON text under one name in the metadata of the ONNX file."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.errors import CheckpointError
from mtrain.files import parse_json

KEY = "mtrain"
"""Name of the text among the ONNX file's ``metadata_props``."""
FORMAT = 1
"""Version of the text. A reader refuses a higher one."""
Form: TypeAlias = Literal["raw", "decoded", "nms"]
"""What the outputs are: the values of the network's last layers; what evaluation reads (boxes and scores,
probabilities); or the detections that are left after suppression of overlapping ones."""
DETECTIONS = "detections"
"""Output of form ``nms``: float32 (K, 7), rows ``[picture in batch, x1, y1, x2, y2, score, class]``, best first."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Input(_Part):
    """One input of the graph."""

    name: str
    key: str
    """Name of the array in a batch of mtrain's loaders that holds it. The array may have more channels, which are left
    out."""
    dtype: str
    shape: tuple[int | str, ...]
    """Size of each axis; a text names an axis of any size: ``batch``, ``height``, ``width``."""
    layout: str
    """``NHWC``: picture, row, column, channel."""
    colours: str = "RGB"


class Metadata(_Part):
    """Everything an exported model says about itself."""

    format: int = FORMAT
    mtrain: str
    """Version of mtrain that wrote the file."""
    kind: str
    """Name of the task plugin: ``detection``, ``classification``, ``segmentation``."""
    model: str
    """Name of the model plugin."""
    options: Mapping[str, Any]
    """All options of the model, defaults included."""
    class_names: tuple[str, ...]
    """In label order."""
    category_ids: tuple[int, ...] = ()
    """Their ids in the annotation file; empty: 1, 2, ..."""
    image_size: int
    """Side of the square input in pixels; 0: the model has none."""
    details: Mapping[str, Any] = Field(default_factory=dict)
    """Figures of the training data with which the network was built, such as anchors."""
    inputs: tuple[Input, ...]
    preprocessing: Mapping[str, Any] = Field(default_factory=dict)
    """How a picture becomes an input. Scaling and normalisation of pixels are part of the graph."""
    outputs: Mapping[str, tuple[int | str, ...]]
    """Name and shape of each output, as in ``inputs``."""
    form: Form
    suppression: Mapping[str, Any] = Field(default_factory=dict)
    """Settings inside the graph of form ``nms``: ``confidence``, ``iou_threshold``, ``max_detections``."""
    dynamic: tuple[str, ...] = ()
    """Axes of any size: ``batch``, ``size``."""
    size_step: int = 1
    """Of an input of any size, both sides are multiples of this."""
    precision: str
    """``fp32``, ``fp16`` or ``int8``."""
    ranges: Mapping[str, tuple[float, float]] = Field(default_factory=dict)
    """Smallest and largest input of each layer that learnt to round to 8 bits (``train.quantise``), by its name."""
    opset: int = 0
    weights: str = ""
    """The checkpoint or file of weights that was exported, in words."""
    weights_sha256: str = ""
    """Digest of the exported weights."""
    spec: Mapping[str, Any]
    """The resolved spec of the job that trained them, without the path of its ``plugins.toml``."""

    def text(self) -> str:
        """Return the JSON text."""
        return self.model_dump_json()

    def labels(self) -> dict[str, Any]:
        """Return the facts about the classes that a task needs to predict; see ``TaskKind.pictures``."""
        ids = {"category_ids": list(self.category_ids)} if self.category_ids else {}
        return {"class_names": list(self.class_names), **ids}


def parsed(texts: Mapping[str, str], *, name: str) -> Metadata:
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
