"""The result of every annotation reader: images with boxes, cleaned for training and unchanged for evaluation.

A reader fills one :class:`AnnotatedImage` per image with the content of its files; :func:`assemble` turns them into
:class:`Annotations`. Letters of shapes: N boxes of one image.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.data.classes import LEFT_OUT, ClassChoice
from mtrain.data.lazy_rows import LazyRows
from mtrain.data.once_per_host import LEAST_IMAGES, Form, read_once
from mtrain.data.reading import divide
from mtrain.data.texts import Arrays, Texts
from mtrain.errors import DataError

SLACK_PX = 1.0
"""Distance in pixels by which a box may leave its image and be clipped without being counted: it is due to
rounding."""

PROBLEMS = {
    "zero_area": "boxes without area, dropped for training",
    "outside": "boxes outside their image, dropped for training",
    "duplicate": "boxes repeated with the same class, dropped for training",
    "clipped": "boxes partly outside their image, clipped for training",
}
"""Kinds of bad boxes with their meaning, as :attr:`Annotations.problems` counts them."""


# A split of 117,000 images takes a fraction of the memory this way. What counts more: the loader's processes are forks of the
# rank, and share its memory until they write to it. Python writes to an object's count of references whenever it is used, so
# each process would soon hold a copy of all small objects; the content of a large array stays shared.
class Ids:
    """The ids of images: an array where all are whole numbers of 64 bits, else texts in JSON."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._numbers = arrays.get("numbers")
        self._texts = None if self._numbers is not None else Texts(arrays)

    @classmethod
    def of(cls, ids: Sequence[int | str]) -> "Ids":
        """Keep ids."""
        # ``type`` and not ``isinstance``, for which True is a whole number and would come back as 1.
        if all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in ids):
            return cls({"numbers": np.array(ids, dtype=np.int64)})
        return cls(Texts.of(json.dumps(each) for each in ids).arrays)

    def __getitem__(self, index: int) -> int | str:
        """Return one id."""
        if self._numbers is not None:
            return int(self._numbers[index])
        assert self._texts is not None
        # JSON keeps the id 1 apart from the id "1": both may occur in one annotation file.
        text: int | str = json.loads(self._texts[index])
        return text


class Ragged:
    """Arrays of different lengths, one after the other in one array."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._ends, self._content = arrays["ends"], arrays["content"]

    @classmethod
    def of(cls, parts: Sequence[NDArray[Any]], like: NDArray[Any]) -> "Ragged":
        """Keep arrays. ``like``: an empty array of the dtype and of the further axes, for no parts at all."""
        content = np.concatenate([like, *parts])
        # Parts are handed out as views: whoever writes into one would change the sample for all later epochs.
        content.setflags(write=False)
        return cls({"ends": np.cumsum([0, *map(len, parts)], dtype=np.int64), "content": content})

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return one part, a view that cannot be written to."""
        return self._content[self._ends[index] : self._ends[index + 1]]


def join_arrays(parts: Mapping[str, "Texts | Ids | Ragged | Places"]) -> dict[str, NDArray[Any]]:
    """Return the arrays of several objects by name, as in ``paths/ends``."""
    return {f"{name}/{key}": array for name, part in parts.items() for key, array in part.arrays.items()}


def within(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays of one of the objects that were ``join_arrays``."""
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}


class Places:
    """Path, id and size of images."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._paths, self._ids = Texts(within(arrays, "paths")), Ids(within(arrays, "ids"))
        self._sizes = arrays["sizes"]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "Places":
        """Keep those of ``rows``: anything with ``path``, ``image_id``, ``width`` and ``height``."""
        parts: dict[str, Texts | Ids | Ragged | Places] = {
            "paths": Texts.of(str(row.path) for row in rows),
            "ids": Ids.of([row.image_id for row in rows]),
        }
        sizes = np.array([(row.width, row.height) for row in rows], dtype=np.int64).reshape(-1, 2)
        return cls({**join_arrays(parts), "sizes": sizes})

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of one image, by name."""
        width, height = self._sizes[index].tolist()
        return {"path": Path(self._paths[index]), "image_id": self._ids[index], "width": width, "height": height}


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One image and its boxes, before any augmentation. All boxes have an area and lie inside the image."""

    path: Path
    """Image file."""
    image_id: int | str
    """The annotation file's id, which evaluation uses."""
    width: int
    """Pixels as displayed, that is, after EXIF rotation."""
    height: int
    boxes: NDArray[np.float32]
    """(N, 4) xyxy in pixels."""
    labels: NDArray[np.int64]
    """(N,) class index, 0 .. number of classes - 1."""
    crowd: NDArray[np.bool_]
    """(N,) True if the box surrounds a group: it is no training target and is ignored in evaluation."""
    area: NDArray[np.float64]
    """(N,) area in square pixels as annotated, which is not always width x height."""

    @property
    def targets(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return boxes (M, 4) and labels (M,) to train on: all except crowds."""
        if not self.crowd.any():
            return self.boxes, self.labels
        return self.boxes[~self.crowd], self.labels[~self.crowd]


@dataclass(frozen=True, slots=True, eq=False)
class AnnotatedImage:
    """The unchanged content of an annotation file about one image."""

    path: Path
    file_name: str
    image_id: int | str
    width: int
    height: int
    boxes_xywh: NDArray[np.float64]
    """(N, 4) left, top, width, height in pixels."""
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        path: Path,
        image_id: int | str,
        boxes_xywh: NDArray[np.float64],
        labels: Any,
        *,
        size_wh: tuple[int, int],
        crowd: Sequence[bool] | None = None,
    ) -> "AnnotatedImage":
        """Return an image called as its file, whose boxes have the areas of their sides; ``crowd``: None: no box is one."""
        crowds = np.zeros(len(boxes_xywh), np.bool_) if crowd is None else np.array(crowd, np.bool_)
        areas = boxes_xywh[:, 2] * boxes_xywh[:, 3]
        return cls(path, path.name, image_id, *size_wh, boxes_xywh, np.array(labels, np.int64), crowds, areas)


@dataclass(frozen=True)
class Annotations:
    """One split of a data set."""

    samples: Sequence[Sample]
    """Sorted by file name, then id: the order never depends on the file system or the annotation file."""
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    """Id of each label in the annotation file: ``category_ids[label]``."""
    problems: Mapping[str, int]
    """Number of boxes of each kind of :data:`PROBLEMS`; kinds that do not occur are left out."""
    ground_truth: Mapping[str, Any]
    """COCO form (images, annotations, categories) with original ids and unchanged boxes, for evaluation."""
    notes: Sequence[str] = field(default=())
    """Sentences about other anomalies, e.g. label files without an image."""
    images: Sequence[AnnotatedImage] = field(default=())
    """The unchanged content of the annotation files, in the order of ``samples``."""
    arrays: Arrays = field(default_factory=dict)
    """The arrays that all of it is made of, by name; empty where it was not assembled from images."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return what ``from_arrays`` needs beside the arrays, as plain values."""
        return {
            "class_names": list(self.class_names),
            "category_ids": list(self.category_ids),
            "problems": dict(self.problems),
            "notes": list(self.notes),
        }

    def __len__(self) -> int:
        return len(self.samples)

    def report(self) -> list[str]:
        """Return one sentence per kind of problem; empty if the split is clean."""
        return [f"{PROBLEMS.get(kind, kind)}: {count}" for kind, count in self.problems.items()] + list(self.notes)

    def subset(self, images: Sequence[AnnotatedImage], *, notes: Sequence[str]) -> "Annotations":
        """Return some of the images, with the same classes."""
        return assemble(images, class_names=self.class_names, category_ids=self.category_ids, notes=notes)

    def with_classes(self, choice: ClassChoice) -> "Annotations":
        """Return the images with the boxes of some classes, under their new names; images without a box stay."""
        return read_once(lambda: self._with_classes(choice), key=choice.key, form=SHARED)

    def _with_classes(self, choice: ClassChoice) -> "Annotations":
        counts = np.zeros(len(choice.known), np.int64)
        images, emptied = [], 0
        for image in self.images:
            counts += np.bincount(image.labels, minlength=len(counts))
            labels = choice.label_of[image.labels]
            kept = labels != LEFT_OUT
            emptied += bool(len(kept)) and not kept.any()
            parts = {name: getattr(image, name)[kept] for name in ("boxes_xywh", "crowd", "area")}
            images.append(replace(image, labels=labels[kept], **parts))
        told = choice.describe(counts.tolist(), unit="boxes")
        if emptied:
            told += f"; {emptied} of {len(images)} images have no box left and stay, as images with nothing to find"
        ids = [self.category_ids[first] for first in choice.firsts]
        return assemble(images, class_names=choice.names, category_ids=ids, notes=[*self.notes, told])

    def divide(self, share: float, *, seed: int) -> "tuple[Annotations, Annotations]":
        """Divide the split into a training part and an evaluation part with ``share`` of the images, at least one in each.

        The parts are the same on every host and for any order of listing.

        Raises:
            DataError: there are fewer than two images.
        """
        images = self.images
        if len(images) < 2:
            raise DataError(f"data.split: {len(images)} images cannot be divided; give at least two, or leave it out")
        train, evaluation = divide([f"{image.file_name}\0{image.image_id}" for image in images], share, seed=seed)
        return (
            self.subset([images[place] for place in train], notes=self.notes),
            self.subset([images[place] for place in evaluation], notes=()),
        )


class GroundTruth(Mapping[str, Any]):
    """A mapping in COCO form whose lists are built on access."""

    def __init__(
        self, images: Sequence[AnnotatedImage], *, class_names: Sequence[str], category_ids: Sequence[int]
    ) -> None:
        self._images = images
        self._names = tuple(class_names)
        self._ids = tuple(category_ids)

    def __getitem__(self, key: str) -> list[dict[str, Any]]:
        # Built on access and not kept: only evaluation asks for them, and a training split must not pay for them.
        makers = {"images": self._image_rows, "annotations": self._annotations, "categories": self._categories}
        return makers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(("images", "annotations", "categories"))

    def __len__(self) -> int:
        return 3

    def _image_rows(self) -> list[dict[str, Any]]:
        return [
            {"id": p.image_id, "file_name": p.file_name, "width": p.width, "height": p.height} for p in self._images
        ]

    def _annotations(self) -> list[dict[str, Any]]:
        rows = (
            (p.image_id, self._ids[label], box, area, crowd)
            for p in self._images
            for box, label, crowd, area in zip(
                p.boxes_xywh.tolist(), p.labels.tolist(), p.crowd.tolist(), p.area.tolist(), strict=True
            )
        )
        return [
            {"id": i, "image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": int(crowd)}
            for i, (image, category, box, area, crowd) in enumerate(rows, start=1)
        ]

    def _categories(self) -> list[dict[str, Any]]:
        return [{"id": i, "name": name} for i, name in zip(self._ids, self._names, strict=True)]


def clean(image: AnnotatedImage, problems: Counter[str]) -> Sample:
    """Make an image's boxes fit for training; count in ``problems`` what is dropped or clipped."""
    corners = np.concatenate([image.boxes_xywh[:, :2], image.boxes_xywh[:, :2] + image.boxes_xywh[:, 2:]], axis=1)
    limit = np.array([image.width, image.height] * 2, dtype=np.float64)
    boxes = np.clip(corners, 0.0, limit).astype(np.float32)
    flat = (image.boxes_xywh[:, 2:] <= 0).any(axis=1)
    # Each bad box is counted once, under the first reason that applies to it.
    outside = ~flat & ((boxes[:, 2:] - boxes[:, :2]) <= 0).any(axis=1)
    keep = ~(flat | outside)
    repeated = keep & _repeats(boxes, image.labels, keep)
    keep &= ~repeated
    # Corners are compared in float64, as they were annotated: a box that only lost digits in float32 was not clipped.
    clipped = keep & (np.abs(boxes - corners) > SLACK_PX).any(axis=1)
    counts = {"zero_area": flat, "outside": outside, "duplicate": repeated, "clipped": clipped}
    problems.update({kind: int(mask.sum()) for kind, mask in counts.items() if mask.any()})
    return Sample(
        path=image.path,
        image_id=image.image_id,
        width=image.width,
        height=image.height,
        boxes=np.ascontiguousarray(boxes[keep]),
        labels=image.labels[keep],
        crowd=image.crowd[keep],
        area=image.area[keep],
    )


def _repeats(boxes: NDArray[np.float32], labels: NDArray[np.int64], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (N,) True where an earlier valid box has the same corners and the same class."""
    repeated = np.zeros(len(boxes), dtype=np.bool_)
    earlier: set[tuple[float, ...]] = set()
    for i in np.flatnonzero(valid).tolist():
        key = (*boxes[i].tolist(), float(labels[i]))
        repeated[i] = key in earlier
        earlier.add(key)
    return repeated


def _columns(rows: Sequence[Sample] | Sequence[AnnotatedImage]) -> dict[str, Ragged]:
    return {
        "labels": Ragged.of([row.labels for row in rows], np.zeros(0, dtype=np.int64)),
        "crowd": Ragged.of([row.crowd for row in rows], np.zeros(0, dtype=np.bool_)),
        "area": Ragged.of([row.area for row in rows], np.zeros(0, dtype=np.float64)),
    }


def _parts(columns: Mapping[str, Ragged], index: int) -> dict[str, Any]:
    return {name: column[index] for name, column in columns.items()}


def assemble(
    images: Sequence[AnnotatedImage],
    *,
    class_names: Sequence[str],
    category_ids: Sequence[int],
    notes: Sequence[str] = (),
) -> Annotations:
    """Sort, clean and count images. Their ids must be unique, and their labels indices into ``class_names``.

    The result holds arrays of all images, and not the objects that were given.
    """
    # Sorted, so that sample number i is the same whatever the file system or the annotation file
    # lists first; ids as text, because numbers and texts may occur side by side and do not compare.
    ordered = sorted(images, key=lambda p: (p.file_name, str(p.image_id)))
    problems: Counter[str] = Counter()
    samples = [clean(image, problems) for image in ordered]
    trained = {**_columns(samples), "boxes": Ragged.of([s.boxes for s in samples], np.zeros((0, 4), dtype=np.float32))}
    boxes = Ragged.of([image.boxes_xywh for image in ordered], np.zeros((0, 4), dtype=np.float64))
    arrays = {
        **join_arrays({"places": Places.of(ordered), "names": Texts.of(image.file_name for image in ordered)}),
        **{f"samples/{key}": array for key, array in join_arrays(trained).items()},
        **{f"images/{key}": array for key, array in join_arrays({**_columns(ordered), "boxes_xywh": boxes}).items()},
    }
    counted = {kind: problems[kind] for kind in PROBLEMS if problems[kind]}
    facts = {"class_names": class_names, "category_ids": category_ids, "problems": counted, "notes": notes}
    return from_arrays(arrays, facts)


def from_arrays(arrays: Arrays, facts: Mapping[str, Any]) -> Annotations:
    """Return the annotations whose ``arrays`` and ``facts`` these are, also those of another process."""
    places, names = Places(within(arrays, "places")), Texts(within(arrays, "names"))
    of_samples, of_images = (
        {key: Ragged(within(within(arrays, kind), key)) for key in ("labels", "crowd", "area", boxes)}
        for kind, boxes in (("samples", "boxes"), ("images", "boxes_xywh"))
    )
    count = len(arrays["places/sizes"])
    samples: Sequence[Sample] = LazyRows(
        count, lambda index: Sample(**places.fields(index), **_parts(of_samples, index))
    )
    images: Sequence[AnnotatedImage] = LazyRows(
        count,
        lambda index: AnnotatedImage(**places.fields(index), file_name=names[index], **_parts(of_images, index)),
    )
    class_names, category_ids = tuple(facts["class_names"]), tuple(facts["category_ids"])
    return Annotations(
        samples=samples,
        class_names=class_names,
        category_ids=category_ids,
        problems=dict(facts["problems"]),
        ground_truth=GroundTruth(images, class_names=class_names, category_ids=category_ids),
        notes=tuple(facts["notes"]),
        images=images,
        arrays=arrays,
    )


def _parts_to_share(annotations: Annotations) -> tuple[Arrays, dict[str, Any]] | None:
    return None if len(annotations) < LEAST_IMAGES else (annotations.arrays, annotations.facts)


SHARED = Form(take_apart=_parts_to_share, put_together=from_arrays)
"""How the ranks of a host share annotations, where there are many images."""
