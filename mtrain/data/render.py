"""From a layout and a map to pixels and boxes.

The plain way is to paste every picture on the canvas and to warp the canvas. Where the map only zooms and shifts
(YOLOv5's default settings) each visible part of a picture goes straight to its place in the output by one resize, a
third of the cost; its edges land on whole pixels and its boxes take the very map its pixels took. Pictures that the
output does not show are never decoded.
"""

from dataclasses import dataclass
from typing import Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.geometry import FILL, is_upright, map_boxes, survives
from mtrain.data.mosaic import Layout, Placement


class Shelf(Protocol):
    """Where pictures and their boxes come from."""

    def load(self, index: int) -> NDArray[np.uint8]:
        """uint8 (H, W, 3) RGB, of any size: it is stretched to its placement."""
        ...

    def boxes(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(N, 4) xyxy as fractions of the picture's width and height, and (N,) labels."""
        ...


@dataclass(frozen=True, slots=True)
class _Span:
    """One axis of an upright placement: source pixels [a, b) become output pixels [p, q)."""

    a: int
    b: int
    p: int
    q: int

    def map(self, values: NDArray[np.float64], stretch: float) -> NDArray[np.float64]:
        """Positions in the placement (``stretch`` of its pixels per source pixel) as positions in the output."""
        scale = (self.q - self.p) / (self.b - self.a)
        return self.p + (values / stretch - self.a) * scale


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of an upright map: output = scale * canvas + shift."""

    scale: float
    shift: float

    def covered(self, start: int, length: int, canvas: int, side: int) -> tuple[int, int] | None:
        """Output pixels [p, q) that a placement covers; None: not one."""
        ends = (max(start, 0), min(start + length, canvas))
        p, q = (round(min(max(self.scale * end + self.shift, 0.0), side)) for end in ends)
        return (p, q) if q > p else None

    def span(self, covered: tuple[int, int], start: int, length: int, pixels: int) -> _Span:
        """The source pixels, at least one of ``pixels``, that belong to the covered output pixels."""
        a, b = (round(((edge - self.shift) / self.scale - start) * pixels / length) for edge in covered)
        a = min(max(a, 0), pixels - 1)
        return _Span(a, min(max(b, a + 1), pixels), *covered)


class Renderer:
    """Draws layouts; keeps its canvas, so that memory is asked for once. One per process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._canvas = np.empty((0, 0, 3), dtype=np.uint8)

    def draw(
        self, layout: Layout, matrix: NDArray[np.float64], zoom: float, out: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Fill ``out`` (S, S, 3); returns the boxes (N, 4) in its pixels, clipped and filtered, and their labels (N,).

        ``matrix`` takes canvas positions to output positions, ``zoom`` is its scale.
        """
        draw = self._draw_upright if is_upright(matrix) else self._draw_canvas
        parts = draw(layout, matrix, out)
        before = np.concatenate([part[0] for part in parts]) if parts else np.zeros((0, 4))
        after = np.concatenate([part[1] for part in parts]) if parts else np.zeros((0, 4))
        labels = np.concatenate([part[2] for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        after = np.clip(after, 0.0, float(len(out)))
        keep = survives(before * zoom, after)
        return after[keep], labels[keep]

    def _boxes(
        self, placement: Placement, canvas: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Boxes of a placed picture in canvas pixels, clipped to the canvas; what lies outside it is left out."""
        fractions, labels = self._shelf.boxes(placement.index)
        size = np.array([placement.width, placement.height] * 2, dtype=np.float64)
        corner = np.array([placement.left, placement.top] * 2, dtype=np.float64)
        boxes = np.clip(fractions * size + corner, 0.0, float(canvas))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        return boxes[inside], labels[inside]

    def _draw_upright(self, layout: Layout, matrix: NDArray[np.float64], out: NDArray[np.uint8]) -> "list[_Part]":
        horizontal, vertical = _Axis(*matrix[0, [0, 2]].tolist()), _Axis(*matrix[1, [1, 2]].tolist())
        out.fill(FILL)
        parts = []
        for placement in layout.placements:
            # Which output pixels it covers is known before the picture is read.
            width, height = placement.width, placement.height
            across = horizontal.covered(placement.left, width, layout.canvas, len(out))
            down = vertical.covered(placement.top, height, layout.canvas, len(out))
            if across is None or down is None:
                continue
            picture = self._shelf.load(placement.index)
            x = horizontal.span(across, placement.left, width, picture.shape[1])
            y = vertical.span(down, placement.top, height, picture.shape[0])
            cv2.resize(
                picture[y.a : y.b, x.a : x.b],
                (x.q - x.p, y.q - y.p),
                dst=out[y.p : y.q, x.p : x.q],
                interpolation=cv2.INTER_LINEAR,
            )
            boxes, labels = self._boxes(placement, layout.canvas)
            after = np.empty_like(boxes)
            after[:, 0::2] = x.map(boxes[:, 0::2] - placement.left, width / picture.shape[1])
            after[:, 1::2] = y.map(boxes[:, 1::2] - placement.top, height / picture.shape[0])
            parts.append((boxes, after, labels))
        return parts

    def _draw_canvas(self, layout: Layout, matrix: NDArray[np.float64], out: NDArray[np.uint8]) -> "list[_Part]":
        if len(self._canvas) != layout.canvas:
            self._canvas = np.empty((layout.canvas, layout.canvas, 3), dtype=np.uint8)
        canvas, side, parts = self._canvas, len(out), []
        canvas.fill(FILL)
        for placement in layout.placements:
            if not _is_visible(placement, layout.canvas, matrix, side):
                continue
            self._paste(placement, canvas)
            boxes, labels = self._boxes(placement, layout.canvas)
            parts.append((boxes, map_boxes(boxes, matrix), labels))
        if matrix[2, 0] or matrix[2, 1]:
            cv2.warpPerspective(canvas, matrix, (side, side), dst=out, borderValue=(FILL, FILL, FILL))
        else:
            cv2.warpAffine(canvas, matrix[:2], (side, side), dst=out, borderValue=(FILL, FILL, FILL))
        return parts

    def _paste(self, placement: Placement, canvas: NDArray[np.uint8]) -> None:
        left, top = max(placement.left, 0), max(placement.top, 0)
        right = min(placement.left + placement.width, len(canvas))
        bottom = min(placement.top + placement.height, len(canvas))
        picture = self._shelf.load(placement.index)
        if picture.shape[:2] != (placement.height, placement.width):
            size = (placement.width, placement.height)
            picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
        y, x = top - placement.top, left - placement.left
        canvas[top:bottom, left:right] = picture[y : y + bottom - top, x : x + right - left]


_Part = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
"""Boxes on the canvas, the same in the output, labels."""


def _is_visible(placement: Placement, canvas: int, matrix: NDArray[np.float64], side: int) -> bool:
    """False only where no pixel of the placement can reach the output: its mapped corners lie beyond one border.

    Under perspective a corner may have no image, so every placement counts as visible.
    """
    left, top = max(placement.left, 0), max(placement.top, 0)
    right, bottom = min(placement.left + placement.width, canvas), min(placement.top + placement.height, canvas)
    if right <= left or bottom <= top:
        return False
    if matrix[2, 0] or matrix[2, 1]:
        return True
    x1, y1, x2, y2 = map_boxes(np.array([[left, top, right, bottom]], dtype=np.float64), matrix)[0]
    return bool(x2 >= -1 and y2 >= -1 and x1 <= side and y1 <= side)
