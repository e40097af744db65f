"""Describe a detection data set in tables and sentences, as ``mtrain data check`` prints them."""

from collections.abc import Iterator, Mapping

from mtrain.core.interfaces import Remark, Table
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.evaluator import NO_BOXES, box_counts, warn_of_crowds
from mtrain.tasks.detection.label_statistics import class_histogram, image_sizes, size_histogram
from mtrain.tasks.detection.scoring import COCO_DETECTIONS
from mtrain.tasks.tables import class_table


def describe(splits: Mapping[str, Annotations], *, max_detections: int = COCO_DETECTIONS) -> list[Table | Remark]:
    """Return counts per split, histograms of classes and sizes, and remarks about bad boxes.

    ``max_detections``: number of predictions per image that are scored.
    """
    counts = {split: class_histogram(annotations) for split, annotations in splits.items()}
    parts: list[Table | Remark] = [_totals(splits, counts), class_table(counts, unit="boxes"), *_remarks(splits)]
    if "val" in splits:
        warning = warn_of_crowds(splits["val"], max_detections)
        parts += [] if warning is None else [Remark(text=f"val: {warning}", good=False)]
        parts += [] if box_counts(splits["val"]).any() else [Remark(text=f"val: {NO_BOXES}", good=False)]
    return parts


def _totals(splits: Mapping[str, Annotations], counts: Mapping[str, Mapping[str, int]]) -> Table:
    sizes = [size_histogram(annotations) for annotations in splits.values()]
    every = splits.values()
    rows: list[tuple[str, ...] | None] = [
        ("images", *(str(len(a)) for a in every)),
        ("  without a box", *(str(sum(not len(s.boxes) for s in a.samples)) for a in every)),
        ("boxes", *(str(sum(c.values())) for c in counts.values())),
        ("crowd boxes", *(str(sum(int(s.crowd.sum()) for s in a.samples)) for a in every)),
        None,
    ]
    for size, span in (("small", "< 32 x 32 px"), ("medium", "between"), ("large", "> 96 x 96 px")):
        rows.append((f"{size} ({span})", *(str(s[size]) for s in sizes)))
    return Table(columns=("", *splits), rows=rows)


def _remarks(splits: Mapping[str, Annotations]) -> Iterator[Remark]:
    for split, annotations in splits.items():
        common = list(image_sizes(annotations).items())
        listing = ", ".join(f"{w} x {h}: {count}" for (w, h), count in common[:4])
        more = f" and {len(common) - 4} other sizes" if len(common) > 4 else ""
        yield Remark(text=f"{split} image sizes: {listing}{more}")
        problems = annotations.report()
        for sentence in problems or ["no bad boxes"]:
            yield Remark(text=f"{split}: {sentence}", good=not problems)
