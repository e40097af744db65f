"""Write a folder that ``torch.distributed.checkpoint.load`` reads, on any number of ranks, without torch: array after array."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec import outputs
from mtrain.weights import pickling
from mtrain.weights.dcp import DESCRIPTION, PIECES
from mtrain.weights.writing import WRITERS, tensor_bytes

_FILE = "__0_0.distcp"
_VERSION = "1.0.0"
"""Version of the description, as torch 2.4 and later write it."""
_METADATA = "torch.distributed.checkpoint.metadata"


def check_folder(folder: Path, *, force: bool) -> None:
    """Check that ``write_folder`` can write ``folder``, before anything is read.

    Raises:
        CheckpointError: It is a file or has the ending of one, or it is not empty and ``force`` is not set.
    """
    if folder.suffix in WRITERS:
        raise CheckpointError(f"--to {folder}: --format dcp writes a folder; give a name without {folder.suffix}")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--to {folder}: exists and is no folder; give another name")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise CheckpointError(f"--to {folder}: exists already and is not empty; give --force to replace its files")


def write_folder(folder: Path, arrays: Mapping[str, Array]) -> None:
    """Write ``arrays`` as a state of tensors by name, whole, one after the other; the description comes last.

    Raises:
        CheckpointError: The folder cannot be written, or an array has a type that torch lacks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lengths = {}
        with outputs.replace(folder / _FILE) as file:
            for name, array in arrays.items():
                lengths[name] = file.write(tensor_bytes(name, array))
            file.flush()
            os.fsync(file.fileno())
            # Until here a former save is whole. From here on it is an unfinished one, which readers refuse.
            (folder / DESCRIPTION).unlink(missing_ok=True)
        for former in folder.glob(PIECES):
            if former.name != _FILE:
                former.unlink()
        with outputs.replace(folder / DESCRIPTION) as file:
            file.write(_description(arrays, lengths))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"--to {folder}: cannot be written: {error.strerror or error}") from error


def _description(arrays: Mapping[str, Array], lengths: Mapping[str, int]) -> bytes:
    """Return a pickled ``Metadata``, each array in one piece."""
    entries, places, paths, start = {}, {}, {}, 0
    for name, array in arrays.items():
        key = pickling.plain(name)
        entries[key] = _array(array)
        paths[key] = pickling.row(key)
        index = {"fqn": key, "offset": _size((0,) * array.ndim), "index": pickling.plain(0)}
        place = {
            "relative_path": pickling.plain(_FILE),
            "offset": pickling.plain(start),
            "length": pickling.plain(lengths[name]),
        }
        places[pickling.fields(pickling.name(_METADATA, "MetadataIndex"), index)] = pickling.fields(
            pickling.name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place
        )
        start += lengths[name]
    whole = {
        "state_dict_metadata": pickling.dictionary(entries),
        "planner_data": pickling.dictionary(paths),
        "storage_data": pickling.dictionary(places),
        "storage_meta": pickling.NONE,
        "version": pickling.plain(_VERSION),
    }
    return b"\x80\x04" + pickling.fields(pickling.name(_METADATA, "Metadata"), whole) + b"."


def _array(array: Array) -> bytes:
    """Return the pickled description of an array, which is one piece of itself."""
    properties = pickling.row(
        pickling.name("torch", np.dtype(array.dtype).name),
        pickling.call(pickling.name("torch.serialization", "_get_layout"), pickling.plain("torch.strided")),
        pickling.FALSE,  # requires no gradient
        pickling.call(pickling.name(_METADATA, "_MEM_FORMAT_ENCODING"), pickling.plain(0)),  # contiguous
        pickling.FALSE,  # not pinned
    )
    chunk = {"offsets": _size((0,) * array.ndim), "sizes": _size(array.shape)}
    entry = {
        "properties": pickling.record(pickling.name(_METADATA, "TensorProperties"), properties),
        "size": _size(array.shape),
        "chunks": b"](" + pickling.fields(pickling.name(_METADATA, "ChunkStorageMetadata"), chunk) + b"e",
    }
    return pickling.fields(pickling.name(_METADATA, "TensorStorageMetadata"), entry)


def _size(shape: tuple[int, ...]) -> bytes:
    return pickling.call(pickling.name("torch", "Size"), pickling.plain(shape))
