"""The description of a program for inference that a model is written as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

Format: TypeAlias = Literal["onnx", "torch", "paddle"]
"""An ONNX graph; a file of ``torch.export``; a program of ``paddle.jit.save``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramInput:
    """An array of a batch that a model reads in evaluation mode."""

    key: str
    """Its name in a batch."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    dtype: str = "uint8"
    layout: str = "HWC"
    """``HWC``: row, column, channel; ``CHW``: channel, row, column. Empty: the array is no image."""
    name: str = ""
    """Its name as an input of the program; empty: ``key``."""
    example: Any = None
    """An array of a batch, with which the model is traced; None: zeros."""
    batched: bool = True
    """Whether its first axis is that of samples, which ``shape`` leaves out; else ``example`` has the whole shape."""

    def in_form(self, *, channels_first: bool, floats: bool) -> "ProgramInput":
        """Return this input of uint8 HWC images in another form: channels first, pixels as float32 from 0 to 1."""
        if self.layout != "HWC":
            return self
        height, width, channels = self.shape
        shape, layout = ((channels, height, width), "CHW") if channels_first else (self.shape, "HWC")
        return replace(self, shape=shape, layout=layout, dtype="float32" if floats else self.dtype)

    @property
    def sides(self) -> tuple[int, ...]:
        """Numbers of the axes of height and width in a batch; empty where the array is no image."""
        return {"HWC": (1, 2), "CHW": (2, 3)}.get(self.layout, ())

    @property
    def axis_names(self) -> dict[int, str]:
        """Names of the axes of a batch that may have any size, by their numbers."""
        names = {0: "batch"} if self.batched else {}
        return names | dict(zip(self.sides, ("height", "width"), strict=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program to write."""

    format: Format
    path: Path
    inputs: Sequence[ProgramInput]
    batch: int | None = None
    """Samples in a batch; None: any number."""
    size_step: int = 0
    """Both sides of an image may be any multiple of this; 0: they are those of ``inputs``."""
    raw: bool = False
    """Outputs are those of the network's method ``raw``, before anything is decoded."""
    half: bool = False
    """Compute in float16 where the network computes in the type of its weights."""
    suppression: Mapping[str, Any] = field(default_factory=dict)
    """Settings of non-maximum suppression in a Paddle program, whose outputs are those of PaddleDetection; empty: none."""
    opset: int | None = None
    """Version of ONNX's set of operators; None: the exporter's default."""
