"""Write files of weights with numpy alone: safetensors, ``.pdparams`` for Paddle and ``.pt`` for torch."""

import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec import outputs
from mtrain.spec.suggest import closest
from mtrain.weights.pickling import EMPTY, FALSE, TRUE, call, plain, raw, row
from mtrain.weights.pickling import name as name_of
from mtrain.weights.reading import Layout
from mtrain.weights.torch_files import CODES

Writer = Callable[[Mapping[str, Array]], bytes]
_TORCH_STORAGES = {np.dtype(code): f"{name}Storage" for name, code in CODES.items() if name != "BFloat16"}
_ALIGNMENT_BYTES = 64
"""torch aligns storages to this in its archives, so that they can be mapped into memory."""
_ARCHIVE = "archive"
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def check_target(path: Path, *, force: bool) -> None:
    """Check that ``write`` can write ``path``, before anything is read.

    Raises:
        CheckpointError: Its ending is unknown, its folder is missing, or it exists and ``force`` is not set.
    """
    if path.suffix not in WRITERS:
        best = closest(path.suffix, WRITERS) if path.suffix else None
        meant = f"; did you mean {best}?" if best else ""
        raise CheckpointError(f"--to {path}: unknown ending {path.suffix!r}; expected {', '.join(WRITERS)}{meant}")
    if not path.parent.is_dir():
        raise CheckpointError(f"--to {path}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise CheckpointError(f"--to {path}: is a folder; give the name of a file")
    if path.exists() and not force:
        raise CheckpointError(f"--to {path}: exists already; give --force to replace it")


def write(path: Path, arrays: Mapping[str, Array], *, make: Writer | None = None) -> None:
    """Write ``arrays`` atomically as ``make`` says, by default in the format that the ending of ``path`` names.

    Raises:
        CheckpointError: The file cannot be written, or an array has a type that the format lacks.
    """
    content = (make or WRITERS[path.suffix])({name: np.asarray(array, order="C") for name, array in arrays.items()})
    try:
        with outputs.replace(path) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"--to {path}: cannot be written: {error.strerror or error}") from error


def safetensors_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return the content of a safetensors file."""
    from safetensors.numpy import save

    return bytes(save(dict(arrays)))


def pdparams_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return a pickle (protocol 4) of a dictionary of numpy arrays, with module names that every numpy has."""
    # The names are those of old numpy versions, which newer ones still resolve.
    parts = [b"\x80\x04}("]
    for name, array in arrays.items():
        order, code = array.dtype.newbyteorder("<").str[0], array.dtype.str[1:]
        dtype = call(name_of("numpy", "dtype"), plain(code), FALSE, TRUE)
        dtype += plain((3, order, None, None, None, -1, -1, 0)) + b"b"
        reconstruct = name_of("numpy.core.multiarray", "_reconstruct")
        reconstructed = call(reconstruct, name_of("numpy", "ndarray"), plain((0,)), raw(b"b"))
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        state = row(plain(1), plain(array.shape), dtype, FALSE, raw(content))
        parts.append(plain(name) + reconstructed + state + b"b")
    return b"".join([*parts, b"u."])


def pt_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return a zip archive, as of ``torch.save``, of an ordered dictionary of tensors with one storage each."""
    parts = [EMPTY, b"("]
    for key, (name, array) in enumerate(arrays.items()):
        parts += [plain(name), tensor(name, array, key=key)]
    return archive_bytes(b"".join([*parts, b"u"]), list(arrays.values()))


def tensor_bytes(name: str, array: Array) -> bytes:
    """Return a zip archive, as of ``torch.save``, of one tensor; ``name`` is for messages."""
    whole = np.asarray(array, order="C")
    return archive_bytes(tensor(name, whole, key=0), [whole])


def tensor(name: str, array: Array, *, key: int) -> bytes:
    """Return the instructions for a tensor, whose numbers are the storage ``key`` of the archive.

    Raises:
        CheckpointError: torch has no such type.
    """
    kind = _TORCH_STORAGES.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise CheckpointError(f"{name}: numbers of type {array.dtype} have no counterpart in torch")
    identity = row(plain("storage"), name_of("torch", kind), plain(str(key)), plain("cpu"), plain(array.size))
    strides = tuple(step // array.itemsize for step in array.strides)
    return call(
        name_of("torch._utils", "_rebuild_tensor_v2"),
        identity + b"Q",
        *map(plain, (0, array.shape, strides, False)),
        EMPTY,
    )


def archive_bytes(value: bytes, storages: Sequence[Array]) -> bytes:
    """Return the archive of a pickled value and the numbers of its storages."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", b"\x80\x02" + value + b".")
        _add(archive, "byteorder", b"little")
        for key, array in enumerate(storages):
            _add(archive, f"data/{key}", array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        _add(archive, "version", b"3\n")
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add an entry whose content is aligned to ``_ALIGNMENT_BYTES`` by an extra field of the right length before it."""
    entry = zipfile.ZipInfo(f"{_ARCHIVE}/{name}", _ZIP_DATE)
    start = archive.fp.tell() + 30 + len(entry.filename) + 4  # type: ignore[union-attr]  # 30: fixed part of a header
    padding = -start % _ALIGNMENT_BYTES
    entry.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    archive.writestr(entry, content)


WRITERS: dict[str, Writer] = {
    ".safetensors": safetensors_bytes,
    ".pdparams": pdparams_bytes,
    ".pt": pt_bytes,
    ".pth": pt_bytes,
}
"""Maps the ending of a file to the function that makes its content."""
LAYOUTS: dict[str, Layout] = {".safetensors": "neutral", ".pdparams": "paddle", ".pt": "torch", ".pth": "torch"}
"""Maps the ending of a file to the conventions of names and shapes that the file follows."""
