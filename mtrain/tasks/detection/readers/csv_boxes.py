"""Read boxes from a CSV file with one row per box: ``path,x1,y1,x2,y2,label``, corners in pixels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.once_per_host import once_per_host
from mtrain.data.reading import listed, need_root, size_of
from mtrain.data.shards import files_of
from mtrain.data.tables import CsvRow, read_columns
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import SHARED, AnnotatedImage, Annotations, assemble

COLUMNS = ("path", "x1", "y1", "x2", "y2", "label")


class CsvBoxes(Dataset):
    """The ``csv_boxes`` data set plugin.

    ``train.csv`` and ``val.csv``, or one file that ``data.split`` divides; ``data.train`` and ``data.val`` name other
    files. The first line names the columns; without such a line they are path, x1, y1, x2, y2, label. Corners are in
    pixels. A row with a path alone is an image without boxes. Paths start at the folder of the CSV file, or at
    ``data.images``. Classes are ``data.names``, or all labels of the training split in alphabetical order.
    """

    kind: ClassVar[str] = "detection"
    classes_of_train: ClassVar[bool] = True

    class Options(BaseModel):
        """Names of the columns."""

        model_config = ConfigDict(extra="forbid", frozen=True)
        columns: list[str] = Field(
            default=list(COLUMNS),
            min_length=6,
            max_length=6,
            description="names of the columns of path, left, top, right, bottom and label, in this order",
        )
        separator: str | None = Field(
            default=None,
            min_length=1,
            max_length=1,
            description="character between fields; null: found from the header",
        )

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    @once_per_host(SHARED)
    def read(self, request: SplitRequest) -> Annotations:
        """Read one split.

        Raises:
            DataError: the file or a column is missing, rows are wrong, or labels are not among ``names``. All wrong rows
            are listed with their line.
        """
        root = need_root(request.root, "csv_boxes")
        files = files_of(
            root,
            request.value,
            split=request.split,
            suffixes=(".csv", ".tsv"),
            kind="csv_boxes",
            also=("labels", "data"),
        )
        rows = [(file, row) for file in files for row in self._rows(file)]
        names = request.names
        if names is None:
            names = sorted({row.fields[5] for _, row in rows} - {""})
        labels = {name: number for number, name in enumerate(names)}
        boxes: dict[Path, list[tuple[float, ...]]] = {}
        problems: list[str] = []
        for file, row in rows:
            folder = file.parent if request.images is None else root / request.images
            try:
                box = _box(row, labels)
            except ValueError as error:
                problems.append(f"{file}:{row.line}: {error}")
                continue
            # Also for a row without a box, which is an image to learn from: there is nothing to find on it.
            boxes.setdefault(folder / row.fields[0].replace("\\", "/"), []).extend(box)
        annotated = _images(boxes, root, problems)
        if problems:
            choose = "" if request.names is None else " (data.names names all classes; data.classes chooses some)"
            raise DataError(
                f"{len(problems)} wrong rows or images; correct or remove them{choose}:\n{listed(problems)}"
            )
        return assemble(annotated, class_names=tuple(names), category_ids=tuple(range(1, len(names) + 1)))

    def _rows(self, file: Path) -> list[CsvRow]:
        return read_columns(
            file,
            self.options.columns,
            separator=self.options.separator,
            without_header=True,
            remedy="name the six columns with data.options.columns",
        )


def _box(row: CsvRow, labels: Mapping[str, int]) -> list[tuple[float, ...]]:
    """Return (label, left, top, right, bottom) of a row, or nothing for an image without boxes."""
    path, *corners, label = row.fields
    if not path:
        raise ValueError("no path")
    if not any((*corners, label)):
        return []
    try:
        values = [float(corner) for corner in corners]
    except ValueError:
        # NaN fails the comparison below, so that text and infinite numbers have one message.
        values = [math.nan]
    if not all(abs(value) < 1e9 for value in values):
        raise ValueError(f"corners {', '.join(corners)[:100]}; expected four numbers of pixels")
    left, top, right, bottom = values
    if right < left or bottom < top:
        raise ValueError(f"corners {', '.join(corners)[:100]}; expected left, top, right, bottom, in this order")
    if label not in labels:
        known = f"{', '.join(list(labels)[:20])}{', ...' if len(labels) > 20 else ''}"
        raise ValueError(f"class {label[:100]!r}; expected one of {known}" if label else "no label")
    return [(labels[label], *values)]


def _images(boxes: Mapping[Path, Sequence[tuple[float, ...]]], root: Path, problems: list[str]) -> list[AnnotatedImage]:
    images = []
    for path, rows in boxes.items():
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
        try:
            size_wh = size_of(path)
        except DataError as error:
            problems.append(str(error))
            continue
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        boxes_xywh = np.concatenate([table[:, 1:3], table[:, 3:] - table[:, 1:3]], axis=1)
        image = AnnotatedImage.of(path, name, boxes_xywh, table[:, 0], size_wh=size_wh)
        images.append(replace(image, file_name=name))
    return images
