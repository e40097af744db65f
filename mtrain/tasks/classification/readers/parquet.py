"""Read Parquet files with a column of encoded pictures and a column of labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset
from mtrain.data.reading import Split
from mtrain.data.shards import files_of
from mtrain.errors import DataError
from mtrain.tasks.classification.labels import LabelledPictures
from mtrain.tasks.classification.readers.arrow_columns import Columns, columns_of, labelled, pyarrow

MEMORY_SHARE = 0.8
"""Largest share of the available memory that the pictures may take."""


class ColumnOptions(BaseModel):
    """Names of the columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image_column: str | None = Field(
        default=None, description="column of the pictures' bytes; null: found by Hugging Face's metadata, or its type"
    )
    label_column: str | None = Field(
        default=None,
        description="column of the labels; null: found by Hugging Face's metadata, or called label or labels",
    )


class Parquet(Dataset):
    """The ``parquet`` data set plugin.

    ``train*.parquet`` and ``val*.parquet`` (or ``validation-...``) anywhere below ``data.root``; ``data.train`` and
    ``data.val`` name files, folders or patterns; ``data.split`` divides one set. Needs pyarrow.

    Parquet compresses rows in groups, and training reads rows in random order. So the column of pictures, as
    encoded files, is held in memory by each rank.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True
    Options = ColumnOptions

    def __init__(self, options: ColumnOptions | None = None) -> None:
        self.options = options or ColumnOptions()

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> LabelledPictures:
        """Read one split into memory.

        Raises:
            DataError: pyarrow is missing, files are damaged, columns are missing, labels are not among ``names``, or
            the pictures do not fit into the memory that is available now.
        """
        if images is not None:
            raise DataError("data.images: given, but the pictures are in the Parquet files; leave it out")
        parquet = pyarrow("pyarrow.parquet", format_name="parquet")
        files = files_of(root, split_value, split=split, suffixes=(".parquet",), kind="parquet")
        opened = [(file, _opened(parquet, file)) for file in files]
        first, schema = files[0], opened[0][1].schema_arrow
        columns = columns_of(schema, image=self.options.image_column, label=self.options.label_column, file=first)
        for file, content in opened:
            if not set(content.schema_arrow.names) >= {columns.image, columns.label}:
                raise DataError(f"{file}: no columns {columns.image!r} and {columns.label!r}, which {first.name} has")
        _need_memory(opened, columns)
        tables = [(file, _read(content, columns, file)) for file, content in opened]
        return labelled(tables, columns, names)


def _opened(parquet: Any, file: Path) -> Any:
    if not file.is_file():  # opening a named pipe would wait
        raise DataError(f"{file}: not a regular file; expected a Parquet file")
    try:
        return parquet.ParquetFile(file, memory_map=True)
    except Exception as error:  # a damaged file can raise any exception inside the library
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{file}: not a readable Parquet file ({reason}); write it anew or remove it") from error


def _read(content: Any, columns: Columns, file: Path) -> Any:
    try:
        return content.read(columns=[columns.image, columns.label], use_threads=False)
    except Exception as error:  # see above
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{file}: damaged ({reason}); write it anew or remove it") from error


def _need_memory(opened: Sequence[tuple[Path, Any]], columns: Columns) -> None:
    wanted = 0
    for _, content in opened:
        for number in range(content.metadata.num_row_groups):
            group = content.metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            wanted += sum(
                chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == columns.image
            )
    free = psutil.virtual_memory().available
    if wanted > MEMORY_SHARE * free:
        raise DataError(
            f"data.root: the pictures take {wanted / 2**30:.1f} GiB in memory, {free / 2**30:.1f} GiB are available; write "
            "them with save_to_disk of Hugging Face's datasets and use data.format: huggingface, which reads pictures from "
            "the disk"
        )
