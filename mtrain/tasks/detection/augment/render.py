"""Render a layout and a map to pixels and boxes. Images that the output does not show are never decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.geometry import FILL, is_upright, map_boxes, survives
from mtrain.tasks.detection.augment.mosaic import CanvasLayout, Placement
from mtrain.tasks.detection.image_cache import Images


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of an upright map: output = scale * canvas + shift."""

    scale: float
    shift: float

    def output_range(self, start: int, length: int, canvas: int, side: int) -> tuple[int, int]:
        """Return the output pixels [p, q) that a placement covers; none if q <= p."""
        p, q = self.scale * max(start, 0) + self.shift, self.scale * min(start + length, canvas) + self.shift
        return max(round(p), 0), min(round(q), side)

    def source(self, covered: tuple[int, int], start: int, length: int, pixels: int) -> tuple[int, int, float, float]:
        """Return the source pixels [a, b), at least one of ``pixels``, for the covered output pixels, and the resulting
        map: output = scale * canvas + shift."""
        ratio = pixels / length
        p, q = covered
        a = min(max(round(((p - self.shift) / self.scale - start) * ratio), 0), pixels - 1)
        b = min(max(round(((q - self.shift) / self.scale - start) * ratio), a + 1), pixels)
        scale = (q - p) / (b - a) * ratio
        return a, b, scale, p - (start + a / ratio) * scale


class Renderer:
    """Draw layouts."""

    def __init__(self, images: Images) -> None:
        self._images = images
        # Reused: a canvas of a mosaic takes megabytes, and would otherwise be allocated for each sample.
        self._canvas = np.empty((0, 0, 3), dtype=np.uint8)

    def draw(
        self, layout: CanvasLayout, matrix: NDArray[np.float64], zoom: float, out: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Fill ``out`` (S, S, 3); return the boxes (N, 4) in its pixels, clipped and filtered, and their labels (N,).

        ``matrix`` takes canvas positions to output positions, ``zoom`` is its scale.
        """
        # In general every image is pasted on the canvas, and the canvas is warped. Where the
        # map only zooms and shifts, as with YOLOv5's defaults, each visible part goes straight
        # to its place by one resize: a third of the cost. Its edges land on whole pixels, so
        # its boxes take exactly the map of its pixels, which is not quite ``matrix``.
        if is_upright(matrix):
            shown, maps = self._draw_upright(layout, matrix, out)
            boxes, labels, owner = self._boxes(shown, layout.canvas)
            scales_shifts = np.array(maps).reshape(-1, 2, 4)[owner]
            after = boxes * scales_shifts[:, 0] + scales_shifts[:, 1]
        else:
            boxes, labels, _ = self._boxes(self._draw_canvas(layout, matrix, out), layout.canvas)
            after = map_boxes(boxes, matrix)
        after = np.clip(after, 0.0, float(len(out)))
        keep = survives(boxes * zoom, after)
        return after[keep], labels[keep]

    def _boxes(
        self, shown: Sequence[Placement], canvas: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Return boxes (N, 4) of placed images in canvas pixels, clipped to the canvas, without those outside it;
        their labels (N,) and the number of their placement (N,)."""
        if not shown:
            return np.zeros((0, 4)), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        image_boxes = [self._images.boxes(placement.index) for placement in shown]
        owner = np.repeat(np.arange(len(shown)), [len(labels) for _, labels in image_boxes])
        places = np.array([(p.left, p.top, p.width, p.height) for p in shown], dtype=np.float64)[owner]
        fractions, labels = (np.concatenate(parts) for parts in zip(*image_boxes, strict=True))
        boxes = np.clip(fractions * places[:, [2, 3, 2, 3]] + places[:, [0, 1, 0, 1]], 0.0, float(canvas))
        inside = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        return boxes[inside], labels[inside], owner[inside]

    def _draw_upright(
        self, layout: CanvasLayout, matrix: NDArray[np.float64], out: NDArray[np.uint8]
    ) -> tuple[list[Placement], list[tuple[float, ...]]]:
        """Draw the visible placements and return them, each with the scales and the shifts of its x1, y1, x2, y2."""
        horizontal, vertical = Axis(*matrix[0, [0, 2]].tolist()), Axis(*matrix[1, [1, 2]].tolist())
        out.fill(FILL)
        shown: list[Placement] = []
        maps: list[tuple[float, ...]] = []
        for placement in layout.placements:
            # Compute the covered output pixels first: an invisible image is not read.
            x = horizontal.output_range(placement.left, placement.width, layout.canvas, len(out))
            y = vertical.output_range(placement.top, placement.height, layout.canvas, len(out))
            if x[1] <= x[0] or y[1] <= y[0]:
                continue
            width, height = self._images.size(placement.index)
            left, right, scale_x, shift_x = horizontal.source(x, placement.left, placement.width, width)
            top, bottom, scale_y, shift_y = vertical.source(y, placement.top, placement.height, height)
            # Rows below ``bottom`` are not shown, and a JPEG's need not be decoded.
            image = self._images.load(placement.index, rows=bottom)
            region = out[y[0] : y[1], x[0] : x[1]]
            size = (x[1] - x[0], y[1] - y[0])
            cv2.resize(image[top:bottom, left:right], size, dst=region, interpolation=cv2.INTER_LINEAR)
            shown.append(placement)
            maps.append((scale_x, scale_y, scale_x, scale_y, shift_x, shift_y, shift_x, shift_y))
        return shown, maps

    def _draw_canvas(
        self, layout: CanvasLayout, matrix: NDArray[np.float64], out: NDArray[np.uint8]
    ) -> list[Placement]:
        if len(self._canvas) != layout.canvas:
            self._canvas = np.empty((layout.canvas, layout.canvas, 3), dtype=np.uint8)
        canvas, side = self._canvas, len(out)
        canvas.fill(FILL)
        shown = [p for p in layout.placements if _is_visible(p, layout.canvas, matrix, side)]
        for placement in shown:
            self._paste(placement, canvas)
        # Without perspective the affine map does the same for less.
        if matrix[2, 0] or matrix[2, 1]:
            cv2.warpPerspective(canvas, matrix, (side, side), dst=out, borderValue=(FILL, FILL, FILL))
        else:
            cv2.warpAffine(canvas, matrix[:2], (side, side), dst=out, borderValue=(FILL, FILL, FILL))
        return shown

    def _paste(self, placement: Placement, canvas: NDArray[np.uint8]) -> None:
        left, top = max(placement.left, 0), max(placement.top, 0)
        right = min(placement.left + placement.width, len(canvas))
        bottom = min(placement.top + placement.height, len(canvas))
        image = self._images.load(placement.index)
        if image.shape[:2] != (placement.height, placement.width):
            size = (placement.width, placement.height)
            image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
        y, x = top - placement.top, left - placement.left
        canvas[top:bottom, left:right] = image[y : y + bottom - top, x : x + right - left]


def _is_visible(placement: Placement, canvas: int, matrix: NDArray[np.float64], side: int) -> bool:
    """Return False only if no pixel of the placement can reach the output: its mapped corners lie beyond one border."""
    left, top = max(placement.left, 0), max(placement.top, 0)
    right, bottom = min(placement.left + placement.width, canvas), min(placement.top + placement.height, canvas)
    if right <= left or bottom <= top:
        return False
    if matrix[2, 0] or matrix[2, 1]:  # under perspective a corner may have no image in the output
        return True
    x1, y1, x2, y2 = map_boxes(np.array([[left, top, right, bottom]], dtype=np.float64), matrix)[0]
    # A margin of one pixel, because bilinear interpolation mixes a pixel with its neighbours.
    return bool(x2 >= -1 and y2 >= -1 and x1 <= side and y1 <= side)
