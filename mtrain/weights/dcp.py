"""Read folders of ``torch.distributed.checkpoint`` (DCP) without torch: their description as data, then array after array.

A folder holds ``.metadata``, a pickle with the shape of each array and the place of each of its pieces, and files such as
``__0_0.distcp``, in which each piece is a zip archive as of ``torch.save``.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError, first_few
from mtrain.spec.files import read_bytes
from mtrain.weights.arrays import check_growth, dimensions
from mtrain.weights.dcp_pieces import SavedPiece, SplitTensor
from mtrain.weights.pickles import MEMBER, Inert, Key, Name, Refused, load, member
from mtrain.weights.trees import MAX_ENTRIES, weights_of

DESCRIPTION = ".metadata"
"""File that describes the others; it is written last."""
PIECES = "*.distcp"
_MAX_DESCRIPTION_BYTES = 256 << 20
_MAX_INSTRUCTIONS = 20_000_000
"""Largest number of instructions in the description; a piece of an array on one rank needs some 60."""
_MAX_DEPTH = 8
"""Largest number of dictionaries in each other that are opened."""


def is_folder_of_dcp(path: Path) -> bool:
    """Return whether ``path`` is such a folder, perhaps one whose description is missing."""
    return path.is_dir() and ((path / DESCRIPTION).is_file() or any(path.glob(PIECES)))


def newest_inside(path: Path) -> Path | None:
    """Return the folder of DCP in ``path`` that was written last; programs write one for each of several updates."""
    found = [file.parent for file in path.glob(f"*/{DESCRIPTION}") if file.is_file()]
    return max(found, key=lambda folder: (folder / DESCRIPTION).stat().st_mtime_ns, default=None)


def read_folder(path: Path, *, key: str | None = None) -> tuple[dict[str, Array], str]:
    """Return the weights in a folder of DCP by name, and a description of it. Other arrays, such as moments, are not read.

    ``key``: see ``weights_of``. An array is put together from its pieces, one piece in memory at a time.

    Raises:
        CheckpointError: The folder is incomplete.
        Refused: Its description has names that are not torch's own, or it holds no weights.
        ValueError: It is damaged.
    """
    described = _read_description(path)
    tensors = dict(_tensors(path, described))
    leaves, where = weights_of(_tree(tensors, described.get("planner_data")), key=key)
    chosen = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, SplitTensor)}
    _check_files(path, chosen.values())
    file_bytes = sum(file.stat().st_size for file in path.glob(PIECES))
    check_growth(chosen.values(), file_bytes=file_bytes)
    arrays = {name: leaf.array() for name, leaf in chosen.items()}
    others = len(tensors) - len(chosen)
    left_out = f"; {others} further arrays (of the optimizer, ...) left out" if others else ""
    return arrays, f"torch.distributed.checkpoint, {where}{left_out}"


def _read_description(path: Path) -> Mapping[str, Any]:
    """Return the fields of the description."""
    file = path / DESCRIPTION
    if not file.is_file():
        raise CheckpointError(
            f"{path}: {PIECES} without {DESCRIPTION}, which is written last: the save was not finished, or the copy lacks it; "
            f"copy hidden files too, as with `cp -r {shlex.quote(path.name)} TARGET`, or give an earlier folder"
        )
    # Not by torch's own reader: it would unpickle the description, and
    # neither the process that starts a job nor a rank on Paddle has torch.
    value = load(
        BytesIO(read_bytes(file, limit=_MAX_DESCRIPTION_BYTES)),
        DescriptionVocabulary(),
        max_instructions=_MAX_INSTRUCTIONS,
    )
    if not isinstance(value, Inert) or value.kind.name != "Metadata":
        raise Refused(f"a {DESCRIPTION} that is no description of torch.distributed.checkpoint")
    return value.state


def _tensors(path: Path, described: Mapping[str, Any]) -> Iterator[tuple[str, SplitTensor]]:
    """Yield each array with its key."""
    entries, places = described.get("state_dict_metadata"), described.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise Refused(f"a {DESCRIPTION} without arrays or without their places")
    if len(entries) > MAX_ENTRIES:
        raise Refused(f"a {DESCRIPTION} of {len(entries)} entries; at most {MAX_ENTRIES}")
    place_of = {(index.key, index.offset): place for index, place in places.items() if isinstance(index, Index)}
    for key, entry in entries.items():
        if isinstance(key, str) and isinstance(entry, Inert) and entry.kind.name == "TensorStorageMetadata":
            yield key, _tensor(path, key, entry.state, place_of)


def _tensor(path: Path, key: str, entry: Mapping[str, Any], place_of: Mapping[Any, Any]) -> SplitTensor:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    if not isinstance(properties, Properties) or not isinstance(chunks, list):
        raise Refused(f"{key[:80]}: an array without type or pieces")
    pieces = []
    for chunk in chunks:
        state = chunk.state if isinstance(chunk, Inert) else {}
        # Checked before they are looked up: the hash of tuples in tuples without end overflows the stack.
        offsets, sizes = dimensions(state.get("offsets")), dimensions(state.get("sizes"))
        if 0 in sizes:  # a rank that has nothing of a short array
            continue
        pieces.append(_piece(path, key, offsets, sizes, place_of.get((key, offsets))))
    return SplitTensor(key=key, shape=dimensions(entry.get("size")), dtype=properties.dtype, pieces=pieces)


def _piece(path: Path, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: object) -> SavedPiece:
    state = place.state if isinstance(place, Inert) else {}
    name, start, length = state.get("relative_path"), state.get("offset"), state.get("length")
    if not isinstance(name, str) or type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise Refused(f"{key[:80]}: a piece of which {DESCRIPTION} does not say where it lies")
    # A description of a stranger could name any file of this machine.
    if Path(name).name != name or name == ".." or not name.isprintable():
        raise Refused(f"the file {ascii(name)[:80]}, which is not in the folder itself")
    if state.get("transform_descriptors"):
        raise Refused(f"{key[:80]}: compressed or encrypted by an extension; save without one")
    return SavedPiece(file=path / name, start=start, length=length, offsets=offsets, sizes=sizes)


def _check_files(path: Path, tensors: Any) -> None:
    """Refuse a folder in which a file is missing, too short, or would be read several times, before anything is read."""
    ends: dict[Path, int] = {}
    to_read: Counter[Path] = Counter()
    for tensor in tensors:
        for piece in tensor.pieces:
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.length)
            to_read[piece.file] += piece.length
    missing = sorted(file.name for file in ends if not file.is_file())
    if missing:
        raise CheckpointError(
            f"{path}: {first_few(missing, 3)} missing, of {len(ends)} files with its weights; each rank writes files of its "
            "own: copy those of all"
        )
    for file, end in ends.items():
        if file.stat().st_size < end:
            raise CheckpointError(
                f"{file}: ends too early, {file.stat().st_size} bytes of at least {end}; copy it again"
            )
        if to_read[file] > end:
            raise Refused(f"{file.name}: pieces of {to_read[file]} bytes within {end}, so some lie on each other")


# --------------------------------------------------------------------------------------------------- the state's nesting
def _tree(tensors: Mapping[str, SplitTensor], paths: object) -> dict[Any, Any]:
    """Return the arrays in the dictionaries in which they were saved; ``paths``: of each key, the keys on the way to it."""
    root: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        path = paths.get(key) if isinstance(paths, dict) else None
        parts = path if isinstance(path, tuple | list) and 0 < len(path) <= _MAX_DEPTH else (key,)
        if not all(isinstance(part, str) or type(part) is int for part in parts):
            raise Refused(f"{key[:80]}: a key inside the state that is no text")
        inside = root
        for part in parts[:-1]:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                raise Refused(f"{key[:80]}: inside of an array")
        if parts[-1] in inside:
            raise Refused(f"{key[:80]}: two arrays at one place")
        inside[parts[-1]] = tensor
    return root


_OWN = "torch.distributed.checkpoint"
_SIZE = Name("torch", "Size")
_INDEX = Name(f"{_OWN}.metadata", "MetadataIndex")
_PROPERTIES = Name(f"{_OWN}.metadata", "TensorProperties")
_ENUMS = frozenset({Name(f"{_OWN}.metadata", "_MEM_FORMAT_ENCODING")})
_DICTIONARY = Name("collections", "OrderedDict")
_LISTED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata "
    r"(Metadata|MetadataIndex|StorageMeta|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch (Size|u?int\d+|b?float\d+(_\w+)?|bool|complex\d+|q?u?int\d+(x\d+)?)"
    r"|torch\.serialization _get_layout"
    r"|collections OrderedDict"
    r"|pathlib(\._local)? (Pure)?(Posix|Windows)?Path"
)
"""Matches ``module name``."""


@dataclass(slots=True, eq=False)
class Index(Key):
    """A pickled ``MetadataIndex``: the key of an array and the place of a piece in it."""

    key: str = ""
    offset: tuple[int, ...] | None = None

    def build(self, state: object) -> None:
        """Apply the stored attributes."""
        if not isinstance(state, dict) or not isinstance(state.get("fqn"), str):
            raise Refused("the place of a piece without the name of its array")
        self.key, self.offset = state["fqn"], state.get("offset")
        if self.offset is not None:
            self.offset = dimensions(self.offset)


@dataclass(slots=True, eq=False)
class Properties:
    """Pickled ``TensorProperties``, of which the type matters."""

    dtype: str = ""
    """torch's name of the type, such as ``bfloat16``."""

    def build(self, state: object) -> None:
        """Apply ``(type, layout, requires_grad, memory format, pinned)``."""
        if not isinstance(state, tuple) or not state or not isinstance(state[0], Name):
            raise Refused("the properties of an array without its type")
        self.dtype = state[0].name


class DescriptionVocabulary:
    """The ``pickles.Vocabulary`` of ``.metadata``: torch's own records of a checkpoint, and nothing else."""

    def check(self, name: Name) -> None:
        """Refuse names that are not listed."""
        if name not in MEMBER and not _LISTED.fullmatch(f"{name.module} {name.name}"):
            raise Refused(f"the name {name}", name=name)

    def make(self, name: Name, arguments: tuple[Any, ...]) -> Any:
        """Return shapes as tuples, and records without behaviour for everything else."""
        if name in MEMBER:
            return member(name, arguments, of=_ENUMS)
        if name == _SIZE:
            return dimensions(arguments[0] if arguments else ())
        if name == _INDEX:
            return Index()
        if name == _PROPERTIES:
            return Properties()
        return {} if name == _DICTIONARY and not arguments else Inert(name)
