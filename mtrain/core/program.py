"""The description of a program for inference that a session is asked to write: see ``RankSession.export``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["onnx", "torch", "paddle"]
"""An ONNX graph; a file of ``torch.export``; a program of ``paddle.jit.save``."""
FRAMEWORK_OF: dict[str, str] = {"onnx": "torch", "torch": "torch", "paddle": "paddle"}
"""The framework that writes each format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramInput:
    """An array of a batch that a model reads in evaluation mode."""

    key: str
    """Its name in a batch."""
    shape: tuple[int, ...]
    """Shape of one sample."""
    dtype: str = "uint8"
    layout: str = "HWC"
    """``HWC``: row, column, channel; its first two axes are a picture's. Empty: the array is no picture."""
    name: str = ""
    """Its name as an input of the program; empty: ``key``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program to write."""

    format: Format
    path: Path
    inputs: Sequence[ProgramInput]
    batch: int | None = None
    """Samples in a batch; None: any number."""
    size_step: int = 0
    """Both sides of a picture may be any multiple of this; 0: they are those of ``inputs``."""
    raw: bool = False
    """Outputs are those of the network's method ``raw``, before anything is decoded."""
    half: bool = False
    """Compute in float16 where the network computes in the type of its weights."""
    opset: int | None = None
    """Version of ONNX's set of operators; None: the exporter's default."""
