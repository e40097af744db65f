"""A straightforward loader for comparison: OpenCV, a torch Dataset and a torch DataLoader.

It draws mosaics of four at S from image files, with random zoom and shift, hsv by tables, left-right flip, uint8
tensors in NCHW and rows of boxes collated as detection code does: the same steps, ranges and number of images per
sample as mtrain's loader.
"""

import random
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch

from mtrain.tasks.detection.annotations import Sample
from mtrain.tasks.detection.section import AugmentSpec


class MosaicDataset(torch.utils.data.Dataset):
    """Augmented samples as (uint8 CHW tensor, (N, 6) tensor)."""

    def __init__(self, samples: Sequence[Sample], side: int, spec: AugmentSpec) -> None:
        self.samples, self.side, self.spec = samples, side, spec

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, boxes, labels = self.mosaic(index)
        image, boxes, labels = self.affine(image, boxes, labels)
        image = self.hsv(image)
        if random.random() < self.spec.flip_lr:
            image = np.fliplr(image)
            boxes[:, [0, 2]] = self.side - boxes[:, [2, 0]]
        rows = torch.zeros((len(boxes), 6))
        if len(boxes):
            centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
            rows[:, 1:] = torch.from_numpy(np.concatenate([labels[:, None], centres / self.side, sizes / self.side], 1))
        image = np.ascontiguousarray(image.transpose(2, 0, 1)[::-1])  # HWC BGR to CHW RGB
        return torch.from_numpy(image), rows

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sample = self.samples[index]
        image = cv2.imread(str(sample.path))
        ratio = self.side / max(image.shape[:2])
        if ratio != 1:
            size = (int(np.ceil(image.shape[1] * ratio)), int(np.ceil(image.shape[0] * ratio)))
            image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        return image, sample.boxes * ratio, sample.labels

    def mosaic(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        side = self.side
        canvas = np.full((2 * side, 2 * side, 3), 114, dtype=np.uint8)
        xc, yc = (int(random.uniform(side / 2, 3 * side / 2)) for _ in range(2))
        boxes, labels = [], []
        for corner, i in enumerate([index, *random.choices(range(len(self.samples)), k=3)]):
            image, box, label = self.read(i)
            height, width = image.shape[:2]
            x = xc - width if corner % 2 == 0 else xc
            y = yc - height if corner < 2 else yc
            x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + width, 2 * side), min(y + height, 2 * side)
            canvas[y1:y2, x1:x2] = image[y1 - y : y2 - y, x1 - x : x2 - x]
            boxes.append(box + np.array([x, y, x, y], dtype=np.float32))
            labels.append(label)
        return canvas, np.concatenate(boxes).clip(0, 2 * side), np.concatenate(labels)

    def affine(self, image: np.ndarray, boxes: np.ndarray, labels: np.ndarray) -> tuple[Any, Any, Any]:
        spec, side = self.spec, self.side
        zoom = random.uniform(1 - spec.scale, 1 + spec.scale)
        shift = [random.uniform(0.5 - spec.translate, 0.5 + spec.translate) * side for _ in range(2)]
        matrix = np.array([[zoom, 0, shift[0] - zoom * side], [0, zoom, shift[1] - zoom * side]])
        image = cv2.warpAffine(image, matrix, dsize=(side, side), borderValue=(114, 114, 114))
        new = (boxes * zoom + np.tile(matrix[:, 2], 2).astype(np.float32)).clip(0, side)
        size, old = new[:, 2:] - new[:, :2], (boxes[:, 2:] - boxes[:, :2]) * zoom
        aspect = np.maximum(size[:, 0] / (size[:, 1] + 1e-16), size[:, 1] / (size[:, 0] + 1e-16))
        keep = (size > 2).all(1) & (size.prod(1) / (old.prod(1) + 1e-16) > 0.1) & (aspect < 100)
        return image, new[keep], labels[keep]

    def hsv(self, image: np.ndarray) -> np.ndarray:
        spec = self.spec
        gains = np.random.uniform(-1, 1, 3) * [spec.hsv_h, spec.hsv_s, spec.hsv_v] + 1
        hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        x = np.arange(256, dtype=np.float64)
        tables = [(x * gains[0] % 180), np.clip(x * gains[1], 0, 255), np.clip(x * gains[2], 0, 255)]
        planes = [
            cv2.LUT(plane, table.astype(np.uint8))
            for plane, table in zip((hue, saturation, value), tables, strict=True)
        ]
        return cv2.cvtColor(cv2.merge(planes), cv2.COLOR_HSV2BGR)


def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the images, and write each image's number into its rows."""
    for i, (_, rows) in enumerate(items):
        rows[:, 0] = i
    return torch.stack([image for image, _ in items]), torch.cat([rows for _, rows in items])


def alone(_: int) -> None:
    """Use one thread per worker, as detection code does."""
    cv2.setNumThreads(0)


def data_loader(samples: Sequence[Sample], side: int, spec: AugmentSpec, *, batch: int, count: int) -> Any:
    """Return a loader of ``count`` images per pass, with one persistent worker."""
    dataset = MosaicDataset(samples, side, spec)
    order = [i % len(samples) for i in range(count)]
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=batch,
        sampler=order,
        num_workers=1,
        collate_fn=collate,
        worker_init_fn=alone,
        persistent_workers=True,
        prefetch_factor=2,
    )
