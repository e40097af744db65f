"""Whatever kind an image file is, it becomes RGB as displayed; damaged ones are named."""

import io
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from mtrain.core.interfaces import SplitRequest
from mtrain.data.images.decode import decode
from mtrain.data.images.header import probe
from mtrain.errors import DataError
from mtrain.tasks.detection.check import verify_images
from mtrain.tasks.detection.readers.coco import Coco, read_content

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"


def gradient(height: int = 40, width: int = 60) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 90)], axis=2).astype(np.uint8)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_jpegs_decode_to_what_opencv_gives() -> None:
    for path in sorted((SMALL / "images").iterdir()):
        ours = decode(path)
        assert (ours.dtype, ours.flags.c_contiguous) == (np.uint8, True)
        np.testing.assert_array_equal(ours, cv2.imread(str(path))[:, :, ::-1])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "tiff", "webp"])
def test_exif_orientation_is_applied_to_image_and_size(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 98, "subsampling": 0} if suffix in ("jpg", "JPEG") else {}
    if suffix == "webp":
        options = {"lossless": True}
    path = save(tmp_path / f"a.{suffix}", Image.fromarray(gradient()), exif=exif, **options)
    with Image.open(path) as file:
        expected = np.asarray(ImageOps.exif_transpose(file).convert("RGB")).astype(int)
    image = decode(path)
    assert image.shape == expected.shape == ((60, 40, 3) if orientation >= 5 else (40, 60, 3))
    assert np.abs(image.astype(int) - expected).max() <= 4
    assert probe(path) == (image.shape[1], image.shape[0])


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tiff"])
def test_grey_images_become_three_equal_channels(tmp_path: Path, suffix: str) -> None:
    grey = gradient()[:, :, 0]
    image = decode(save(tmp_path / f"a.{suffix}", Image.fromarray(grey)))
    assert image.shape == (40, 60, 3)
    assert (image == image[:, :, :1]).all()
    assert np.abs(image[:, :, 0].astype(int) - grey).max() <= 3


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    deep = gradient()[:, :, 0].astype(np.uint16) * 257
    cv2.imwrite(str(tmp_path / "a.png"), deep)
    cv2.imwrite(str(tmp_path / "a.tiff"), deep)
    colour = gradient().astype(np.uint16) * 257
    cv2.imwrite(str(tmp_path / "c.png"), colour[:, :, ::-1])
    for name in ("a.png", "a.tiff"):
        np.testing.assert_array_equal(decode(tmp_path / name)[:, :, 1], gradient()[:, :, 0])
    np.testing.assert_array_equal(decode(tmp_path / "c.png"), gradient())


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    rgba = np.dstack([np.zeros((10, 30, 3), np.uint8), np.repeat(np.uint8([0, 128, 255]), 10)[None].repeat(10, 0)])
    source = Image.fromarray(rgba)
    if mode == "P":
        source = Image.fromarray(np.repeat(np.uint8([0, 1, 2]), 10)[None].repeat(10, 0))
        source = source.convert("P")
        source.putpalette([0, 0, 0] * 3)
        path = save(tmp_path / "a.png", source, transparency=bytes([0, 128, 255]))
    else:
        path = save(tmp_path / "a.png", source.convert(mode))
    image = decode(path).astype(int)
    assert (image[:, 5] == 255).all()
    assert np.abs(image[:, 15] - 127).max() <= 1
    assert (image[:, 25] == 0).all()


def test_palette_images_become_rgb(tmp_path: Path) -> None:
    source = Image.fromarray(np.uint8([[0, 1], [1, 0]])).convert("P")
    source.putpalette([255, 0, 0, 0, 0, 255])
    for suffix in ("png", "gif"):
        image = decode(save(tmp_path / f"a.{suffix}", source))
        assert image[0].tolist() == [[255, 0, 0], [0, 0, 255]]


def test_cmyk_jpegs_become_rgb(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient()).convert("CMYK"), quality=98)
    assert np.abs(decode(path).astype(int) - gradient()).mean() < 4
    assert decode(path, reduce=2).shape == (20, 30, 3)


def test_an_image_is_known_by_its_bytes_not_by_its_suffix(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient()), format="PNG")
    np.testing.assert_array_equal(decode(path), gradient())
    assert probe(path) == (60, 40)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("reduce", [1, 2, 4, 8])
def test_reduced_images_are_smaller_and_look_the_same(tmp_path: Path, suffix: str, reduce: int) -> None:
    path = save(tmp_path / f"a.{suffix}", Image.fromarray(gradient(121, 83)))
    small = decode(path, reduce=reduce)
    assert small.shape == (-(-121 // reduce), -(-83 // reduce), 3)
    whole = cv2.resize(decode(path), small.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(small.astype(int) - whole).mean() < 6


def test_reducing_comes_before_turning(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient(121, 83)), exif=exif)
    assert decode(path, reduce=2).shape == (42, 61, 3)


def test_stray_bytes_between_jpeg_segments_are_forgiven(tmp_path: Path) -> None:
    data = (SMALL / "images" / "BloodImage_00001.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data + b"trailing rubbish" * 9)
    np.testing.assert_array_equal(decode(tmp_path / "a.jpg"), decode(SMALL / "images" / "BloodImage_00001.jpg"))
    assert probe(tmp_path / "a.jpg") == (640, 480)


def damaged(kind: str) -> bytes:
    jpeg = (SMALL / "images" / "BloodImage_00001.jpg").read_bytes()
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    png = buffer.getvalue()
    return {
        "half a JPEG": jpeg[: len(jpeg) // 2],
        "a JPEG header": jpeg[:30],
        "half a PNG": png[: len(png) // 2],
        "an empty file": b"",
        "a web page": b"<html>404 not found</html>",
        "zeros": bytes(5000),
    }[kind]


@pytest.mark.parametrize("kind", ["half a JPEG", "a JPEG header", "half a PNG", "an empty file", "a web page", "zeros"])
def test_damaged_files_are_refused_by_name_when_decoded_and_when_looked_at(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(damaged(kind))
    with pytest.raises(DataError, match=r"broken\.jpg"):
        decode(path)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        probe(path)


def test_a_thumbnails_end_marker_does_not_hide_a_truncated_jpeg(tmp_path: Path) -> None:
    jpeg = (SMALL / "images" / "BloodImage_00001.jpg").read_bytes()
    thumbnail = b"thumb\xff\xd8xx\xff\xd9"
    segment = b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    (tmp_path / "a.jpg").write_bytes(jpeg[:2] + segment + jpeg[2:-3000])
    with pytest.raises(DataError, match="truncated JPEG"):
        probe(tmp_path / "a.jpg")


@pytest.mark.parametrize("part", [b"\xff\xfe\0\2", b"\xff\xd0", b"\xff"], ids=["comments", "marks", "fill"])
def test_a_jpeg_header_of_countless_empty_parts_is_refused_and_one_of_many_is_read(tmp_path: Path, part: bytes) -> None:
    jpeg = (SMALL / "images" / "BloodImage_00001.jpg").read_bytes()
    (tmp_path / "few.jpg").write_bytes(jpeg[:2] + part * 2000 + jpeg[2:])
    assert probe(tmp_path / "few.jpg") == (640, 480)
    (tmp_path / "many.jpg").write_bytes(jpeg[:2] + part * 10_000 + jpeg[2:])
    with pytest.raises(DataError, match=r"many\.jpg: .*10000 parts"):
        probe(tmp_path / "many.jpg")


def test_a_corrupt_png_body_is_refused_when_decoded(tmp_path: Path) -> None:
    rows = zlib.compress(b"\0" + b"x" * 30)[:-6]

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 10, 90, 8, 2, 0, 0, 0)
    (tmp_path / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )
    with pytest.raises(DataError, match=r"a\.png"):
        decode(tmp_path / "a.png")


def test_missing_truncated_and_wrongly_sized_images_are_all_named_at_once(tmp_path: Path) -> None:
    good = (SMALL / "images" / "BloodImage_00001.jpg").read_bytes()
    images = [{"id": i, "file_name": f"{i}.jpg", "width": 640, "height": 480} for i in range(30)]
    for i in range(30):
        (tmp_path / f"{i}.jpg").write_bytes(good)
    (tmp_path / "3.jpg").unlink()
    (tmp_path / "5.jpg").write_bytes(good[:9000])
    images[7] |= {"width": 480, "height": 640}
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    annotations = read_content(content, folder=tmp_path, file=tmp_path / "a.json")
    with pytest.raises(DataError) as error:
        verify_images(annotations)
    text = str(error.value)
    assert text.startswith("3 of 30 images cannot be used")
    assert "3.jpg: No such file" in text
    assert "5.jpg: truncated JPEG" in text
    assert "7.jpg: 640 x 480 as displayed" in text
    for path in tmp_path.glob("*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match=r"30 of 30 (?s:.*) and 10 more"):
        verify_images(annotations)


def test_a_whole_data_set_passes_and_is_counted() -> None:
    splits = [Coco().read(SplitRequest(root=SMALL, split=split)) for split in ("train", "val")]
    assert verify_images(*splits, workers=2) == 7
    assert verify_images(splits[0], splits[0]) == 4
