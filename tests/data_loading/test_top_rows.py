"""Only the rows of a JPEG that a sample shows are decoded, and no pixel changes by that."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from mtrain.data.images.fast_decode import decode_quickly, decode_top
from mtrain.tasks.detection import image_cache
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.section import AugmentSpec
from mtrain.tasks.detection.source import DetectionSource

WIDTH, HEIGHT = 201, 150
"""No multiple of any block."""


def photograph() -> np.ndarray:
    noise = np.random.default_rng(3).integers(0, 256, (30, 40, 3)).astype(np.uint8)
    return cv2.resize(noise, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("kind", ["420", "422", "444", "440", "Gray", "restarts"])
@pytest.mark.parametrize("reduce", [1, 2, 8])
def test_the_first_rows_alone_have_the_pixels_of_the_whole(kind: str, reduce: int, tmp_path: Path) -> None:
    path, image = tmp_path / "a.jpg", photograph()
    if kind == "restarts":
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_RST_INTERVAL, 3])
    elif kind == "Gray":
        path.write_bytes(simplejpeg.encode_jpeg(image[:, :, :1].copy(), colorspace="GRAY", colorsubsampling="Gray"))
    else:
        path.write_bytes(simplejpeg.encode_jpeg(image, colorsubsampling=kind))
    whole = decode_quickly(path, reduce=reduce)
    assert whole is not None
    for rows in (1, 7, 8, 16, 17, len(whole) - 1, len(whole)):
        if rows <= len(whole):
            top = decode_top(path, size=(WIDTH, HEIGHT), rows=rows, reduce=reduce)
            assert top is not None
            np.testing.assert_array_equal(top, whole[:rows])


def test_files_that_cannot_be_cut_are_left_to_the_whole_decoding(tmp_path: Path) -> None:
    path, image = tmp_path / "a.jpg", photograph()
    wanted: dict[str, Any] = {"size": (WIDTH, HEIGHT), "rows": 20}
    cv2.imwrite(str(path), image)
    baseline = path.read_bytes()
    assert decode_top(path, **wanted) is not None
    assert decode_top(path, size=(WIDTH, HEIGHT + 1), rows=20) is None
    cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert decode_top(path, **wanted) is None
    for content in (baseline[:-40], baseline[:100], baseline[:2], b"", photograph().tobytes()):
        path.write_bytes(content)
        assert decode_top(path, **wanted) is None
    assert decode_top(tmp_path / "missing.jpg", **wanted) is None
    Image.fromarray(image).save(path, "JPEG", keep_rgb=True)
    assert decode_quickly(path) is None


def jpegs(folder: Path, *, count: int = 6) -> Annotations:
    rng, found = np.random.default_rng(0), []
    for i in range(count):
        path = folder / f"{i}.jpg"
        cv2.imwrite(str(path), np.roll(photograph(), int(rng.integers(WIDTH)), axis=1))
        boxes, no_crowd = np.array([[20.0, 30, 60, 50]]), np.zeros(1, dtype=bool)
        found.append(
            AnnotatedImage(path, path.name, i, WIDTH, HEIGHT, boxes, np.array([0]), no_crowd, boxes[:, 2:].prod(1))
        )
    return assemble(found, class_names=("a",), category_ids=(1,))


@pytest.mark.parametrize("side", [96, 224])
def test_samples_are_the_same_when_only_the_rows_shown_are_decoded(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotations, tops = jpegs(tmp_path), []

    def spied(path: Path, **given: Any) -> Any:
        tops.append(given["rows"])
        return decode_top(path, **given)

    monkeypatch.setattr(image_cache, "decode_top", spied)
    source = DetectionSource(annotations, image_size=side, augment=AugmentSpec(mosaic=0.8, mixup=0.2))

    def digests() -> list[bytes]:
        return [source.sample(0, i).image.tobytes() for i in range(24)]

    for i in range(len(annotations)):
        source.images.load(i)
    with_tops = digests()
    # Images that are resized after decoding are decoded whole: a part would have other pixels.
    assert bool(tops) == (side > WIDTH)
    monkeypatch.setattr(image_cache, "decode_top", lambda *_, **__: None)
    assert digests() == with_tops


def test_an_image_is_cut_only_after_it_was_decoded_whole_without_a_warning(tmp_path: Path) -> None:
    annotations = jpegs(tmp_path, count=2)
    images = Images(annotations.samples, Sizing(300, "layout"))
    assert len(images.load(0, rows=20)) == HEIGHT
    assert len(images.load(0, rows=20)) == 20
    path = annotations.samples[1].path
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"stray bytes" + content[-2:])  # decoders warn and go on
    assert decode_quickly(path) is None
    for _ in range(2):
        assert len(images.load(1, rows=20)) == HEIGHT


def test_an_image_of_another_size_is_refused_also_when_few_rows_are_wanted(tmp_path: Path) -> None:
    annotations = jpegs(tmp_path, count=1)
    images = Images(annotations.samples, Sizing(300, "layout"))
    images.load(0)
    cv2.imwrite(str(annotations.samples[0].path), photograph()[:140])
    with pytest.raises(Exception, match=f"the image is {WIDTH} x 140 pixels, its annotation says"):
        images.load(0, rows=20)
