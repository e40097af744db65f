"""Place images on a canvas: one alone, four around a random centre, or nine around the one in the middle.

A layout is geometry only, so that images which the output does not show need not be decoded.
Mosaic of four: YOLOv4 (Bochkovskiy et al. 2020, section 3.3); sizes and ranges as the YOLOv5 documentation gives them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.data.images.geometry import margin

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of one image, resized so that its longest side is the output's, on the canvas; parts outside are
    cut."""

    index: int
    """Index of the sample."""
    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class CanvasLayout:
    """A square canvas and the images on it; they never overlap."""

    canvas: int
    """Side in pixels."""
    placements: Sequence[Placement]


def alone(index: int, size_of: Callable[[int], Size], side: int) -> CanvasLayout:
    """Place one image, letterboxed."""
    # The sizes are those of the fitted image: geometry alone,
    # so that nothing is decoded which the output does not show.
    width, height = size_of(index)
    return CanvasLayout(
        side, (Placement(index, margin((side - width) / 2), margin((side - height) / 2), width, height),)
    )


def four(indices: Sequence[int], size_of: Callable[[int], Size], side: int, rng: np.random.Generator) -> CanvasLayout:
    """Place four images around a point that is uniform in the middle half of a canvas of twice the side."""
    centre_x, centre_y = (int(v) for v in rng.uniform(side / 2, 3 * side / 2, 2))
    placements = []
    for corner, index in enumerate(indices):
        width, height = size_of(index)
        left = centre_x - width if corner % 2 == 0 else centre_x
        top = centre_y - height if corner < 2 else centre_y
        placements.append(Placement(index, left, top, width, height))
    return CanvasLayout(2 * side, tuple(placements))


def nine(indices: Sequence[int], size_of: Callable[[int], Size], side: int, rng: np.random.Generator) -> CanvasLayout:
    """Place one image in the middle and eight around it like the vanes of a windmill; keep a random window of twice
    the side."""
    sizes = [size_of(index) for index in indices]
    x0 = y0 = side
    x1, y1 = x0 + sizes[0][0], y0 + sizes[0][1]
    # Each of the four side images touches the middle one and is aligned with one of its edges, and
    # each corner image continues its side image outwards: so images of any shapes never overlap.
    corners = [
        (x0, y0),  # the middle
        (x0, y0 - sizes[1][1]),  # top, aligned with the left edge
        (x0 + sizes[1][0], y0 - sizes[2][1]),  # beside the top, to the right
        (x1, y0),  # right, aligned with the top edge
        (x1, y0 + sizes[3][1]),  # below the right
        (x1 - sizes[5][0], y1),  # bottom, aligned with the right edge
        (x1 - sizes[5][0] - sizes[6][0], y1),  # beside the bottom, to the left
        (x0 - sizes[7][0], y1 - sizes[7][1]),  # left, aligned with the bottom edge
        (x0 - sizes[8][0], y1 - sizes[7][1] - sizes[8][1]),  # above the left
    ]
    shift_x, shift_y = (int(v) for v in rng.uniform(0, side, 2))
    return CanvasLayout(
        2 * side,
        tuple(
            Placement(index, left - shift_x, top - shift_y, width, height)
            for index, (left, top), (width, height) in zip(indices, corners, sizes, strict=True)
        ),
    )
