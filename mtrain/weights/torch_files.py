"""Read files of ``torch.save``.

They are zip archives with one pickle and one entry of raw bytes per storage; before torch 1.6, one stream of pickles.
"""

import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from typing import Any

from mtrain.weights.arrays import BFLOAT16, TorchStorage
from mtrain.weights.pickles import Name, Refused, load
from mtrain.weights.vocabulary import WeightsVocabulary

ZIP_START = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""Value of the first pickle in the format before torch 1.6."""
_LEGACY_PROTOCOL = 1001
CODES = {
    "Double": "<f8",
    "Float": "<f4",
    "Half": "<f2",
    "BFloat16": BFLOAT16,
    "Long": "<i8",
    "Int": "<i4",
    "Short": "<i2",
    "Char": "|i1",
    "Byte": "|u1",
    "Bool": "|b1",
}
"""Maps the type in the name ``torch.<type>Storage`` to numpy's code of its numbers."""


def read_zip(content: bytes) -> Any:
    """Return the value that ``torch.save`` wrote, with tensors as ``TorchTensor`` and objects as ``Inert``.

    Raises:
        Refused: The file is damaged, or contains something else than weights.
    """
    try:
        archive = zipfile.ZipFile(BytesIO(content))
        _check_sizes(archive, len(content))
        names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(names) != 1:
            raise Refused("a zip archive without data.pkl; expected one that torch.save wrote")
        folder = names[0].removesuffix("data.pkl")
        if folder + "byteorder" in archive.namelist() and archive.read(folder + "byteorder") != b"little":
            raise Refused("numbers in big-endian order; save the file again on another machine")
        pickle = archive.read(names[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise Refused(f"a damaged zip archive ({error})") from error

    def entry(key: str) -> Callable[[], bytes]:
        def read() -> bytes:
            try:
                return archive.read(f"{folder}data/{key}")
            except (zipfile.BadZipFile, KeyError, OSError, EOFError, ValueError) as error:
                raise Refused(f"a damaged zip archive (entry data/{key[:40]}: {error})") from error

        return read

    return load(BytesIO(pickle), WeightsVocabulary(), persistent=_Storages(entry))


def read_legacy(content: bytes) -> Any:
    """Return the value of a file before torch 1.6, like ``read_zip``.

    The stream contains magic number, version, machine, value and storage keys as pickles, then the storages.

    Raises:
        Refused: The file is damaged, or contains something else than weights.
    """
    stream, vocabulary = BytesIO(content), WeightsVocabulary()
    start = [load(stream, vocabulary) for _ in range(3)]
    if start[:2] != [LEGACY_MAGIC, _LEGACY_PROTOCOL]:
        raise Refused("an unknown version of the torch format")
    parts: dict[str, bytes] = {}
    storages = _Storages(lambda key: lambda: parts[key])
    value = load(stream, vocabulary, persistent=storages)
    keys = load(stream, vocabulary)
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in storages.by_key for key in keys):
        raise Refused("a damaged list of storages")
    if set(keys) != set(storages.by_key):
        raise Refused("a storage that its list does not name")
    for key in keys:
        head = stream.read(8)
        storage = storages.by_key[key]
        if len(head) != 8 or struct.unpack("<q", head)[0] != storage.length:
            raise Refused("a damaged storage (another length than its pickle says)")
        parts[key] = stream.read(storage.length * storage.itemsize)
    return value


def is_legacy(content: bytes) -> bool:
    """Return whether the file starts with a pickle of torch's magic number."""
    try:
        # Paddle's files are pickles too, and begin with another value.
        return bool(load(BytesIO(content[:64]), WeightsVocabulary()) == LEGACY_MAGIC)
    except Refused:
        return False


def _check_sizes(archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Refuse archives that would expand: torch does not compress, so entries cannot be larger than the file."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise Refused("a compressed zip archive; torch.save writes uncompressed ones")
    if sum(entry.file_size for entry in entries) > size_bytes:
        raise Refused("a damaged zip archive (its entries are larger than the file)")


class _Storages:
    """Turns persistent ids ``("storage", type, key, device, elements)`` into storages, one for each key.

    Before torch 1.6 the classes of pickled modules had persistent ids too: ``("module", class, file, source text)``.
    """

    def __init__(self, entry: Callable[[str], Callable[[], bytes]]) -> None:
        self._entry = entry
        self.by_key: dict[str, TorchStorage] = {}

    def __call__(self, identity: object) -> TorchStorage | Name:
        """Return the storage, or the name of the module's class. Raises ``Refused`` for any other id."""
        if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
            if not isinstance(identity[1], Name):
                raise Refused("a module whose class is no name")
            return identity[1]
        return self._storage(identity)

    def _storage(self, identity: object) -> TorchStorage:
        if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
            raise Refused("a persistent id that is no storage of torch")
        _, kind, key, _, length = identity[:5]
        if not isinstance(kind, Name) or not isinstance(key, str) or type(length) is not int or length < 0:
            raise Refused("a storage with an unknown description")
        if len(identity) == 6 and identity[5] is not None:
            raise Refused("a storage that is a view of another, as very old torch wrote it; save the file again")
        code = CODES.get(kind.name.removesuffix("Storage")) if kind.module == "torch" else None
        if code is None:
            raise Refused(f"a storage of type {kind}")
        storage = self.by_key.setdefault(key, TorchStorage(code, length, self._entry(key)))
        if (storage.code, storage.length) != (code, length):
            raise Refused("a storage that is described twice in different ways")
        return storage
