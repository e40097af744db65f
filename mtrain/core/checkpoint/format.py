"""One checkpoint on disk: a directory that is complete or does not exist.

::

    step-00001200/
        weights.safetensors  ema.safetensors  optimizer.safetensors   whole arrays under neutral names
        state.json           progress, counters, the resolved spec, what the caller added
        MANIFEST.json        written last: size and SHA-256 of each file, versions, score, serial number

It is built in a temporary directory beside, flushed to the disk, then renamed. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes

import mtrain
from mtrain.core.interfaces import Array, Progress, State
from mtrain.errors import CheckpointError
from mtrain.files import parse_json, read_bytes

FORMAT = 1
"""Version of the layout; a reader refuses a newer one."""
MANIFEST = "MANIFEST.json"
STATE = "state.json"
ARRAYS = {"weights": "weights.safetensors", "ema": "ema.safetensors", "moments": "optimizer.safetensors"}
"""Part of ``State`` -> its file."""
CHUNK_BYTES = 8 << 20
MAX_JSON_BYTES = 256 << 20
"""Largest MANIFEST.json or state.json that is read."""


@dataclass(kw_only=True)
class Saved:
    """What a checkpoint holds."""

    state: State
    progress: Progress
    spec: Mapping[str, Any]
    """The resolved spec of the run that wrote it."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """``score``, ``serial``, ``versions``, and ``extra`` as it was given to ``save``."""


# ------------------------------------------------------------------------------------------------------------- writing
def write(folder: Path, saved: Saved) -> None:
    """Fill the new directory ``folder`` and flush it to the disk; the manifest comes last.

    Raises:
        OSError: the disk is full or gone; ``folder`` is then incomplete.
    """
    folder.mkdir(mode=0o700)
    files = {}
    for part, name in ARRAYS.items():
        files[name] = _write_file(folder / name, _pack(getattr(saved.state, part)))
    body = {
        "progress": _strict(asdict(saved.progress)),
        "counters": _strict(saved.state.counters),
        "spec": saved.spec,
        "extra": _strict(saved.meta.get("extra", {})),
    }
    files[STATE] = _write_file(folder / STATE, _json(body))
    manifest = {
        "format": FORMAT,
        "update": saved.progress.update,
        "score": _strict(saved.meta.get("score")),
        "serial": saved.meta.get("serial", 0),
        "versions": versions(),
        "files": files,
    }
    _write_file(folder / MANIFEST, _json(manifest | {"digest": _digest_of(manifest)}))
    flush_folder(folder)


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's own content, its ``digest`` left out."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest_or_none(manifest: Mapping[str, Any]) -> str | None:
    """The digest of a manifest that somebody else may have written; None where it cannot be made."""
    try:
        return _digest_of(manifest)
    except (RecursionError, ValueError):
        return None


def versions() -> dict[str, str]:
    """Versions that shape the content of a checkpoint."""
    return {"mtrain": mtrain.__version__, "python": platform.python_version(), "numpy": np.__version__}


def publish(built: Path, final: Path) -> None:
    """Give a complete directory its name in one step; a former one of that name is replaced."""
    former = None
    if final.exists():
        former = built.with_name(built.name + ".former")
        final.rename(former)
    built.rename(final)
    flush_folder(final.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Make the directory entries of ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write, hash on the way, flush; returns the file's entry of the manifest."""
    digest = hashlib.sha256()
    view = memoryview(content)
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            digest.update(chunk)
            while len(chunk):
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"size_bytes": len(view), "sha256": digest.hexdigest()}


def _pack(arrays: Mapping[str, Array]) -> bytes:
    """Safetensors bytes; every name gets a prefix, because the format keeps ``__metadata__`` for itself."""
    return bytes(arrays_to_bytes({"/" + name: np.asarray(array, order="C") for name, array in arrays.items()}))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False).encode()


def _strict(value: Any) -> Any:
    """``value`` with numbers that JSON has no word for as text: ``float(text)`` brings them back."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------------- reading
def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest, or an empty mapping when it is missing or unreadable. Says nothing of the files."""
    try:
        manifest = parse_json(read_bytes(folder / MANIFEST, limit=MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, one sentence each; empty: it is intact. Reads every byte."""
    if not folder.is_dir():
        return [f"{folder} is not a folder; expected a checkpoint such as checkpoints/step-00001200"]
    if not (folder / MANIFEST).is_file():
        return [f"half-written: it has no {MANIFEST}"]
    manifest = manifest_of(folder)
    if not manifest or manifest.get("digest") != _digest_or_none(manifest):
        return [f"{MANIFEST} is damaged: not what was written"]
    if manifest.get("format") != FORMAT:
        return [f"its format is {manifest.get('format')!r}, this version reads {FORMAT}; use the mtrain that wrote it"]
    missing = [name for name in (*ARRAYS.values(), STATE) if name not in manifest["files"]]
    problems = [f"{MANIFEST} does not list {name}" for name in missing]
    for name, entry in manifest["files"].items():
        problem = _problem_of(folder / str(name), entry)
        if problem:
            problems.append(problem)
    return problems


def _problem_of(path: Path, entry: Any) -> str | None:
    if not isinstance(entry, dict) or path.name != str(path.relative_to(path.parent)):
        return f"{MANIFEST} is damaged at {path.name}"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name}: is no regular file"
        size = found.st_size
        if size != entry.get("size_bytes"):
            return f"{path.name}: {size} bytes, expected {entry.get('size_bytes')} (truncated or overwritten)"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except ValueError:
        return f"{MANIFEST} is damaged: it lists a name that no file can have"
    if digest != entry.get("sha256"):
        return f"{path.name}: its SHA-256 is not the one written (bits changed)"
    return None


def load(folder: Path) -> Saved:
    """Read a checkpoint whole.

    Raises:
        CheckpointError: it is damaged, incomplete or of another format; all problems are named.
    """
    problems = verify(folder)
    if problems:
        raise CheckpointError(f"{folder}: cannot be read: {'; '.join(problems)}")
    try:
        body = parse_json(read_bytes(folder / STATE, limit=MAX_JSON_BYTES))
        progress = _progress(body)
        parts = {part: _unpack((folder / name).read_bytes()) for part, name in ARRAYS.items()}
        counters = {name: float(value) for name, value in body["counters"].items()}
        spec, extra = body["spec"], body["extra"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {STATE} is not what this version writes: {error!r}") from error
    manifest = manifest_of(folder)
    meta = {name: manifest.get(name) for name in ("score", "serial", "versions", "update")} | {"extra": extra}
    return Saved(state=State(counters=counters, **parts), progress=progress, spec=spec, meta=meta)


def progress_of(folder: Path) -> Progress:
    """Where the job of an intact checkpoint stands; reads no arrays."""
    return _progress(parse_json(read_bytes(folder / STATE, limit=MAX_JSON_BYTES)))


def described(folder: Path) -> dict[str, Any]:
    """What an intact checkpoint says of itself: ``progress``, ``counters``, ``spec`` and ``extra``; reads no arrays."""
    body = json.loads((folder / STATE).read_bytes())
    return body if isinstance(body, dict) else {}


def shapes_of(folder: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays of ``part`` ("weights", "ema", "moments") of an intact checkpoint; reads no arrays."""
    with safe_open(folder / ARRAYS[part], framework="numpy") as file:
        return {name.removeprefix("/"): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def size_of(folder: Path) -> int:
    """Bytes of the files of a checkpoint, as its manifest says."""
    return sum(int(entry["size_bytes"]) for entry in manifest_of(folder).get("files", {}).values())


def _progress(body: Mapping[str, Any]) -> Progress:
    return Progress(**(body["progress"] | {"best": float(body["progress"]["best"])}))


def _unpack(content: bytes) -> dict[str, Array]:
    return {name.removeprefix("/"): array for name, array in arrays_from_bytes(content).items()}
