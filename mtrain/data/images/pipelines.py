"""Apply a user's albumentations pipeline to images, with random numbers that (seed, epoch, index) determine.

albumentations is imported when a pipeline is read. Its transforms have generators of their own, which no global seed
reaches, and ``Compose.set_random_seed`` gives every one of them the same seed: two flips of a pipeline would then always
happen together. So each transform is given a seed of its own for each sample.
"""

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.section import PIPELINE_FILES
from mtrain.data.objects import first_unrepeatable
from mtrain.errors import DataError, PluginError
from mtrain.spec import references, yaml_reader
from mtrain.spec.files import parse_json, read_text
from mtrain.spec.remedies import install

KEY = "data.augment.albumentations"
MAX_BYTES = 1 << 20
"""Largest file of a pipeline that is read, in bytes."""
_BOX_LIMITS = ("min_area", "min_visibility", "min_width", "min_height", "max_accept_ratio")
"""Parameters of a pipeline's own ``BboxParams`` that are kept."""


class Pipeline:
    """A pipeline of albumentations. ``reference``: a file that ``albumentations.save`` has written, or ``aug.py:make``."""

    def __init__(self, reference: str, *, boxes: bool = False) -> None:
        """``boxes``: it is called with boxes.

        Raises:
            DataError: albumentations is not installed, or the reference gives no pipeline.
        """
        self.reference = reference
        with _alone():
            try:
                library: Any = importlib.import_module("albumentations")
            except ImportError as error:
                raise DataError(
                    f"{KEY}: {reference} needs albumentations, which cannot be imported ({error}); install it with: "
                    f"{install('data')}"
                ) from error
            composed = _make(reference, library)
            if not isinstance(composed, library.Compose):
                raise DataError(
                    f"{KEY}: {reference} gives a {type(composed).__name__}; expected an albumentations.Compose"
                )
            self._composed = _with_boxes(composed, library) if boxes else composed
        self._transforms = list(_all_transforms(self._composed))

    def apply(self, image: NDArray[np.uint8], key: Sequence[int], *, origin: str) -> NDArray[np.uint8]:
        """Return the transformed image (H, W, 3) of any size.

        Args:
            image: uint8 (H, W, 3) RGB; it is not changed.
            key: seed, epoch and index of the sample.
            origin: description of the image, for messages.

        Raises:
            DataError: the pipeline fails, or its result is no uint8 image.
        """
        return self._check(self._run(key, origin, image=image.copy())["image"], origin)

    def apply_with_boxes(
        self,
        image: NDArray[np.uint8],
        boxes_N4: NDArray[np.float64],
        labels_N: NDArray[np.int64],
        key: Sequence[int],
        *,
        origin: str,
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.int64]]:
        """Return the transformed image with boxes, xyxy in pixels, and labels of those that are left.

        Raises:
            DataError: as ``apply``.
        """
        height, width = image.shape[:2]
        limits = np.array([width, height] * 2, dtype=np.float64)
        clipped = np.clip(boxes_N4, 0.0, limits)
        result = self._run(key, origin, image=image.copy(), bboxes=clipped, labels=labels_N)
        boxes = np.asarray(result["bboxes"], dtype=np.float64).reshape(-1, 4)
        labels = np.asarray(result["labels"]).reshape(-1).astype(np.int64)
        return self._check(result["image"], origin), boxes, labels

    def _run(self, key: Sequence[int], origin: str, **data: Any) -> Any:
        words = np.random.SeedSequence(list(key)).generate_state(len(self._transforms) + 2)
        for transform, word in zip(self._transforms, words.tolist()[:-2], strict=True):
            transform.set_random_seed(word)
        # Functions of users may draw from the global generators.
        random.seed(int(words[-2]))
        np.random.seed(int(words[-1]))
        try:
            return self._composed(**data)
        except Exception as error:  # a user's transform may raise any exception
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DataError(f"{KEY}: {self.reference} fails on {origin} ({reason}); correct the pipeline") from error

    def _check(self, image: Any, origin: str) -> NDArray[np.uint8]:
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            return image
        kind = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise DataError(
            f"{KEY}: {self.reference} makes {kind} of {origin}; expected a uint8 image (H, W, 3): leave out Normalize and "
            "ToTensorV2, because models normalise pixels themselves"
        )


def need_repeatable(sample: Callable[[int], Any], length: int, reference: str) -> None:
    """Refuse a pipeline that answers differently when it is asked twice for one of the first samples.

    Raises:
        DataError: it does.
    """
    index = first_unrepeatable(sample, length)
    if index is not None:
        raise DataError(
            f"{KEY}: {reference} gives two different results for sample {index} with the same seeds; expected transforms that "
            "draw from albumentations' generators, random or numpy.random, and keep nothing between calls"
        )


def _all_transforms(node: Any) -> Iterator[Any]:
    """Yield a transform and all transforms within it. Seeding one seeds those within it, so it comes before them."""
    yield node
    for inner in getattr(node, "transforms", ()):
        if hasattr(inner, "set_random_seed"):
            yield from _all_transforms(inner)


def _make(reference: str, library: Any) -> Any:
    if references.is_reference(reference) and not reference.lower().endswith(PIPELINE_FILES):
        return _from_code(reference)
    path = Path(reference).expanduser()
    if not reference.lower().endswith(PIPELINE_FILES):
        raise DataError(
            f"{KEY}: given {reference!r}, expected a .yml, .yaml or .json file that albumentations.save has written, or "
            "FILE.py:FUNCTION"
        )
    try:
        text = read_text(path, limit=MAX_BYTES)
    except OSError as error:
        raise DataError(f"{KEY}: {path}: {error.strerror}; paths are relative to the spec") from error
    except ValueError as error:
        raise DataError(f"{KEY}: {path}: {error}") from error
    try:
        content = parse_json(text) if path.suffix.lower() == ".json" else _parsed_yaml(text, path)
        return library.from_dict(content)
    except Exception as error:  # a wrong argument raises any exception in the library
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"{KEY}: {path} is no pipeline that albumentations {library.__version__} can build ({reason}); write it with "
            "albumentations.save"
        ) from error


def _parsed_yaml(text: str, path: Path) -> Any:
    parsed = yaml_reader.parse(text, name=str(path))
    if parsed.problems:
        raise ValueError(parsed.problems[0])
    return parsed.values


def _from_code(reference: str) -> Any:
    """Call the function that a reference ``FILE.py:FUNCTION`` names. This runs the user's code."""
    try:
        function = references.import_object(references.parse(reference))
    except PluginError as error:
        raise DataError(f"{KEY}: {error}") from error
    try:
        return function()
    except Exception as error:  # a user's function may raise any exception
        raise DataError(f"{KEY}: {reference} cannot be called ({references.tell_error(error)})") from error


def _with_boxes(composed: Any, library: Any) -> Any:
    """Return a pipeline that takes boxes in mtrain's form; the limits of its own ``BboxParams`` are kept."""
    own = composed.processors.get("bboxes")
    kept = {name: getattr(own.params, name) for name in _BOX_LIMITS if own is not None and hasattr(own.params, name)}
    params = library.BboxParams(format="pascal_voc", label_fields=["labels"], clip=True, **kept)
    return library.Compose(list(composed.transforms), bbox_params=params, p=composed.p)


@contextmanager
def _alone() -> Iterator[None]:
    """Import albumentations without torch, and without its request for the newest version over the network.

    It imports torch for ``ToTensorV2`` where torch is installed. A rank on Paddle must not load it, and loader
    processes are forked before a rank loads it.
    """
    former = os.environ.get("NO_ALBUMENTATIONS_UPDATE")
    hidden = [name for name in ("torch",) if name not in sys.modules]
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to make an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if former is None:
            del os.environ["NO_ALBUMENTATIONS_UPDATE"]
        else:
            os.environ["NO_ALBUMENTATIONS_UPDATE"] = former
