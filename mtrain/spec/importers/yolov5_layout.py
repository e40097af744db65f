"""YOLOv5's network as its model YAML states it, to recognise whether a file describes the network that mtrain has.

The arrangement is that of release 6.0 (https://github.com/ultralytics/yolov5/releases/tag/v6.0), rows of
``[from, number, module, arguments]``; the variants differ in two multipliers only.
"""

from collections.abc import Sequence
from typing import Any

from mtrain.spec.importers.key_report import equal, show_value

VARIANTS = {(0.33, 0.25): "n", (0.33, 0.50): "s", (0.67, 0.75): "m", (1.0, 1.0): "l", (1.33, 1.25): "x"}
"""Variant by (depth_multiple, width_multiple)."""
ANCHORS_PX = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
"""(width, height) in pixels of the anchors in the published files, by level."""
_UP = (-1, 1, "nn.Upsample", (None, 2, "nearest"))


def _conv(channels: int, kernel: int, *rest: int) -> tuple[Any, ...]:
    return (-1, 1, "Conv", (channels, kernel, *rest))


def _join(layer: int) -> tuple[Any, ...]:
    return ((-1, layer), 1, "Concat", (1,))


def _merge(channels: int) -> tuple[Any, ...]:
    return (-1, 3, "C3", (channels, False))


def _stage(repeats: int, channels: int) -> tuple[Any, ...]:
    return (-1, repeats, "C3", (channels,))


LAYERS: Sequence[Sequence[Any]] = (
    *(_conv(64, 6, 2, 2), _conv(128, 3, 2), _stage(3, 128), _conv(256, 3, 2), _stage(6, 256)),
    *(_conv(512, 3, 2), _stage(9, 512), _conv(1024, 3, 2), _stage(3, 1024), (-1, 1, "SPPF", (1024, 5))),
    *(_conv(512, 1, 1), _UP, _join(6), _merge(512), _conv(256, 1, 1), _UP, _join(4), _merge(256)),
    *(_conv(256, 3, 2), _join(14), _merge(512), _conv(512, 3, 2), _join(10), _merge(1024)),
    ((17, 20, 23), 1, "Detect", ("nc", "anchors")),
)
BACKBONE_LAYERS = 10
"""Number of layers in `backbone`; the others are in `head`."""


def difference(backbone: Any, head: Any) -> str:
    """Describe the first difference from this network; empty if there is none."""
    for name, rows, expected in (
        ("backbone", backbone, LAYERS[:BACKBONE_LAYERS]),
        ("head", head, LAYERS[BACKBONE_LAYERS:]),
    ):
        if not isinstance(rows, list):
            return f"{name} is {show_value(rows)}, expected a list of layers"
        for position, (row, expected_row) in enumerate(zip(rows, expected, strict=False)):
            if not equal(_plain(row), expected_row):
                return f"{name} layer {position} is {show_value(row)}, expected {show_value(expected_row)}"
        if len(rows) != len(expected):
            return f"{name} has {len(rows)} layers, expected {len(expected)}"
    return ""


def _plain(row: Any) -> Any:
    """Convert a row's text ``None``, which Python wrote into these files, to null."""
    if isinstance(row, list):
        return [_plain(item) for item in row]
    return None if row == "None" else row
