"""Decode the images of one split, shrink them to the size that the network needs, and cache them if requested.

Sizes are known from the annotations before anything is read. Every cache holds exactly the decoded bytes, so that
training does not depend on the cache."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.decode import decode
from mtrain.data.images.fast_decode import decode_quickly, decode_top
from mtrain.data.images.header import MAX_PIXELS
from mtrain.data.loader.shared_memory import shared_bytes
from mtrain.errors import DataError, SpecError
from mtrain.spec.files import open_file
from mtrain.tasks.detection.annotations import Sample
from mtrain.tasks.detection.cache_size import Sizing

RAM_SHARE = 0.8
"""Largest share of the available memory that the RAM cache may use."""
TOP_SHARE = 0.95
"""Largest share of an image's rows that are decoded alone; with more of them nothing is gained."""


def decode_annotated(sample: Sample) -> NDArray[np.uint8]:
    """Decode the image of a sample, whose size has already been compared with ``data.max_pixels``.

    Raises:
        DataError: as ``decode``.
    """
    return decode(sample.path, max_pixels=max(MAX_PIXELS, sample.width * sample.height))


class RamCache:
    """A cache in anonymous shared memory, one place per image: workers forked later fill and read the same pages."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        """``shapes``: (height, width) of every image.

        Raises:
            SpecError: the images would not fit into the memory that is available now.

        """
        self._shapes = shapes
        sizes = np.array([3 * height * width for height, width in shapes], dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        import psutil  # a slow import, which few jobs need

        total, free = int(self._offsets[-1]), psutil.virtual_memory().available
        if total > RAM_SHARE * free:
            raise SpecError(
                f"data.cache: ram needs {total / 2**30:.1f} GiB for {len(shapes)} images, "
                f"{free / 2**30:.1f} GiB are available; use disk or none, or a smaller data.image_size"
            )
        # Pages are allocated when they are first written, so a cache that never fills takes no memory.
        self._bytes = shared_bytes(total)
        self._ready = shared_bytes(len(shapes))

    def get(self, index: int) -> NDArray[np.uint8] | None:
        """Return a view of the image's place, which must not be written to, once it is filled; else None."""
        return self._place(index) if self._ready[index] else None

    def put(self, index: int, image: NDArray[np.uint8]) -> None:
        """Copy the image into its place. Several processes may store the same one at once."""
        self._place(index)[...] = image
        # After the bytes: whoever sees the flag sees the image. Two
        # workers at once write equal bytes, so no lock is needed.
        self._ready[index] = 1

    def _place(self, index: int) -> NDArray[np.uint8]:
        start, end = self._offsets[index : index + 2]
        return self._bytes[start:end].reshape(*self._shapes[index], 3)


class DiskCache:
    """A cache of one ``.npy`` file per image, named after the source file's path, time and size and the decoding."""

    def __init__(self, folder: Path, samples: Sequence[Sample], *, kind: str) -> None:
        self._folder = folder
        self._samples = samples
        self._kind = kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"data.cache_dir: {folder}: {error.strerror}; name a folder that can be written") from error

    def get(self, index: int) -> NDArray[np.uint8] | None:
        """Return the stored image; a missing or damaged file counts as absent."""
        sample = self._samples[index]
        try:
            # Any fault counts as absent: the image is then read again, and its file is replaced.
            with open_file(self._file(sample)) as content:
                image = np.load(content, allow_pickle=False)
        except (OSError, ValueError, EOFError, MemoryError):
            return None
        return image if isinstance(image, np.ndarray) and image.dtype == np.uint8 else None

    def put(self, index: int, image: NDArray[np.uint8]) -> None:
        """Write the image to the folder.

        Raises:
            DataError: the folder cannot be written, e.g. the disk is full.

        """
        target = self._file(self._samples[index])
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                np.save(file, image, allow_pickle=False)
            # Renamed when it is complete, so that no other process reads half a file.
            Path(temporary).replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise DataError(
                f"data.cache: {target}: {error.strerror}; make room, name another data.cache_dir, or use cache: none"
            ) from error

    def _file(self, sample: Sample) -> Path:
        status = sample.path.stat()
        # With the time and size of the source file: an image that was replaced must not come back from the cache.
        key = f"{sample.path.resolve()}|{status.st_mtime_ns}|{status.st_size}|{self._kind}"
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._folder / f"{digest}.npy"


class Images:
    """The images of a split at the size that ``sizing`` chooses."""

    def __init__(self, samples: Sequence[Sample], sizing: Sizing) -> None:
        self._samples = samples
        self._sizing = sizing
        self._cache: RamCache | DiskCache | None = None
        # A place is 1 once its file was decoded whole, quickly and without a warning, by any loader process.
        self._sound = shared_bytes(len(samples))

    def __len__(self) -> int:
        return len(self._samples)

    def keep(self, where: Literal["none", "ram", "disk"], folder: Path | None = None) -> None:
        """Cache the images from now on; call it before workers are forked. ``folder``: folder of the disk cache.

        Raises:
            SpecError: not enough memory.
            DataError: the folder cannot be made.

        """
        if where == "ram":
            self._cache = RamCache([self._sizing.size_for(self.original_size(i))[::-1] for i in range(len(self))])
        elif where == "disk":
            folder = folder or Path.home() / ".cache" / "mtrain" / "images"
            self._cache = DiskCache(folder, self._samples, kind=self._sizing.key)

    def path(self, index: int) -> Path:
        """Return the image file of a sample."""
        return self._samples[index].path

    def original_size(self, index: int) -> tuple[int, int]:
        """Return (width, height) of the image in the file, as displayed."""
        sample = self._samples[index]
        return sample.width, sample.height

    def boxes(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return (N, 4) xyxy as fractions of width and height, and (N,) labels; crowds are left out."""
        sample = self._samples[index]
        boxes, labels = sample.targets
        return boxes.astype(np.float64) / np.array((sample.width, sample.height) * 2), labels

    def size(self, index: int) -> tuple[int, int]:
        """Return (width, height) of the image that ``load`` returns."""
        return self._sizing.size_for(self.original_size(index))

    def load(self, index: int, *, rows: int | None = None) -> NDArray[np.uint8]:
        """Return the image, uint8 (H, W, 3) RGB, which must not be written to.

        ``rows``: only the first rows are looked at; those below may be missing.

        Raises:
            DataError: the file is unreadable or not of the annotated size.

        """
        if self._cache is None:
            top = None if rows is None else self._top(index, rows)
            return self._read(index) if top is None else top
        image = self._cache.get(index)
        if image is None:
            image = self._read(index)
            self._cache.put(index, image)
        return image

    def _top(self, index: int, rows: int) -> NDArray[np.uint8] | None:
        """Decode the first rows alone where that gives the same pixels, and saves time; else return None."""
        # A file that was never decoded whole may be damaged below these rows.
        if not self._sound[index]:
            return None
        sample, original = self._samples[index], self.original_size(index)
        reduce = self._sizing.reduction(original)
        width, height = (-(-side // reduce) for side in original)
        # A resize after decoding would mix in the rows that are missing.
        if rows > TOP_SHARE * height or self._sizing.size_for(original) != (width, height):
            return None
        return decode_top(sample.path, size=original, rows=rows, reduce=reduce)

    def _read(self, index: int) -> NDArray[np.uint8]:
        sample, sizing, original = self._samples[index], self._sizing, self.original_size(index)
        reduce = sizing.reduction(original)
        # Do not apply the limit again: the annotated size was compared with data.max_pixels when the data set was read.
        max_pixels = max(MAX_PIXELS, sample.width * sample.height)
        quick = None if sizing.exact else decode_quickly(sample.path, reduce=reduce, max_pixels=max_pixels)
        image = decode(sample.path, reduce=reduce, max_pixels=max_pixels) if quick is None else quick
        decoded_hw, expected_hw = image.shape[:2], (-(-sample.height // reduce), -(-sample.width // reduce))
        if decoded_hw != expected_hw:
            raise DataError(
                f"{sample.path}: the image is {decoded_hw[1] * reduce} x {decoded_hw[0] * reduce} pixels, its "
                "annotation says "
                f"{sample.width} x {sample.height}; correct the annotation or the image (`mtrain data check`)"
            )
        self._sound[index] = quick is not None
        return resize(image, original, sizing)


def resize(image: NDArray[np.uint8], original: tuple[int, int], sizing: Sizing) -> NDArray[np.uint8]:
    """Bring a decoded image to the size that ``sizing`` chooses for its original width and height."""
    size = sizing.size_for(original)
    if image.shape[:2] == size[::-1]:
        return image
    return np.asarray(cv2.resize(image, size, interpolation=sizing.method(original)), dtype=np.uint8)
