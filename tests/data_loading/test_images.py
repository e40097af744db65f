"""Caches change nothing but time; what does not fit or does not agree is said with a remedy."""

from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from mtrain.data.images.decode import decode
from mtrain.data.images.geometry import fitted_size
from mtrain.errors import DataError, SpecError
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.cache_size import Sizing, Use
from mtrain.tasks.detection.image_cache import DiskCache, Images, RamCache
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec
from mtrain.tasks.detection.source import open_sources


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_gives_the_same_samples_bit_for_bit(annotations: Annotations, tmp_path: Path, cache: str) -> None:
    def digests(where: str, *, passes: int) -> list[bytes]:
        spec = DetectionDataSpec(
            image_size=64, augment=AugmentSpec(mosaic=0.7), cache=where, cache_dir=str(tmp_path / "cache")
        )
        sources = open_sources(spec, annotations, annotations, seed=0)
        for _ in range(passes):  # the first fills, the second reads
            actual = [s.sample(0, i).image.tobytes() for s in sources.values() for i in range(len(s))]
        return actual

    assert digests(cache, passes=1) == digests(cache, passes=2) == digests("none", passes=1)


def test_the_disk_cache_is_used_and_survives_damage(one_image: tuple[Path, Annotations], tmp_path: Path) -> None:
    path, annotations = one_image
    images = Images(annotations.samples, Sizing(80, "layout"))
    images.keep("disk", tmp_path / "cache")
    before = images.load(0)
    (stored,) = (tmp_path / "cache").iterdir()
    other = np.zeros_like(before)
    DiskCache(tmp_path / "cache", annotations.samples, kind="80").put(0, other)
    assert np.array_equal(images.load(0), other)
    stored.write_bytes(stored.read_bytes()[:100])
    assert np.array_equal(images.load(0), before)
    cv2.imwrite(str(path), np.full((120, 160, 3), 7, np.uint8))  # a changed image is another one
    assert (images.load(0) == 7).all()


def test_a_full_or_closed_cache_folder_is_named(one_image: tuple[Path, Annotations], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    images = Images(one_image[1].samples, Sizing(80, "layout"))
    with pytest.raises(DataError, match=r"data.cache_dir: .*file/cache"):
        images.keep("disk", tmp_path / "file" / "cache")
    images.keep("disk", tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    with pytest.raises(DataError, match=r"data.cache: .*cache: none"):
        images.load(0)


def test_a_ram_cache_larger_than_the_memory_is_refused() -> None:
    side = int(psutil.virtual_memory().available ** 0.5)
    with pytest.raises(SpecError, match=r"data.cache: ram needs .* GiB for 2 images.*use disk"):
        RamCache([(side, side)] * 2)


def test_images_are_shrunk_to_the_side_but_kept_when_smaller(annotations: Annotations) -> None:
    images = Images(annotations.samples, Sizing(100, "layout"))
    for i, sample in enumerate(annotations.samples):
        height, width = images.load(i).shape[:2]
        fitted = fitted_size(sample.width, sample.height, 100)
        expected = fitted if max(sample.width, sample.height) >= 100 else (sample.width, sample.height)
        assert (width, height) == expected
    exact = Images(annotations.samples, Sizing(100, "letterbox", exact=True))
    for i, sample in enumerate(annotations.samples):
        assert exact.load(i).shape[:2] == fitted_size(sample.width, sample.height, 100)[::-1]


def test_an_image_of_another_size_than_annotated_is_named(one_image: tuple[Path, Annotations]) -> None:
    path, annotations = one_image
    cv2.imwrite(str(path), np.zeros((50, 70, 3), np.uint8))
    with pytest.raises(DataError, match=r"one.png: the image is 70 x 50 pixels, its annotation says 160 x 120"):
        Images(annotations.samples, Sizing(80, "layout")).load(0)


def opened_val(folder: Path, *, decode: str, resize: str = "letterbox", cache: str = "none") -> np.ndarray:
    """Return the input of a smooth JPEG of 400 x 300 pixels at 100 px."""
    path = folder / "large.jpg"
    if not path.exists():
        noise = np.random.default_rng(1).integers(0, 256, (15, 20, 3)).astype(np.uint8)
        cv2.imwrite(str(path), cv2.resize(noise, (400, 300), interpolation=cv2.INTER_CUBIC))
    empty = (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, bool), np.zeros(0))
    annotations = assemble(
        [AnnotatedImage(path, path.name, 1, 400, 300, *empty)], class_names=("a",), category_ids=(1,)
    )
    options = {"decode": decode, "resize": resize, "cache": cache, "cache_dir": str(folder / "cache")}
    off = {} if resize == "letterbox" else {"augment": {"mosaic": 0, "translate": 0, "scale": 0}}
    section = DetectionDataSpec.model_validate({"image_size": 100, **options, **off})
    return open_sources(section, None, annotations, seed=0)["val"].sample(0, 0).image


@pytest.mark.parametrize(
    ("use", "large", "small"),
    [
        ("layout", cv2.INTER_LINEAR, cv2.INTER_LINEAR),
        ("crop", cv2.INTER_LINEAR, cv2.INTER_LINEAR),
        ("letterbox", cv2.INTER_AREA, cv2.INTER_LINEAR),
        ("stretch", cv2.INTER_CUBIC, cv2.INTER_CUBIC),
    ],
)
def test_each_use_has_its_interpolation(use: Use, large: int, small: int) -> None:
    sizing = Sizing(100, use)
    assert (sizing.method((400, 300)), sizing.method((40, 30))) == (large, small)


def test_images_for_evaluation_are_decoded_exactly_unless_fast_is_asked_for(tmp_path: Path) -> None:
    exact, fast = (opened_val(tmp_path, decode=way) for way in ("exact", "fast"))
    area = cv2.resize(decode(tmp_path / "large.jpg"), (100, 75), interpolation=cv2.INTER_AREA)
    quarter = decode(tmp_path / "large.jpg", reduce=4)
    np.testing.assert_array_equal(exact[12:87], area)
    assert not np.array_equal(fast, exact)
    # The decoder's quarter of the size, apart from its fast transforms, and so nearly the average of 16 pixels.
    assert np.abs(fast[12:87].astype(int) - quarter).mean() < 1
    assert np.abs(fast.astype(int) - exact).mean() < 2
    stretched = [opened_val(tmp_path, decode=way, resize="stretch") for way in ("exact", "fast")]
    assert not np.array_equal(*stretched)
    assert np.abs(stretched[0].astype(int) - stretched[1]).mean() < 6


def test_a_disk_cache_keeps_fast_and_exact_images_apart(tmp_path: Path) -> None:
    exact = opened_val(tmp_path, decode="exact")
    for way, is_exact in (("fast", False), ("exact", True), ("fast", False)):
        assert np.array_equal(opened_val(tmp_path, decode=way, cache="disk"), exact) == is_exact
