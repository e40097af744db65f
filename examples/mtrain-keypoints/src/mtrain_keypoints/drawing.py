"""Points on images, for people. Images are uint8 (H, W, 3) RGB."""

from collections.abc import Mapping

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.drawing import grid
from mtrain_keypoints.people import People
from mtrain_keypoints.source import KeypointSource

Pixels = NDArray[np.uint8]
SHOWN = 16
CELL_PX = 240


def marked(image: Pixels, points: NDArray[np.float64]) -> Pixels:
    """Return a copy with a dot for each of the points (K, 3) whose third value is not 0, coloured by its number."""
    drawn = np.ascontiguousarray(image).copy()
    radius = max(2, max(drawn.shape) // 50)
    for number, (x, y, known) in enumerate(points):
        if known:
            hue = np.array([[[number * 180 // len(points), 255, 255]]], np.uint8)
            colour = cv2.cvtColor(hue, cv2.COLOR_HSV2RGB)[0, 0].tolist()
            cv2.circle(drawn, (round(float(x)), round(float(y))), radius, colour, -1)
    return drawn


def people_grid(split: People, *, limit: int) -> Pixels:
    """Return images with their known points."""
    chosen = range(min(limit, len(split)))
    return grid([marked(split.image(i), split.points[i]) for i in chosen], columns=4, cell_px=CELL_PX)


def inputs_grid(source: KeypointSource, *, limit: int) -> Pixels:
    """Return windows as the network is given them, with their points."""
    cells = []
    for index in range(min(limit, len(source))):
        window = np.zeros(source.array.shape, np.uint8)
        sample = source.fill(0, index, window)
        places = np.concatenate([sample.points * len(window), sample.known[:, None]], axis=1)
        cells.append(marked(window, places.astype(np.float64)))
    return grid(cells, columns=4, cell_px=CELL_PX)


def comparison(split: People, predicted: Mapping[int, NDArray[np.float64]]) -> Pixels:
    """Return images with their known points on the left, and the same with predicted ones on the right."""
    cells = []
    for index in sorted(predicted)[:SHOWN]:
        image = split.image(index)
        cells += [marked(image, split.points[index]), marked(image, predicted[index])]
    return grid(cells, columns=4, cell_px=CELL_PX)
