"""Annotations of many images: few objects whatever their number, and the content of each image unchanged."""

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mtrain.tasks.detection.annotations import AnnotatedImage, assemble
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.image_cache import Images


def image(number: int, *, image_id: int | str | None = None, name: str | None = None, boxes: int = 3) -> AnnotatedImage:
    generator = np.random.default_rng(number)
    name = f"{number:06d}.jpg" if name is None else name
    corner, size = generator.uniform(0, 40, (boxes, 2)), generator.uniform(2, 20, (boxes, 2))
    return AnnotatedImage(
        path=Path("/images") / name,
        file_name=name,
        image_id=number if image_id is None else image_id,
        width=64 + number,
        height=64,
        boxes_xywh=np.concatenate([corner, size], axis=1),
        labels=generator.integers(0, 2, boxes),
        crowd=np.array([number % 2 == 0] * boxes, dtype=np.bool_),
        area=size.prod(axis=1),
    )


def assembled(images):
    return assemble(images, class_names=("a", "b"), category_ids=(1, 2))


def blocks_kept(count: int) -> int:
    """The blocks of memory that annotations of so many images, and what provides them to the loader, hold."""
    images = [image(number) for number in range(count)]
    gc.collect()
    tracemalloc.start()
    before = len(tracemalloc.take_snapshot().traces)
    annotations = assembled(images)
    provider = Images(annotations.samples, Sizing(64, "layout"))
    del images  # A path that was asked for its text keeps it.
    gc.collect()
    kept = len(tracemalloc.take_snapshot().traces) - before
    tracemalloc.stop()
    assert len(provider) == len(annotations.images) == count
    return kept


def test_more_images_are_no_more_objects():
    few, many = blocks_kept(100), blocks_kept(400)
    assert many < few + 50, (few, many)


def test_each_image_has_the_content_that_was_read():
    images = [image(number, boxes=number % 4) for number in range(9)]
    annotations = assembled(images)
    for given, kept, sample in zip(images, annotations.images, annotations.samples, strict=True):
        for key in ("path", "file_name", "image_id", "width", "height"):
            assert getattr(kept, key) == getattr(given, key)
        for key in ("boxes_xywh", "labels", "crowd", "area"):
            assert getattr(kept, key).dtype == getattr(given, key).dtype
            np.testing.assert_array_equal(getattr(kept, key), getattr(given, key))
        x, y, w, h = given.boxes_xywh.T
        np.testing.assert_array_equal(sample.boxes, np.stack([x, y, x + w, y + h], axis=1).astype(np.float32))
        assert (sample.path, sample.image_id, sample.width) == (given.path, given.image_id, given.width)


def test_the_loader_gets_fractions_of_the_size_without_crowds():
    annotations = assembled([image(0), image(1)])
    provider = Images(annotations.samples, Sizing(64, "layout"))
    assert len(provider.boxes(0)[0]) == 0  # crowds
    boxes, labels = provider.boxes(1)
    sample = annotations.samples[1]
    np.testing.assert_array_equal(boxes, sample.boxes.astype(np.float64) / [65, 64, 65, 64])
    np.testing.assert_array_equal(labels, sample.labels)


@pytest.mark.parametrize("odd", ["one", 1 << 70, "1"])
def test_ids_of_any_kind_come_back_as_they_were(odd):
    annotations = assembled([image(0, image_id=odd), image(1, image_id=7)])
    assert [each.image_id for each in annotations.images] == [odd, 7]


def test_names_that_are_not_utf_8_come_back_as_they_were():
    name = os.fsdecode(b"caf\xe9.jpg")
    annotations = assembled([image(0, name=name)])
    assert annotations.images[0].file_name == name
    assert os.fsencode(annotations.samples[0].path) == b"/images/caf\xe9.jpg"


def test_a_split_is_a_sequence():
    samples = assembled([image(number) for number in range(5)]).samples
    assert samples[-1].image_id == 4
    assert [sample.image_id for sample in samples[1:4:2]] == [1, 3]
    assert [sample.image_id for sample in samples] == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        samples[5]


def test_a_split_without_images_is_empty():
    annotations = assembled([])
    assert list(annotations.samples) == list(annotations.images) == []


def test_what_was_read_cannot_be_changed_by_one_who_uses_it():
    sample = assembled([image(1)]).samples[0]
    with pytest.raises(ValueError, match="read-only"):
        sample.boxes[0] = 0
