"""The request of an export."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mtrain.errors import UsageError
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


def refuse_target(out: Path, files: Sequence[Path], *, suffix: str, writer: str, force: bool) -> None:
    """Refuse a file that cannot or should not be written, before any work is done.

    Args:
        out: The name that was given or made.
        files: The files that will be written.
        suffix: The ending that ``out`` must have; empty: any.
        writer: What writes it, in words.
        force: Whether files that exist are replaced.

    Raises:
        UsageError: The ending is another, ``out`` or a file exists already, or its folder does not exist.
    """
    if suffix and out.suffix != suffix:
        raise UsageError(f"-o {out}: {writer} writes {suffix}; give a name that ends with it")
    if out.is_dir():
        raise UsageError(f"-o {out}: is a folder; give the name of a file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"-o {out}: the folder {out.parent} does not exist; create it, or choose another name")
    existing = next((file for file in files if file.exists()), None)
    if existing is not None and not force:
        which = "" if existing == out else f"{existing} "
        raise UsageError(f"-o {out}: {which}exists already; give --force to replace it, or another name")
