"""Read any file of weights as named numpy arrays. The format is recognised by the content, not by the file's name."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.arrays_file import MAX_HEADER_BYTES, read_header
from mtrain.core.checkpoint.format import ARRAYS
from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError, UsageError
from mtrain.spec.bounds import bounded_growth, memory_limit
from mtrain.spec.files import open_file, parse_json, read_bytes
from mtrain.weights import dcp, zero
from mtrain.weights.arrays import MIB, check_growth, widen
from mtrain.weights.described import pickled_labels, said_by
from mtrain.weights.own import Own, own_kind
from mtrain.weights.pickles import MEMBER, Name, Refused, load
from mtrain.weights.torch_files import ZIP_START, is_legacy, read_legacy, read_zip
from mtrain.weights.trees import (
    MAX_ENTRIES,
    MAX_NAME,
    PARAMETER_NAMES,
    SLICES,
    Unclear,
    join_slices,
    part_of,
    weights_of,
)
from mtrain.weights.vocabulary import WeightsVocabulary

EXPECTED = (
    "expected .safetensors, .pdparams (Paddle), .pt or .pth (torch), a folder of torch.distributed.checkpoint, or a "
    "checkpoint or run folder"
)
Layout = Literal["neutral", "torch", "paddle"]
"""Conventions of names and shapes that a file may follow."""
_PICKLE_START = b"\x80"
_START = 16
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The arrays of a file, with the file's own names and shapes."""

    path: Path
    arrays: dict[str, Array]
    """Arrays by name; they may be read-only views of the file's content."""
    layout: Layout
    description: str
    """Description of the file for messages, including which of several sets of weights was read."""
    model: str | None = None
    """``model.name`` of the run that wrote it, if the file records it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``model.options`` of that run."""
    pruned: Mapping[str, Sequence[int]] | None = None
    """``model.pruned`` of that run."""
    plugins: str | None = None
    """``plugins`` of that run: the file that says which plugins may load."""
    image_size: int | None = None
    """Side of that run's images in pixels; a transformer's positions depend on it."""
    own: Own | None = None
    """Whose module it is, if it is a user's own; ``model`` and ``options`` then say nothing."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint stores on its data: ``class_names``, and ``details`` of the task. Of a file, its ``class_names``."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The part of the job's spec that safetensors carry; see ``described.Description``."""


def read(path: Path, *, key: str | None = None) -> Weights:
    """Read the weights at ``path``: a file, a checkpoint folder, a run folder, or a folder of another program.

    Of a checkpoint the averaged weights are read, if there are any; of a run, those of its best checkpoint, else its
    newest.

    Args:
        path: The file or folder.
        key: Which of several sets of weights in it is meant; see ``trees.weights_of``.

    Raises:
        CheckpointError: ``path`` does not exist, is damaged, or contains no weights, or several of which none is the usual one.
    """
    try:
        with bounded_growth(memory_limit()):
            divided = zero.folder_of(path)
            if divided is not None:
                return _of_folder(path, lambda: zero.read_folder(divided), key)
            return _read_folder(path, key) if path.is_dir() else _read_file(path, key)
    except MemoryError as error:
        raise CheckpointError(f"{path}: too large for the memory of this process{_size_of(path)}") from error


def asked_or_said(path: Path, asked: Sequence[str] | None) -> list[str]:
    """Return the classes of a file of weights, in label order: those that were asked for, else those that it says.

    Raises:
        CheckpointError: It cannot be read.
        UsageError: Neither is there.
    """
    names = list(asked or ()) or list(read(path).labels.get("class_names") or ())
    if not names:
        raise UsageError("--weights FILE does not say its classes; give them in label order: -o data.names=cat,dog")
    return names


def _size_of(path: Path) -> str:
    try:
        return f" ({path.stat().st_size / MIB:,.0f} MiB)" if path.is_file() else ""
    except OSError:
        return ""


def _read_file(path: Path, key: str | None) -> Weights:
    try:
        with open_file(path) as file:
            _check_header(path, file.peek(_START))
            content = file.read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; {EXPECTED}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    with _refusals(path):
        weights = _parse_file(path, content, key)
    return _check_names(path, weights)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except Unclear as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Refused as error:
        raise CheckpointError(f"{path}: refused, nothing of it was executed: {error}{_remedy(error.name)}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError, TypeError) as error:  # shapes and lengths that no array can have
        raise CheckpointError(f"{path}: damaged, nothing of it was executed: {error}") from error


def _of_folder(path: Path, parts: Callable[[], tuple[dict[str, Array], str]], key: str | None) -> Weights:
    """Return the weights of a folder of another program; ``parts`` reads its arrays, and describes them."""
    with _refusals(path):
        arrays, description = parts()
    return _check_names(path, _part(Weights(path=path, arrays=arrays, layout="torch", description=description), key))


def _part(weights: Weights, key: str | None) -> Weights:
    """Return the arrays whose names begin with ``key``, where it is given.

    Raises:
        CheckpointError: There are none.
    """
    arrays = weights.arrays if key is None else part_of(weights.arrays, key)
    if not arrays:
        starts = ", ".join(list(dict.fromkeys(name.partition(".")[0] for name in weights.arrays))[:8])
        raise CheckpointError(f"{weights.path}: no array whose name begins with {key}.; they begin with: {starts}")
    return (
        weights
        if key is None
        else replace(weights, arrays=arrays, description=f"{weights.description}, the part `{key}`")
    )


def _check_names(path: Path, weights: Weights) -> Weights:
    """Return ``weights``, but refuse names of arrays that no file of weights has."""
    if len(weights.arrays) > MAX_ENTRIES:
        raise CheckpointError(f"{path}: {len(weights.arrays)} arrays; a file of weights has at most {MAX_ENTRIES}")
    long = next((name for name in weights.arrays if len(name) > MAX_NAME), None)
    if long is not None:
        raise CheckpointError(
            f"{path}: an array is called {ascii(long)[:40]}...; a name has at most {MAX_NAME} characters"
        )
    strange = next((name for name in weights.arrays if not name.isprintable()), None)
    if strange is not None:
        raise CheckpointError(f"{path}: an array is called {ascii(strange)[:80]}; expected printable names")
    return weights


def _check_header(path: Path, start: bytes) -> None:
    """Refuse safetensors with a header of more than the format's limit before the whole file is read.

    Raises:
        CheckpointError: The header is too long.
    """
    length = int.from_bytes(start[:8], "little")
    if _is_safetensors(start) and length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")


def _is_safetensors(start: bytes) -> bool:
    """Say whether a file begins with the length of a header and the header, JSON."""
    if start.startswith(ZIP_START) or start[8:9] != b"{":
        return False
    # One length in 32 begins with the byte of a pickle, which never goes on with the rest of a length within the limit.
    return not start.startswith(_PICKLE_START) or int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES


def _remedy(refused: Name | None) -> str:
    """Return advice for a refused name that harmless files contain too: fused modules are pickled with a method."""
    if refused not in MEMBER:
        return ""
    return (
        " (a model after YOLOv5's `model.fuse()` is saved so; give the file that training saved, weights/best.pt or "
        "last.pt, or save the model before it is fused)"
    )


def _parse_file(path: Path, content: bytes, key: str | None) -> Weights:
    if content.startswith(ZIP_START):
        return _torch(path, read_zip(content), key, file_bytes=len(content))
    if _is_safetensors(content):
        return _part(_described_safetensors(path, content), key)
    if content.startswith(_PICKLE_START):
        if is_legacy(content):
            return _torch(path, read_legacy(content), key, file_bytes=len(content))
        return _paddle(path, content, key)
    raise CheckpointError(f"{path}: not a file of weights; {EXPECTED}")


def _torch(path: Path, value: object, key: str | None, *, file_bytes: int) -> Weights:
    leaves, description = weights_of(value, key=key)
    check_growth(leaves.values(), file_bytes=file_bytes)
    arrays = {name: leaf.array() for name, leaf in leaves.items()}
    return Weights(
        path=path, arrays=arrays, layout="torch", description=f"torch, {description}", labels=pickled_labels(value)
    )


def _paddle(path: Path, content: bytes, key: str | None) -> Weights:
    value = load(BytesIO(content), WeightsVocabulary())
    leaves, description = weights_of(value, key=key)
    check_growth(leaves.values(), file_bytes=len(content))
    arrays = {name: _from_paddle(leaf.array()) for name, leaf in leaves.items() if name != PARAMETER_NAMES}
    if isinstance(value, dict):
        arrays = join_slices(arrays, value.get(SLICES))
    return Weights(path=path, arrays=arrays, layout="paddle", description=f"Paddle, {description}")


def _from_paddle(array: Array) -> Array:
    """Widen bfloat16, which Paddle writes as unsigned 16-bit integers; Paddle has no such integers itself."""
    return widen(array) if array.dtype == np.uint16 else array


def _described_safetensors(path: Path, content: bytes) -> Weights:
    arrays = _safetensors(path, content)
    said = said_by(read_header(BytesIO(content))[0])
    return Weights(
        path=path,
        arrays=arrays,
        layout="neutral",
        description="safetensors",
        model=said.model,
        options=said.options,
        pruned=said.pruned,
        image_size=said.image_size,
        labels=said.labels,
        spec=said.spec,
    )


def _safetensors(path: Path, content: bytes) -> dict[str, Array]:
    """Read safetensors.

    The ``/`` that checkpoints put before names is removed; bfloat16, which numpy lacks, is widened.
    """
    from safetensors import SafetensorError, deserialize
    from safetensors.numpy import _TYPES as TYPES

    try:
        entries = deserialize(content)  # type: ignore[no-untyped-call]
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    arrays: dict[str, Array] = {}
    for name, entry in entries:
        kind, shape = entry["dtype"], entry["shape"]
        if kind != "BF16" and kind not in TYPES:
            raise CheckpointError(f"{path}: {name}: numbers of type {kind}, which numpy does not know")
        flat = np.frombuffer(entry["data"], np.uint16 if kind == "BF16" else TYPES[kind])
        arrays[name.removeprefix("/")] = (widen(flat) if kind == "BF16" else flat).reshape(shape)
    if len(arrays) != len(entries):
        raise CheckpointError(f"{path}: two of its arrays have the same name, one with a `/` before it")
    return arrays


_FILES = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors")
"""What libraries call the weights in a folder, whole or, with ``.index.json``, divided among files."""


def _shards(path: Path) -> list[Path]:
    """Return the files with the weights in a folder of transformers, timm or Accelerate.

    Raises:
        CheckpointError: One that the index names is missing.
    """
    for name in _FILES:
        if (path / name).is_file():
            return [path / name]
        index = path / f"{name}.index.json"
        if not index.is_file():
            continue
        places = parse_json(read_bytes(index, limit=_MAX_INDEX_BYTES))
        places = places.get("weight_map") if isinstance(places, dict) else None
        names = sorted({str(place) for place in places.values()}) if isinstance(places, dict) else []
        wrong = [file for file in names if Path(file).name != file or not (path / file).is_file()]
        if wrong or not names:
            raise CheckpointError(
                f"{index}: names {wrong[0] if wrong else 'no file'}, which is not beside it; copy all files"
            )
        return [path / file for file in names]
    return []


def _read_folder(path: Path, key: str | None) -> Weights:
    if dcp.is_folder_of_dcp(path):
        return _of_folder(path, lambda: dcp.read_folder(path, key=key), None)
    with _refusals(path):
        shards = _shards(path)
    if shards:
        parts = [_read_file(shard, None) for shard in shards]
        arrays = {name: array for part in parts for name, array in part.arrays.items()}
        divided = f", {len(parts)} files" if len(parts) > 1 else ""
        return _part(replace(parts[0], path=path, arrays=arrays, description=f"{parts[0].description}{divided}"), key)
    folder = path if (path / ARRAYS["weights"]).is_file() or path.name.startswith(store.PREFIX) else None
    if folder is None:
        runs = [candidate for candidate in (path / "checkpoints", path) if store.list_all(candidate)]
        # Accelerate puts the model's folder beside that of the optimizer.
        named = sorted(path.glob("pytorch_model_fsdp_*"))
        if not runs and len(named) == 1:
            return _read_folder(named[0], key)
        # Which one is meant is not guessed: a run folder says which checkpoint is best, this one does not.
        if not runs and (inside := dcp.newest_inside(path)) is not None:
            raise CheckpointError(
                f"{path}: holds folders of torch.distributed.checkpoint; give one of them, such as {inside}"
            )
        if not runs:
            raise CheckpointError(f"{path}: neither a checkpoint nor a run folder with checkpoints; {EXPECTED}")
        folder = store.best(runs[0]) or store.newest(runs[0])
        if folder is None:
            raise CheckpointError(
                f"{path}: none of its checkpoints is intact; `mtrain checkpoint verify {shlex.quote(str(path))}` says why"
            )
    saved = store.load(folder)
    part = "averaged weights" if saved.state.ema else "weights"
    extra = saved.meta.get("extra") or {}
    own = own_kind(saved.spec, extra)
    model = {} if own == "script" else dict(saved.spec.get("model") or {})
    weights = Weights(
        path=folder,
        arrays={**saved.state.weights, **saved.state.ema},
        layout="neutral",
        description=f"checkpoint of mtrain at update {saved.progress.update}, {part}",
        model=model.get("name"),
        options=model.get("options") or {},
        pruned=model.get("pruned"),
        plugins=saved.spec.get("plugins"),
        image_size=(saved.spec.get("data") or {}).get("image_size"),
        own=own,
        labels=extra,
    )
    return _part(weights, key)
