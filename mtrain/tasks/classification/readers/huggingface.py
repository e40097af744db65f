"""Read what ``save_to_disk`` of Hugging Face's ``datasets`` writes: Arrow files with images and labels.

The library ``datasets`` itself is not needed: the files are Arrow's streaming format, whose metadata name the columns and
classes. It would also load a framework into the process, and mtrain loads no more than one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtrain.core.interfaces import Dataset, Split, SplitRequest
from mtrain.data.reading import FOLDERS_OF, need_root
from mtrain.data.shards import files_of
from mtrain.errors import DataError
from mtrain.spec.bounds import bounded_reading, limit_of
from mtrain.spec.files import open_file, parse_json, read_bytes
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
from mtrain.tasks.classification.readers.parquet import ColumnOptions

MAX_STATE_BYTES = 64 << 20
"""Largest ``state.json`` that is read, in bytes."""
_FILE_FORMAT = b"ARROW1"
"""First bytes of Arrow's file format; the streaming format, which Hugging Face writes, has none."""


class HuggingFace(Dataset):
    """The ``huggingface`` data set plugin.

    ``data.root`` is the folder of a ``DatasetDict`` that was saved with ``save_to_disk`` (splits ``train`` and
    ``validation``, ``val`` or ``valid``), of a ``Dataset``, which ``data.split`` divides, or a folder of ``.arrow``
    files. ``data.train`` and ``data.val`` name other splits, such as ``test``. Needs pyarrow.

    Files are mapped into memory: a row is read where it lies, and the ranks of a host share what is in memory.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True
    Options = ColumnOptions

    def __init__(self, options: ColumnOptions | None = None) -> None:
        self.options = options or ColumnOptions()

    def read(self, request: SplitRequest) -> LabelledImages:
        """Read one split; images stay on the disk.

        Raises:
            DataError: pyarrow is missing, files are damaged, columns are missing, or labels are not among ``names``.
        """
        if request.images is not None:
            raise DataError("data.images: given, but the images are in the Arrow files; leave it out")
        arrow = pyarrow(format_name="huggingface")
        root = need_root(request.root, "huggingface")
        files = _files(root, request.value, request.split)
        limit = limit_of(sum(file.stat().st_size for file in files if file.is_file()))
        with bounded_reading(files[0], limit, remedy=DAMAGED):
            return self._label(arrow, files, request.names, Expansion(str(files[0]), limit))

    def _label(self, arrow: Any, files: Sequence[Path], names: Sequence[str] | None, rows: Expansion) -> LabelledImages:
        schemas = [(file, _open_reader(arrow, file).schema) for file in files]
        columns = same_columns(schemas, image=self.options.image_column, label=self.options.label_column)
        return label_rows([(file, _batches(arrow, file, columns, rows)) for file in files], columns, names)


def _files(root: Path, value: str | None, split: Split) -> list[Path]:
    """Return the Arrow files of a split, in the order of its rows."""
    if value is not None:
        return _of_folder(root / value) or files_of(root, value, split=split, suffixes=(".arrow",), kind="huggingface")
    whole = _of_folder(root)
    if whole:
        if split in ("train", "all"):
            return whole
        raise DataError(
            f"data.{split}: {root} is one Dataset without splits; divide it with data.split=0.2, or save a DatasetDict with "
            "train and validation"
        )
    # Dividing the training split of a set that has an evaluation split would mix the two without a word.
    if split == "all":
        words: Sequence[str] = ("train",)
        own = [word for word in FOLDERS_OF["val"] if _of_folder(root / word)]
        if own:
            raise DataError(
                f"data.split: {root} has an evaluation split of its own ({own[0]}); leave out data.split, or name the split "
                "to divide with data.train"
            )
    else:
        words = FOLDERS_OF[split]
    for word in words:
        files = _of_folder(root / word)
        if files:
            return files
    if (root / "dataset_dict.json").exists():
        saved = sorted(path.parent.name for path in root.glob("*/state.json"))
        key = "train" if split == "all" else split
        raise DataError(
            f"data.{key}: no split {' or '.join(words)} in {root}, which has {', '.join(saved) or 'none'}; name one with "
            f"data.{key}"
        )
    return files_of(root, value, split=split, suffixes=(".arrow",), kind="huggingface")


def _of_folder(folder: Path) -> list[Path]:
    """Return the files that the ``state.json`` of a folder names, in order; none if there is no such file."""
    state = folder / "state.json"
    if not state.exists():
        return []
    try:
        content = parse_json(read_bytes(state, limit=MAX_STATE_BYTES))
        if content.get("_indices_data_files"):
            raise DataError(
                f"{state}: the rows are chosen by an index file, which older versions of datasets wrote; load the set with "
                "load_from_disk, call flatten_indices() and save it again"
            )
        names = [str(entry["filename"]) for entry in content["_data_files"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{state}: not the state of a saved Dataset ({error}); save the data set again") from error
    # A name with a folder in it would lead to files outside of the data set.
    odd = [name for name in names if Path(name).name != name]
    if odd or not names:
        given = f"names {odd[0][:200]!r}" if odd else "names no file"
        raise DataError(f"{state}: {given}; expected names of files in the same folder")
    return [folder / name for name in names]


def _open_reader(arrow: Any, file: Path, fields: Sequence[int] | None = None) -> Any:
    """Map a file of Arrow's streaming or file format into memory, and return its reader, of all or some ``fields``."""
    if not file.is_file():  # opening a named pipe would wait
        raise DataError(f"{file}: no such file; expected an Arrow file")
    with damage_named(file, kind="Arrow"):
        with open_file(file) as start:
            is_file_format = start.read(len(_FILE_FORMAT)) == _FILE_FORMAT
        # One thread: loader processes are forked afterwards, and a thread of pyarrow does not survive that.
        options = arrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        source = arrow.memory_map(str(file))
        open_reader = arrow.ipc.open_file if is_file_format else arrow.ipc.open_stream
        return open_reader(source, options=options)


def _batches(arrow: Any, file: Path, columns: Columns, rows: Expansion) -> list[Any]:
    """Return the record batches of a file with the two columns."""
    with damage_named(file, kind="Arrow"):
        names = _open_reader(arrow, file).schema.names
        # Other columns are not read: they may be large, or nested.
        reader = _open_reader(arrow, file, [names.index(columns.image), names.index(columns.label)])
        # The file format has a list of its batches; the streaming format is read up to its end.
        several = (
            map(reader.get_batch, range(reader.num_record_batches)) if hasattr(reader, "num_record_batches") else reader
        )
        return rows.add_up(several)
