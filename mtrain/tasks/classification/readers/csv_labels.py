"""Read a CSV file with one row per image: its path and its label."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.reading import listed, need_root
from mtrain.data.shards import files_of
from mtrain.data.tables import CsvRow, read_columns
from mtrain.data.texts import Texts
from mtrain.errors import DataError
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.readers.numbering import number_classes


class CsvLabels(Dataset):
    """The ``csv_labels`` data set plugin.

    ``train.csv`` and ``val.csv``, or one file that ``data.split`` divides; ``data.train`` and ``data.val`` name other
    files. Paths start at the folder of the CSV file, or at ``data.images``. The separator may be a comma, a semicolon, a
    tab or a bar. Classes are ``data.names``, or all labels of the training split in order.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True

    class Options(PluginOptions):
        """Names of the columns."""

        path_column: str = Field(default="path", description="column with the image files")
        label_column: str = Field(default="label", description="column with the class names, or numbers from 0")
        separator: str | None = Field(
            default=None,
            min_length=1,
            max_length=1,
            description="character between fields; null: found from the header",
        )

    options: Options

    def read(self, request: SplitRequest) -> LabelledImages:
        """Read one split. Images are not opened.

        Raises:
            DataError: the file or a column is missing, an image occurs twice, or labels are not among ``names``.
        """
        root = need_root(request.root, "csv_labels")
        files = files_of(
            root,
            request.value,
            split=request.split,
            suffixes=(".csv", ".tsv"),
            kind="csv_labels",
            also=("labels", "data"),
        )
        rows = [(file, row) for file in files for row in self._rows(file)]
        folders = {file: file.parent if request.images is None else root / request.images for file in files}
        # Tables that were written under Windows separate folders by backslashes.
        paths = [str(folders[file] / row.fields[0].replace("\\", "/")) for file, row in rows]
        _need_each_once(rows, paths)

        def origin(place: int) -> str:
            file, row = rows[place]
            return f"{file}:{row.line}"

        class_names, labels = number_classes([row.fields[1] for _, row in rows], request.names, origin=origin)
        origins = Texts.of(paths)
        return LabelledImages(
            images=EncodedImages(origins),
            labels=labels,
            class_names=class_names,
            origins=origins,
            keys=Texts.of(row.fields[0] for _, row in rows),
        )

    def _rows(self, file: Path) -> list[CsvRow]:
        options = self.options
        rows = read_columns(
            file,
            (options.path_column, options.label_column),
            separator=options.separator,
            remedy="name the columns with data.options.path_column and data.options.label_column",
        )
        without_path = [f"{file}:{row.line}: no path" for row in rows if not row.fields[0]]
        if without_path:
            raise DataError(f"{len(without_path)} rows have no path; correct or remove them:\n{listed(without_path)}")
        return rows


def _need_each_once(rows: Sequence[tuple[Path, CsvRow]], paths: Sequence[str]) -> None:
    first: dict[str, int] = {}
    problems: list[str] = []
    for place, path in enumerate(paths):
        # Twice the same image may have two labels, and ``data.split`` could put one into each part.
        earlier = first.setdefault(path, place)
        if earlier != place:
            (file, row), (earlier_file, earlier_row) = rows[place], rows[earlier]
            problems.append(f"{file}:{row.line}: {row.fields[0]} is also in {earlier_file.name}:{earlier_row.line}")
    if problems:
        raise DataError(f"{len(problems)} rows repeat an image; each occurs once:\n{listed(problems)}")
