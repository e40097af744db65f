"""Images and labels in the columns of Arrow tables, as Hugging Face and others store them. Needs pyarrow."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.header import read_image
from mtrain.data.reading import listed, order_names
from mtrain.data.texts import Texts
from mtrain.errors import DataError
from mtrain.spec.files import parse_json
from mtrain.spec.remedies import install
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.readers.numbering import number_classes


def pyarrow(module: str = "pyarrow", *, format_name: str) -> Any:
    """Import pyarrow, or a module of it.

    Raises:
        DataError: it is not installed; the message says how to install it.
    """
    try:
        # Imported when a data set is read: pyarrow is an optional dependency, and a plan is printed without it.
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"data.format: {format_name} needs pyarrow, which cannot be imported ({error}); install it with: "
            f"{install('data')}"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a table that hold images and labels."""

    image: str
    label: str
    class_names: tuple[str, ...] | None
    """Names that the table's metadata give to the labels 0, 1, ..."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnContents:
    """Rows of columns with encoded images. Implements ``Contents``."""

    chunks: Sequence[Any]
    """Arrow arrays of bytes, or of structures with the fields ``bytes`` and ``path``."""
    folders: Sequence[Path]
    """Folder at which a ``path`` starts, for each chunk."""
    starts: NDArray[np.int64]
    """Row at which each chunk begins."""
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        """See ``Contents.read``."""
        row = int(self.rows[index])
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        value = self.chunks[number][row - int(self.starts[number])].as_py()
        if isinstance(value, Mapping):
            # Hugging Face stores the content of an image file, or only its path where the set was not copied.
            if value.get("bytes") is None and isinstance(value.get("path"), str):
                return read_image(self.folders[number] / value["path"])
            value = value.get("bytes")
        if value is None:
            raise OSError(None, "no image in this row")
        content: bytes = value
        return content

    def chosen(self, indices: Sequence[int]) -> "ColumnContents":
        """See ``Contents.chosen``."""
        return replace(self, rows=self.rows[np.array(indices, dtype=np.int64)])


DAMAGED = (
    "files of images do not grow like that when they are read: one may be damaged, or made to fill the memory; write them "
    "anew, or divide them"
)
ROW_BYTES = 600
"""Memory of a row besides its columns: its name, its place and its label."""


@contextmanager
def damage_named(file: Path, *, kind: str) -> Iterator[None]:
    """Raise a ``DataError`` that names the file for whatever pyarrow raises: a damaged file can raise any exception."""
    try:
        yield
    except (MemoryError, DataError):  # ``bounded_reading`` words the first, and the second has words already
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{file}: not a readable {kind} file ({reason}); write it anew or remove it") from error


class Expansion:
    """Adds up the memory that tables take while they are read, and refuses more than ``limit`` bytes."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self._arrow = pyarrow(format_name="")
        self._before = self._arrow.total_allocated_bytes()
        self._rows = 0

    def add_up(self, batches: Iterable[Any]) -> list[Any]:
        """Return the record batches, added up one by one.

        Raises:
            DataError: as ``add``.
        """
        kept = []
        for batch in batches:
            self.add(len(batch))
            kept.append(batch)
        return kept

    def add(self, rows: int) -> None:
        """Add some rows.

        Raises:
            DataError: All of them take too much memory; the message says how much.
        """
        self._rows += rows
        # Arrow allocates outside of Python's heap, so its own count is taken, and rows in Python are estimated.
        taken = self._arrow.total_allocated_bytes() - self._before + self._rows * ROW_BYTES
        if taken > self._limit:
            raise DataError(
                f"{self._what}: {self._rows} rows take {taken / 2**30:.1f} GiB of memory, more than the "
                f"{self._limit / 2**30:.1f} GiB that files of this size may; {DAMAGED}"
            )


def same_columns(schemas: Sequence[tuple[Path, Any]], *, image: str | None, label: str | None) -> Columns:
    """Return the columns of the first of several tables, given with their files, which all of them must have.

    Raises:
        DataError: as ``columns_of``, or a table lacks one.
    """
    first, schema = schemas[0]
    columns = columns_of(schema, image=image, label=label, file=first)
    for file, other in schemas:
        if not set(other.names) >= {columns.image, columns.label}:
            raise DataError(f"{file}: no columns {columns.image!r} and {columns.label!r}, which {first.name} has")
    return columns


def columns_of(schema: Any, *, image: str | None, label: str | None, file: Path) -> Columns:
    """Find the columns of images and labels in the schema of an Arrow table.

    Those that Hugging Face's metadata call ``Image`` and ``ClassLabel`` are taken; without metadata, the only column of
    bytes, and ``label`` or ``labels``.

    Args:
        schema: Schema of the table.
        image: Name that the spec gives to the column of images; None: it is found.
        label: The same for labels.
        file: File of the table, for messages.

    Raises:
        DataError: a column is missing or not clear.
    """
    features = _features(schema)
    of_type = {
        kind: [name for name, value in features.items() if value.get("_type") == kind]
        for kind in ("Image", "ClassLabel")
    }
    holding = [field.name for field in schema if _holds_images(field.type)]
    images = of_type["Image"] or holding
    labels = of_type["ClassLabel"] or [name for name in ("label", "labels") if name in schema.names]
    # Metadata are explicit, so they come before a guess by type and name; the spec comes before both.
    image = _only(images, image, schema.names, what="image_column", file=file)
    label = _only(labels, label, schema.names, what="label_column", file=file)
    if image not in holding:
        raise DataError(
            f"{file}: the column {image!r} is of the type {schema.field(image).type}; expected bytes of image files, or "
            "structures of bytes and path; set data.options.image_column"
        )
    if not _holds_labels(schema.field(label).type):
        raise DataError(
            f"{file}: the column {label!r} is of the type {schema.field(label).type}; expected whole numbers or text; set "
            "data.options.label_column"
        )
    names: Any = features.get(label, {}).get("names")
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return Columns(image=image, label=label, class_names=tuple(names) if are_names else None)


def label_rows(
    tables: Sequence[tuple[Path, Sequence[Any]]], columns: Columns, names: Sequence[str] | None
) -> LabelledImages:
    """Make a split of record batches that have ``columns``, with their files.

    Raises:
        DataError: a label is missing or not among the classes, or the content of a table is damaged.
    """
    chunks: list[Any] = []
    folders: list[Path] = []
    values: list[Any] = []
    places: list[tuple[Path, int]] = []
    for file, batches in tables:
        row = 0
        for batch in batches:
            try:
                # Offsets in the file may point anywhere: they must be checked before a value is read.
                batch.validate(full=True)
                chunks.append(batch.column(columns.image))
                values += _values(batch.column(columns.label))
            except MemoryError:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                raise DataError(f"{file}: damaged ({reason}); write the file anew") from error
            places += [(file, row + number) for number in range(len(batch))]
            row += len(batch)
        folders += [file.parent] * len(batches)
    lengths = [len(chunk) for chunk in chunks]
    origins = Texts.of(f"{file} row {row}" for file, row in places)
    class_names, labels = _numbers(values, columns, names, origins)
    contents = ColumnContents(
        chunks, folders, np.cumsum([0, *lengths[:-1]], dtype=np.int64), np.arange(len(places), dtype=np.int64)
    )
    return LabelledImages(
        images=EncodedImages(contents, origins),
        labels=labels,
        class_names=class_names,
        origins=origins,
        keys=Texts.of(f"{file.name}:{row}" for file, row in places),
    )


def _values(column: Any) -> list[Any]:
    """Return the labels of a column."""
    if not hasattr(column, "dictionary"):
        return list(column.to_pylist())
    # Rows share the values of a dictionary: one may be long, and
    # ``to_pylist`` of the column would copy it for each row.
    known = column.dictionary.to_pylist()
    return [None if number is None else known[number] for number in column.indices.to_pylist()]


def _numbers(
    values: Sequence[Any], columns: Columns, names: Sequence[str] | None, origins: Sequence[str]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    if columns.class_names is None:
        texts = ["" if value is None else str(value) for value in values]
        return number_classes(texts, names, origin=lambda place: origins[place])
    own = columns.class_names
    # Hugging Face's ClassLabel writes -1 for a row without a label, as in public test splits.
    problems = [
        f"{origins[place]}: {'no label' if value is None or value == -1 else f'label {value}'}"
        for place, value in enumerate(values)
        if not isinstance(value, int) or not 0 <= value < len(own)
    ]
    if problems:
        raise DataError(
            f"{len(problems)} of {len(values)} labels of the column {columns.label!r} are none of its {len(own)} classes; "
            f"leave these rows out, or name another split:\n{listed(problems)}"
        )
    class_names = order_names(own, names, where=f"the metadata of the column {columns.label!r}")
    # The metadata number the classes in an order of their own, which data.names may change.
    order = np.array([class_names.index(name) for name in own], dtype=np.int64)
    return class_names, order[np.array(values, dtype=np.int64)]


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return Hugging Face's description of the columns; empty without one."""
    try:
        content = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = content["info"]["features"]
        return {name: value for name, value in features.items() if isinstance(value, dict) and name in schema.names}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _holds_images(kind: Any) -> bool:
    text = str(kind)
    return text in ("binary", "large_binary", "binary_view") or (
        text.startswith("struct<") and any(f"bytes: {name}" in text for name in ("binary", "large_binary"))
    )


def _holds_labels(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view") or str(kind).lstrip("u").startswith("int")


def _only(found: Sequence[str], wanted: str | None, names: Sequence[str], *, what: str, file: Path) -> str:
    if wanted is not None:
        if wanted in names:
            return wanted
        raise DataError(
            f"{file}: no column {wanted!r}; its columns are {', '.join(names)}; correct data.options.{what}"
        )
    if len(found) == 1:
        return found[0]
    several = f"the columns {', '.join(found)} may be meant" if found else "no column is clearly meant"
    raise DataError(f"{file}: {several}, of {', '.join(names)}; name one with data.options.{what}")
