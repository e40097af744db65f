"""The request of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mtrain.spec.request import SpecRequest
from mtrain_deploy.exported.metadata import Form

ExportFormat: TypeAlias = Literal["onnx", "openvino", "torch", "paddle", "safetensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """A request: the weights to export, and the form of the file."""

    format: ExportFormat = "onnx"
    out: Path | None = None
    """File to write; None: the name of the run with the format's ending, in the current folder."""
    spec: SpecRequest = field(default_factory=SpecRequest)
    """The spec; none named: that of the run."""
    run: str | None = None
    """A run folder: its spec and its best checkpoint; None: ``runs/latest``."""
    checkpoint: str | None = None
    weights: str | None = None
    """A file of weights in place of a checkpoint."""
    form: Form = "decoded"
    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Axes of the images that the program takes: channels last or first."""
    input: Literal["uint8", "float"] = "uint8"
    """Pixels of these images: 0 to 255, or float32 from 0 to 1."""
    batch: int | None = None
    """Samples in a batch; None: any number."""
    dynamic_size: bool = False
    precision: Literal["fp32", "fp16"] = "fp32"
    opset: int | None = None
    suppression: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the forms with suppression that replace the model's: ``confidence``, ``iou_threshold``, ``max_detections``."""
    force: bool = False
    """Replace files that exist."""
