"""Read Parquet files with a column of encoded images and a column of labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.shards import files_of
from mtrain.errors import DataError
from mtrain.spec.bounds import SHARE, available_bytes, bounded_reading, limit_of, memory_limit
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.readers.arrow_columns import (
    DAMAGED,
    Columns,
    Expansion,
    damage_named,
    label_rows,
    pyarrow,
    same_columns,
)

BATCH = 1024
"""Rows that are read at once."""


class ColumnOptions(BaseModel):
    """Names of the columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image_column: str | None = Field(
        default=None, description="column of the images' bytes; null: found by Hugging Face's metadata, or its type"
    )
    label_column: str | None = Field(
        default=None,
        description="column of the labels; null: found by Hugging Face's metadata, or called label or labels",
    )


class Parquet(Dataset):
    """The ``parquet`` data set plugin.

    ``train*.parquet`` and ``val*.parquet`` (or ``validation-...``) anywhere below ``data.root``; ``data.train`` and
    ``data.val`` name files, folders or patterns; ``data.split`` divides one set. Needs pyarrow.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True
    Options = ColumnOptions

    def __init__(self, options: ColumnOptions | None = None) -> None:
        self.options = options or ColumnOptions()

    def read(self, request: SplitRequest) -> LabelledImages:
        """Read one split into memory.

        Raises:
            DataError: pyarrow is missing, files are damaged, columns are missing, labels are not among ``names``, or
            the images do not fit into the memory that is available now.
        """
        if request.images is not None:
            raise DataError("data.images: given, but the images are in the Parquet files; leave it out")
        parquet = pyarrow("pyarrow.parquet", format_name="parquet")
        files = files_of(request.root, request.value, split=request.split, suffixes=(".parquet",), kind="parquet")
        with bounded_reading(files[0], memory_limit(), remedy=DAMAGED):
            opened = [(file, _open_table(parquet, file)) for file in files]
        schemas = [(file, content.schema_arrow) for file, content in opened]
        columns = same_columns(schemas, image=self.options.image_column, label=self.options.label_column)
        # Parquet compresses rows in groups, and training reads rows in random order.
        # So the column of images, as encoded files, is held in memory by each rank.
        _need_memory(opened, columns)
        limit = limit_of(sum(file.stat().st_size for file in files))
        with bounded_reading(_several(files), limit, remedy=DAMAGED):
            rows = Expansion(_several(files), limit)
            tables = [(file, _read(parquet, file, content, columns, rows)) for file, content in opened]
            return label_rows(tables, columns, request.names)


def _open_table(parquet: Any, file: Path) -> Any:
    if not file.is_file():  # opening a named pipe would wait
        raise DataError(f"{file}: not a regular file; expected a Parquet file")
    with damage_named(file, kind="Parquet"):
        return parquet.ParquetFile(file, memory_map=True)


def _read(parquet: Any, file: Path, content: Any, columns: Columns, rows: Expansion) -> list[Any]:
    """Read the two columns of a file in batches."""
    with damage_named(file, kind="Parquet"):
        # A dictionary holds each value once, and one image may be repeated in a million rows: it stays a dictionary.
        content = parquet.ParquetFile(file, memory_map=True, read_dictionary=_dictionaries(content, columns))
        # One thread: loader processes are forked afterwards, and a thread of pyarrow does not survive that.
        return rows.add_up(content.iter_batches(BATCH, columns=[columns.image, columns.label], use_threads=False))


def _dictionaries(content: Any, columns: Columns) -> list[str]:
    """Return the paths of the columns of bytes and text that are stored as dictionaries."""
    metadata = content.metadata
    found: dict[str, bool] = {}
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            chunk = group.column(place)
            if chunk.path_in_schema.split(".")[0] in (columns.image, columns.label):
                is_bytes = chunk.physical_type == "BYTE_ARRAY"
                # One row group with a dictionary is enough: a writer
                # gives it up in later groups, where it grows too large.
                found[chunk.path_in_schema] = is_bytes and (
                    chunk.has_dictionary_page or found.get(chunk.path_in_schema, False)
                )
    return [path for path, is_dictionary in found.items() if is_dictionary]


def _several(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def _need_memory(opened: Sequence[tuple[Path, Any]], columns: Columns) -> None:
    wanted = 0
    for _, content in opened:
        for number in range(content.metadata.num_row_groups):
            group = content.metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            wanted += sum(
                chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == columns.image
            )
    # The metadata say the size before compression, so this is known before anything is read.
    free = available_bytes()
    if wanted > SHARE * free:
        raise DataError(
            f"data.root: the images take {wanted / 2**30:.1f} GiB in memory, {free / 2**30:.1f} GiB are available; write "
            "them with save_to_disk of Hugging Face's datasets and use data.format: huggingface, which reads images from "
            "the disk"
        )
