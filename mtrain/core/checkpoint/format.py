"""Read and write one checkpoint: a directory that is either complete or does not exist under its name.

::

    step-00001200/
        weights.safetensors  ema.safetensors  optimizer.safetensors   whole arrays under neutral names
        state.json           progress, counters, the spec without hosts and reporters, what the caller added
        MANIFEST.json        written last: size and SHA-256 of each file, versions, score, serial number

It is built in a temporary directory beside its final place, flushed to the disk, and then renamed. Nothing is
unpickled.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

import mtrain
from mtrain.core.checkpoint import arrays_file, together
from mtrain.core.checkpoint.arrays_file import MappedArrays
from mtrain.core.checkpoint.background import Beside
from mtrain.core.interfaces import Array, Part, Progress, SplitStream, State, StateStream
from mtrain.core.state.streams import WholeStream
from mtrain.errors import CheckpointError
from mtrain.spec import outputs
from mtrain.spec.files import open_file, parse_json, read_bytes

FORMAT = 1
"""Version of the layout. A reader refuses any other version."""
MANIFEST = "MANIFEST.json"
STATE = "state.json"
ARRAYS: Mapping[Part, str] = {
    "weights": "weights.safetensors",
    "ema": "ema.safetensors",
    "moments": "optimizer.safetensors",
}
"""File of each part of ``State``."""
CHUNK_BYTES = 8 << 20
HASHED_BESIDE_BYTES = 256 << 10
"""Size from which another thread takes the digest of an array while it is written; for less, telling it costs as much."""
MAX_JSON_BYTES = 256 << 20
"""Largest MANIFEST.json or state.json that is read, in bytes."""
_FLOAT, _INTEGER = "__float__", "__int__"
"""Key of the text of a number that JSON cannot hold."""
_HUGE = 1 << 4096


@dataclass(kw_only=True)
class Saved:
    """The content of a checkpoint."""

    state: State
    """One that was read maps its arrays, see ``arrays_file.MappedArrays``."""
    progress: Progress
    spec: Mapping[str, Any]
    """The resolved spec of the run that wrote the checkpoint; jobs leave out what ``disclosure.without_places`` does."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """``score``, ``serial``, ``versions``, and the ``extra`` that was passed to ``save``."""


# ------------------------------------------------------------------------------------------------------------- writing
class Content:
    """The content of a checkpoint that is about to be written, whose arrays come one by one."""

    def __init__(
        self, stream: StateStream, progress: Progress, *, spec: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        """See ``Saved``."""
        self.stream = stream
        self.progress = progress
        self.spec = spec
        self.meta = meta or {}
        self.reading = in_file_order(stream)
        """All arrays, in the order in which they are written."""
        self._shared: Path | None = None

    def share(self, folder: Path) -> None:
        """Agree with the other ranks of a split state whether they write their own parts into ``folder``."""
        if isinstance(self.stream, SplitStream):
            self._shared = together.agree(self.stream, folder)

    def write_shared(self, folder: Path) -> dict[str, Any] | None:
        """Write the files of arrays with the ranks that have agreed to; None if they have not."""
        if self._shared != folder:
            return None
        assert isinstance(self.stream, SplitStream)
        self._shared, self.reading = None, iter(())  # nothing is left to be read
        return together.write(self.stream, files_in(folder), creates=True)

    def read_to_its_end(self) -> None:
        """Read the arrays that are left after writing has failed: other ranks send their parts of them all the same."""
        with suppress(Exception):
            if self._shared is not None and isinstance(self.stream, SplitStream):
                together.give_up(self.stream)
            for _ in self.reading if self._shared is None else ():
                pass


def write(folder: Path, saved: Saved | Content) -> None:
    """Create the directory ``folder`` with the files of a checkpoint, the manifest last, and flush it to the disk.

    Raises:
        OSError: the disk is full or gone; ``folder`` is then incomplete.
    """
    content = (
        saved
        if isinstance(saved, Content)
        else Content(WholeStream(saved.state), saved.progress, spec=saved.spec, meta=saved.meta)
    )
    folder.mkdir(mode=0o700)
    files = content.write_shared(folder)
    if files is None:
        with Beside() as hashing, Beside() as flushing:
            writer = _Writer(hashing, flushing)
            files = {path.name: writer.write(path, _pack(content, part)) for part, path in files_in(folder).items()}
            flushing.wait()
    body = {
        "progress": asdict(saved.progress),
        "counters": content.stream.counters,
        "spec": saved.spec,
        "extra": saved.meta.get("extra", {}),
    }
    files[STATE] = _write_file(folder / STATE, _json(as_json(body)))
    score = as_json(saved.meta.get("score"))
    # Written last: whoever finds a manifest finds all files complete.
    manifest = {
        "format": FORMAT,
        "update": saved.progress.update,
        "score": score[_FLOAT] if isinstance(score, dict) else score,
        "serial": saved.meta.get("serial", 0),
        "versions": versions(),
        "files": files,
    }
    _write_file(folder / MANIFEST, _json(manifest | {"digest": _digest_of(manifest)}))
    flush_folder(folder)


def files_in(folder: Path) -> dict[Part, Path]:
    """Return the file of each part of the arrays."""
    return {part: folder / name for part, name in ARRAYS.items()}


def in_file_order(stream: StateStream) -> Iterator[Array | None]:
    """Yield all arrays of a state in the order in which a checkpoint has them. Ranks that do not write go through it too."""
    for part in ARRAYS:
        yield from stream.arrays(part, arrays_file.file_order(stream.outlines[part]))


def _pack(content: Content, part: Part) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the file of ``part``, whose arrays come next."""
    outlines = content.stream.outlines[part]
    yield arrays_file.header(outlines)
    names = arrays_file.file_order(outlines)
    yield from arrays_file.contents(islice(content.reading, len(names)), (outlines[name] for name in names))


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest's content without its ``digest``."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest_or_none(manifest: Mapping[str, Any]) -> str | None:
    """Return the digest of a manifest from an untrusted file; None if it cannot be computed."""
    try:
        return _digest_of(manifest)
    except (RecursionError, ValueError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of the software on which the content of a checkpoint depends."""
    return {"mtrain": mtrain.__version__, "python": platform.python_version(), "numpy": np.__version__}


def publish(built: Path, final: Path) -> None:
    """Rename the complete directory ``built`` to ``final``, and remove a former directory of that name."""
    former = None
    if final.exists():
        # Renamed and not deleted: killed between the two renames, a writer leaves one of them whole.
        former = built.with_name(built.name + ".former")
        final.rename(former)
    built.rename(final)
    flush_folder(final.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to the disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a new small file, flush it to the disk, and return its entry for the manifest, with size and SHA-256."""
    file = outputs.open_to_write(path, "xb", buffering=0)
    try:
        _write_all(file, memoryview(content))
    except BaseException:
        file.close()
        raise
    _flush(file)
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class _Writer:
    """Writes files while other threads take their digests, and flush those that are written."""

    def __init__(self, hashing: Beside, flushing: Beside) -> None:
        """Use two threads."""
        self._hashing = hashing
        self._flushing = flushing

    def write(self, path: Path, contents: Iterable[bytes | memoryview]) -> dict[str, Any]:
        """Write a new file, and return its entry for the manifest; another thread flushes it."""
        digest, size = hashlib.sha256(), 0
        file = outputs.open_to_write(path, "xb", buffering=0)
        try:
            for content in contents:
                view = memoryview(content)
                size += len(view)
                if len(view) < HASHED_BESIDE_BYTES:
                    digest.update(view)
                    _write_all(file, view)
                    continue
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = view[start : start + CHUNK_BYTES]
                    self._hashing.do(partial(digest.update, chunk))
                    _write_all(file, chunk)
                self._hashing.wait()  # whoever yields the next content may use the memory of this one again
        except BaseException:
            file.close()
            raise
        self._flushing.do(partial(_flush, file))
        return {"size_bytes": size, "sha256": digest.hexdigest()}


def _write_all(file: IO[bytes], view: memoryview) -> None:
    while len(view):
        # Without a buffer a write may end early, as at the end of a disk's quota.
        view = view[file.write(view) :]


def _flush(file: IO[bytes]) -> None:
    with file:
        os.fsync(file.fileno())


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace")


def as_json(value: Any) -> Any:
    """Return plain values as JSON can hold them: infinities, nan and huge integers, which it lacks, by name; see ``from_json``."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    # Python neither writes nor reads the decimal digits of longer integers.
    return {_INTEGER: hex(value)} if isinstance(value, int) and abs(value) >= _HUGE else value


def from_json(value: Any) -> Any:
    """Return the values of which ``as_json`` made ``value``, tuples as lists."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1 and isinstance(text := value.get(_FLOAT), str):
        return float(text)
    if len(value) == 1 and isinstance(text := value.get(_INTEGER), str):
        return int(text, 16)
    return {key: from_json(item) for key, item in value.items()}


# ------------------------------------------------------------------------------------------------------------- reading
def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest; an empty mapping if it is missing or unreadable. The files themselves are not checked."""
    try:
        manifest = parse_json(read_bytes(folder / MANIFEST, limit=MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}


def intact_manifest(content: bytes) -> dict[str, Any]:
    """Return the manifest in ``content`` if its digest and format are right; else an empty mapping."""
    try:
        manifest = parse_json(content)
    except ValueError:
        return {}
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return {}
    is_intact = manifest.get("digest") == _digest_or_none(manifest) and manifest.get("format") == FORMAT
    return manifest if is_intact else {}


def score_in(manifest: Mapping[str, Any]) -> float:
    """Return the score in a manifest; -inf if it has none."""
    try:
        score = float(manifest.get("score"))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return -math.inf
    return -math.inf if math.isnan(score) else score


def verify(folder: Path) -> list[str]:
    """Return all problems of a checkpoint, one sentence each; empty if it is intact. Every byte is read."""
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
    """Compare a file with its ``entry`` in the manifest; return the problem, or None if they agree."""
    if not isinstance(entry, dict) or path.name != str(path.relative_to(path.parent)):
        return f"{MANIFEST} is damaged at {path.name}"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path.name}: is no regular file"
        size = status.st_size
        if size != entry.get("size_bytes"):
            return f"{path.name}: {size} bytes, expected {entry.get('size_bytes')} (truncated or overwritten)"
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except ValueError:
        return f"{MANIFEST} is damaged: it lists a name that no file can have"
    if digest != entry.get("sha256"):
        return f"{path.name}: its SHA-256 is not the one written (bits changed)"
    return None


def load(folder: Path) -> Saved:
    """Read a checkpoint after verifying it. Its arrays are mapped, see ``arrays_file.MappedArrays``.

    Raises:
        CheckpointError: it is damaged, incomplete or of another format; the message names all problems.
    """
    problems = verify(folder)
    if problems:
        raise CheckpointError(f"{folder}: cannot be read: {'; '.join(problems)}")
    try:
        body = _body(folder)
        progress = _progress(body)
        parts = {part: MappedArrays(path) for part, path in files_in(folder).items()}
        counters = {name: float(value) for name, value in body["counters"].items()}
        spec, extra = body["spec"], body["extra"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {STATE} is not what this version writes: {error!r}") from error
    manifest = manifest_of(folder)
    meta = {name: manifest.get(name) for name in ("score", "serial", "versions", "update")} | {"extra": extra}
    return Saved(state=State(counters=counters, **parts), progress=progress, spec=spec, meta=meta)


def progress_of(folder: Path) -> Progress:
    """Return the progress of the job in an intact checkpoint, without reading its arrays."""
    return _progress(_body(folder))


def read_description(folder: Path) -> dict[str, Any]:
    """Return ``progress``, ``counters``, ``spec`` and ``extra`` of an intact checkpoint, without reading its arrays."""
    body = _body(folder)
    return body if isinstance(body, dict) else {}


def shapes_of(folder: Path, part: Part) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the arrays in ``part`` of an intact checkpoint, without reading the arrays."""
    return {name: outline.shape for name, outline in MappedArrays(folder / ARRAYS[part]).outlines.items()}


def size_of(folder: Path) -> int:
    """Return the total size of a checkpoint's files in bytes, according to its manifest."""
    return sum(int(entry["size_bytes"]) for entry in manifest_of(folder).get("files", {}).values())


def _body(folder: Path) -> Any:
    return from_json(parse_json(read_bytes(folder / STATE, limit=MAX_JSON_BYTES)))


def _progress(body: Mapping[str, Any]) -> Progress:
    return Progress(**(body["progress"] | {"best": float(body["progress"]["best"])}))
